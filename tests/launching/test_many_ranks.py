"""What one rank does to build and to load does not grow with the world it is in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from schedlang.ir.mesh import Mesh
from schedlang.runtime.comm import world as comm
from tests.engine.threads import Threads
from tests.many_ranks import ALIKE, SLICED, Count, being, measured, program_of, saved

FEW, MANY = 64, 1024


def _built(world: int, rank: int, rows: str) -> Count:
    with being(rank, world) as count:
        program_of(world, rows, count)
    return count


@pytest.mark.parametrize(
    ("rank", "rows"), [(0, ALIKE), (-1, ALIKE), pytest.param(-1, SLICED, marks=pytest.mark.deep)]
)
def test_a_build_of_many_ranks(rank: int, rows: str) -> None:
    """As many groups and messages, of the rank that judges and of another; calls by a tenth."""
    few, many = (_built(world, rank % world, rows) for world in (FEW, MANY))
    assert 0 < many.groups <= few.groups and few.groups <= 6
    assert many.collectives == few.collectives and many.requests == few.requests
    assert few.messages > 0 and many.calls <= 1.1 * few.calls
    if rank:  # nobody is named to it; whoever judges hears from all
        assert many.bytes <= 1.1 * few.bytes
    else:
        assert many.bytes <= 1.1 * few.bytes * MANY / FEW


@pytest.mark.parametrize("rows", [ALIKE, SLICED])
def test_a_load_of_many_ranks(tmp_path: Path, rows: str) -> None:
    """As many messages, of each rank only a digest is heard; calls do not grow with the boxes of a
    checkpoint, of which there are 16 times as many where state is sliced over all."""
    found = []
    for world in (FEW, MANY):
        with being(0, world) as count:
            program = program_of(world, rows)
            before = {n: p.detach().clone() for n, p in program.assembly.module.named_parameters()}
            saved(program, tmp_path / str(world))
            with torch.no_grad():
                for parameter in program.assembly.parameters.values():
                    parameter.zero_()
            with measured(count):
                program.load(tmp_path / str(world))
            for name, parameter in program.assembly.parameters.items():
                assert torch.equal(_local(parameter), _local(before[name])), name
        found.append(count)
    few, many = found
    assert many.collectives == few.collectives and not few.groups and not many.groups
    assert 0 < few.messages == many.messages and many.calls <= 1.25 * few.calls
    assert many.bytes <= few.bytes + 100 * (MANY - FEW)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _told() -> Any:
    """Facts of each kind, as a rank of four hears them."""
    rank = comm.rank()
    sent = {"kind": rank % 2, "many": [rank % 2] * 3000}
    return (
        comm.distinct_objects(sent),
        comm.distinct_objects(7),
        comm.distinct_objects(rank),
        comm.any_rank(rank == 3),
        comm.any_rank(False),
        comm.gather_object("x" * rank * 3000),
        comm.broadcast_object(2, rank),
    )


def test_facts_are_told_once(threads: Threads) -> None:
    """Of values that ranks share each comes once, in the order of ranks."""
    for rank, found in enumerate(threads.run(_told, 4)):
        kinds, same, each, some, none, first, of_one = found
        assert kinds == [{"kind": k, "many": [k] * 3000} for k in (0, 1)]
        assert same == [7] and each == [0, 1, 2, 3] and of_one == 2
        assert some and not none
        assert first == (["x" * n * 3000 for n in range(4)] if rank == 0 else [])


def _many_kinds() -> tuple[list[int], list[int]]:
    comm._KINDS = 2
    try:
        return comm.distinct_objects(comm.rank() // 2 * 10), comm.distinct_objects(comm.rank())
    finally:
        comm._KINDS = 64


def test_many_kinds_of_facts_are_told_at_once(threads: Threads) -> None:
    """Where more differ than are told one by one, all travel together, and each is given once."""
    assert threads.run(_many_kinds, 4) == [([0, 10], [0, 1, 2, 3])] * 4


def _named(waits: bool) -> list[int]:
    """Sums in groups of which ranks make different numbers; `waits`: torch waits for all ranks."""
    with mock.patch.dict(os.environ, {"TORCH_DIST_INIT_BARRIER": "1"} if waits else {}):
        return _sums()


def _sums() -> list[int]:
    """In groups of each rank's own, and in one of some."""
    world, x = comm.current_world(), torch.ones(1)
    found = []
    for groups in ([(0, 1), (2, 3)], [(1, 3)], [(0, 2), (1, 3)], [(0, 1, 2), (3,)]):
        group = world.make_group(groups)
        y = x * 10 ** comm.rank()
        if group is not None:
            dist.all_reduce(y, group=group)
        found.append(int(y))
    return found


@pytest.mark.parametrize("waits", [False, True])
def test_ranks_name_their_groups_alike(pool: Any, waits: bool) -> None:
    """Who is in none of some groups counts them all the same, and meets the others in the next;
    also where torch has all ranks wait for each group."""
    assert pool.run(_named, 4, waits) == [
        [11, 1, 101, 111],
        [11, 1010, 1010, 111],
        [1100, 100, 101, 111],
        [1100, 1010, 1010, 1000],
    ]


@pytest.mark.parametrize("over", ["a", "b", ("a", "c"), "b/2", ("a", "b/3"), ("a", "b", "c")])
def test_groups_are_those_of_each_rank(over: Any) -> None:
    """All groups along axes and runs: each rank is in one, and it is the rank's own."""
    mesh = Mesh((("a", 2), ("b", 6), ("c", 3)))
    groups = mesh.groups(over)
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(mesh.world))
    assert groups == sorted(groups)
    for ranks in groups:
        assert all(mesh.group(rank, over) == ranks for rank in ranks)
