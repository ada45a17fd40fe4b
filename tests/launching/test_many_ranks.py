"""Build and load on one rank: their cost does not grow with the world size."""

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
from tests.many_ranks import (
    CONSTANT_PART,
    SLICED,
    Count,
    build_program,
    fake_rank,
    measure,
    save_all_ranks,
)

SMALL_WORLD, LARGE_WORLD = 64, 1024


def build_count(world: int, rank: int, rows: str) -> Count:
    with fake_rank(rank, world) as count:
        build_program(world, rows, count)
    return count


@pytest.mark.parametrize(
    ("rank", "rows"),
    [(0, CONSTANT_PART), (-1, CONSTANT_PART), pytest.param(-1, SLICED, marks=pytest.mark.deep)],
)
def test_a_build_of_many_ranks(rank: int, rows: str) -> None:
    """Equal numbers of groups and messages, on the deciding rank and on another; calls grow by a
    tenth."""
    few, many = (build_count(world, rank % world, rows) for world in (SMALL_WORLD, LARGE_WORLD))
    assert 0 < many.groups <= few.groups and few.groups <= 6
    assert many.collectives == few.collectives and many.requests == few.requests
    assert few.messages > 0 and many.calls <= 1.1 * few.calls
    if rank:  # only the deciding rank receives from all
        assert many.bytes <= 1.1 * few.bytes
    else:
        assert many.bytes <= 1.1 * few.bytes * LARGE_WORLD / SMALL_WORLD


@pytest.mark.parametrize("rows", [CONSTANT_PART, SLICED])
def test_a_load_of_many_ranks(tmp_path: Path, rows: str) -> None:
    """Equal numbers of messages, of each rank only a digest; calls do not grow with the boxes of a
    checkpoint, of which sliced state has 16 times as many."""
    counts = []
    for world in (SMALL_WORLD, LARGE_WORLD):
        with fake_rank(0, world) as count:
            program = build_program(world, rows)
            initial = {n: p.detach().clone() for n, p in program.assembly.module.named_parameters()}
            save_all_ranks(program, tmp_path / str(world))
            with torch.no_grad():
                for parameter in program.assembly.parameters.values():
                    parameter.zero_()
            with measure(count):
                program.load(tmp_path / str(world))
            for name, parameter in program.assembly.parameters.items():
                assert torch.equal(local_part(parameter), local_part(initial[name])), name
        counts.append(count)
    few, many = counts
    assert many.collectives == few.collectives and not few.groups and not many.groups
    assert 0 < few.messages == many.messages and many.calls <= 1.25 * few.calls
    assert many.bytes <= few.bytes + 100 * (LARGE_WORLD - SMALL_WORLD)


def local_part(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gather_facts() -> Any:
    """Return facts of each kind, as a rank of four gathers them."""
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
    """Values that ranks share arrive once, in the order of ranks."""
    for rank, facts in enumerate(threads.run(gather_facts, 4)):
        kinds, shared, gathered, any_true, any_false, on_first, of_one = facts
        assert kinds == [{"kind": k, "many": [k] * 3000} for k in (0, 1)]
        assert shared == [7] and gathered == [0, 1, 2, 3] and of_one == 2
        assert any_true and not any_false
        assert on_first == (["x" * n * 3000 for n in range(4)] if rank == 0 else [])


def gather_many_kinds() -> tuple[list[int], list[int]]:
    comm._KINDS = 2
    try:
        return comm.distinct_objects(comm.rank() // 2 * 10), comm.distinct_objects(comm.rank())
    finally:
        comm._KINDS = 64


def test_many_kinds_of_facts_are_told_at_once(threads: Threads) -> None:
    """Many different values are gathered together, and each is sent once."""
    assert threads.run(gather_many_kinds, 4) == [([0, 10], [0, 1, 2, 3])] * 4


def sum_in_groups(waits: bool) -> list[int]:
    """Sum in groups that ranks create in different numbers; `waits`: torch waits for all ranks."""
    with mock.patch.dict(os.environ, {"TORCH_DIST_INIT_BARRIER": "1"} if waits else {}):
        return sum_in_own_groups()


def sum_in_own_groups() -> list[int]:
    """Sum in groups of each rank's own, and in one of some ranks."""
    world, x = comm.current_world(), torch.ones(1)
    totals = []
    for groups in ([(0, 1), (2, 3)], [(1, 3)], [(0, 2), (1, 3)], [(0, 1, 2), (3,)]):
        group = world.make_group(groups)
        y = x * 10 ** comm.rank()
        if group is not None:
            dist.all_reduce(y, group=group)
        totals.append(int(y))
    return totals


@pytest.mark.parametrize("waits", [False, True])
def test_ranks_name_their_groups_alike(pool: Any, waits: bool) -> None:
    """A rank outside of some groups counts them too, and finds the others in the next; also where
    torch makes all ranks wait for each group."""
    assert pool.run(sum_in_groups, 4, waits) == [
        [11, 1, 101, 111],
        [11, 1010, 1010, 111],
        [1100, 100, 101, 111],
        [1100, 1010, 1010, 1000],
    ]


@pytest.mark.parametrize("over", ["a", "b", ("a", "c"), "b/2", ("a", "b/3"), ("a", "b", "c")])
def test_groups_are_those_of_each_rank(over: Any) -> None:
    """Each rank is in one of the groups along axes, and it is the rank's own."""
    mesh = Mesh((("a", 2), ("b", 6), ("c", 3)))
    groups = mesh.groups(over)
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(mesh.world))
    assert groups == sorted(groups)
    for ranks in groups:
        assert all(mesh.group(rank, over) == ranks for rank in ranks)
