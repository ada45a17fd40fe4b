"""Run one rank of a large world without the others; count what build, save and load send.

Groups use torch's `fake` backend; in the job's store the other ranks do the same as this one.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.passes.lower.build import build
from schedlang.runtime.checkpointing import archive, boxes
from schedlang.runtime.checkpointing.holdings import shard_of
from schedlang.runtime.comm import agreement
from schedlang.runtime.comm import world as comm
from schedlang.runtime.program import Program
from tests import models
from tests.proofs import make_plan, sgd

ID = "0123456789abcdef"
HEAD = """
transformer.h.*.mlp.c_fc    shard(col, over=tp)
transformer.h.*.mlp.c_proj  shard(row, over=tp)
transformer.h  pipeline_split(over=pp)
pipeline(order="1F1B", micro=2)
"""
# rows that give a rank the same part of the model in any world; and a part that shrinks with it
CONSTANT_PART = "zero(stage=3, over=fs)\nzero(stage=0, over=dp)"
SLICED = "zero(stage=3, over=(dp, fs))"
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_object",
    "gather",
    "broadcast",
    "broadcast_object_list",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all_single",
    "barrier",
    "isend",
    "irecv",
)


@dataclass
class Count:
    """What one rank did: collectives and store requests by name, groups, bytes, calls."""

    collectives: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    groups: int = 0
    bytes: int = 0  # sent or received
    calls: int = 0  # Python calls, those of C functions included
    seconds: float = 0.0

    @property
    def messages(self) -> int:
        """The number of collectives and store requests."""
        return sum(self.collectives.values()) + sum(self.requests.values())


class Room:
    """The store of a job whose other ranks always do the same as this one."""

    def __init__(self, rank: int, world: int, count: Count) -> None:
        self.rank, self.world, self.count = rank, world, count
        self.held: dict[str, bytes] = {}
        self.sums: Counter[str] = Counter()

    def _ask(self, name: str, size: int) -> None:
        self.count.requests[name] += 1
        self.count.bytes += size

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        self._ask("set", len(value))
        self.held[key] = value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Store a value if the key is free; return the stored value."""
        self._ask("compare_set", len(desired))
        return self.held.setdefault(key, desired.encode())

    def _of(self, key: str) -> bytes:
        room, _, last = key.rpartition("/")
        return self.held[f"{room}/{self.rank}" if last.isdigit() else key]

    def get(self, key: str) -> bytes:
        """The stored value."""
        self._ask("get", len(value := self._of(key)))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The stored values of several keys."""
        values = [self._of(key) for key in keys]
        self._ask("multi_get", sum(map(len, values)))
        return values

    def add(self, key: str, number: int) -> int:
        """Add to a counter; when this rank arrives, all others have arrived."""
        self._ask("add", 8)
        self.sums[key] += number
        return self.world if key.endswith("/came") else self.sums[key]

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are stored."""
        self._ask("check", sum(map(len, keys)))
        return all(key.endswith("/verdict") or self._there(key) for key in keys)

    def _there(self, key: str) -> bool:
        room, _, last = key.rpartition("/")
        return (f"{room}/{self.rank}" if last.isdigit() else key) in self.held


def _bytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[Count]:
    """Be one rank of a world in which no message arrives; count what is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    count = Count()
    room = Room(rank, world, count)
    names = [name for name in COLLECTIVES if hasattr(dist, name)]
    originals = {name: getattr(dist, name) for name in (*names, "new_group")}

    def counted(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            count.collectives[name] += 1
            count.bytes += sum(map(_bytes, args))
            return originals[name](*args, **kwargs)

        return run

    def new_group(*args: Any, **kwargs: Any) -> Any:
        count.groups += 1
        return originals["new_group"](*args, **kwargs)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    functions = {name: counted(name) for name in names} | {"new_group": new_group}
    try:
        with (
            mock.patch.multiple(dist, **functions),
            mock.patch.object(agreement, "shared_store", lambda: room),
        ):
            yield count
    finally:
        dist.destroy_process_group()


@contextmanager
def measure(count: Count) -> Iterator[Count]:
    """Count only what is sent inside the block, with its seconds and Python calls."""
    count.collectives.clear(), count.requests.clear()
    count.groups = count.bytes = 0
    profile, start = cProfile.Profile(), time.perf_counter()
    profile.enable()
    try:
        yield count
    finally:
        profile.disable()
        count.seconds = time.perf_counter() - start
        count.calls = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def build_program(world: int, rows: str, count: Count | None = None) -> Program:
    """This rank's program in a world of a multiple of 8 ranks, with two rows for each replica."""
    copies = world // 8
    ids = torch.zeros(4 * copies, 8, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    plan = make_plan(models.gpt2(4), HEAD + rows, f"dp={copies}, fs=2, tp=2, pp=2")
    with measure(count or Count()):
        return build(plan, batch, optimizer=sgd)


def save_all_ranks(program: Program, folder: Path) -> None:
    """Save as all ranks would: write the other ranks' files here, from the model's values."""
    a = program.assembly
    state = program.state_dict() if a.ranks.mesh.world == 1 else dict(_full_state(program))
    write = boxes.write_file
    peer_values: list[Any] = []

    def all_write(into: Path, id_: str, rank: int, tensors: Any, values: Mapping[Any, Any]) -> Any:
        for peer in range(a.ranks.mesh.world):
            if peer != rank:
                peer_values.append(write(into, id_, peer, _boxes_of(program, state, peer), {}))
        return write(into, id_, rank, tensors, values)

    with (
        mock.patch.object(archive, "write_file", all_write),
        mock.patch.object(comm, "gather_object", lambda local: [local, *peer_values]),
    ):
        program.save(folder)


def _full_state(program: Program) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in models.gpt2(4).named_parameters():
        yield name, parameter.detach()


def _boxes_of(program: Program, state: Mapping[str, Tensor], rank: int) -> list[boxes.BoxedTensor]:
    """The boxes that another rank saves."""
    a = program.assembly
    tensors = []
    for name, holding in a.holdings.items():
        if holding.is_primary(a.ranks.mesh, rank):
            part = shard_of(state[name], holding, a.ranks.mesh, rank)
            region = holding.part(a.ranks.mesh, rank)
            tensors.append(boxes.BoxedTensor(("model", name), part, holding.layout.shape, region))
    return tensors
