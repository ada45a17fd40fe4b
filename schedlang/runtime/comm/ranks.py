"""A program's ranks: the place of this one on the mesh, its device, and its groups along axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal, guess, unknown
from schedlang.ir.mesh import Mesh
from schedlang.runtime import device as devices
from schedlang.runtime.comm import world as comm
from schedlang.runtime.comm.collectives import Group

T = TypeVar("T")


class Ranks:
    """All that a program knows of whom it talks to; made once, when it is built.

    device  where this rank computes: collectives of a step are given tensors that lie there
    world   the job: its backends, its time-out, and a group for facts of the host

    Groups are made when first asked for: all ranks must ask for the same ones in the same order.
    """

    def __init__(self, mesh: Mesh, device: torch.device = devices.HOST) -> None:
        self.world = comm.here()
        if self.world.size != mesh.world:
            raise Refusal(_wrong_world(mesh, self.world.size))
        self.mesh, self.device = mesh, device
        self.rank = self.world.rank
        self.at = mesh.coordinates(self.rank)
        self._along: dict[tuple[str, ...], Group] = {}  # asked for by every sharded module

    def place(self, axis: str) -> int:
        """The place of this rank along an axis or a view, from 0; refuses others (S204)."""
        if axis not in self.mesh.names:
            raise Refusal(
                Diagnostic(
                    "S204",
                    f"the mesh has no axis `{axis}`",
                    notes=(f"the mesh is {self.mesh}",),
                    helps=(guess(axis, self.mesh.names, "it has"),) if self.mesh.names else (),
                    facts=unknown(axis, self.mesh.names),
                )
            )
        return self.mesh.index(self.rank, axis)

    def group(self, over: str | Sequence[str]) -> Group:
        """This rank's group along axes; a group of one has no process group."""
        name = (over,) if isinstance(over, str) else tuple(over)
        if name not in self._along:
            axes = self.mesh.fold(over)
            made = self._made(name, self.mesh.groups(axes), self.mesh.index_at(self.at, axes))
            if isinstance(over, str) and "." in over:  # numbered by the axes as they are named
                made = self._ordered(made, over)
            self._along[name] = made
        return self._along[name]

    def _ordered(self, group: Group, over: str) -> Group:
        """The same ranks, counted by the axes in the order in which they are named."""
        ranks = self.mesh.group(self.rank, over)
        if ranks == group.ranks:
            return group
        order = tuple(group.ranks.index(rank) for rank in ranks)
        return replace(group, ranks=ranks, rank=ranks.index(self.rank), order=order)

    def again(self, over: str | Sequence[str], purpose: str) -> comm.ProcessGroup | None:
        """A further process group over the same ranks, for traffic that waits for no other."""
        return self.world.made(self.mesh.groups(self.mesh.fold(over)), purpose)

    def between(self, over: str | Sequence[str], purpose: str = "") -> comm.ProcessGroup | None:
        """A process group over the same ranks, in which no pair's messages wait for another's."""
        return self.world.between(self.mesh.groups(self.mesh.fold(over)), purpose)

    def on_host(self, over: str | Sequence[str], purpose: str = "") -> comm.ProcessGroup | None:
        """A process group over the same ranks for facts of the host; None for a group of one."""
        groups = self.mesh.groups(self.mesh.fold(over))
        return self.world.on_host(groups, purpose) if len(groups[0]) > 1 else None

    @property
    def one_way(self) -> bool:
        """Whether messages of two ranks in both directions could stop each other in one group."""
        return self.world.queues(self.device)

    def subset(self, name: str, groups: Sequence[tuple[int, ...]]) -> Group | None:
        """This rank's group among disjoint ones that need not cover the world; None if in none."""
        mine = next((ranks for ranks in groups if self.rank in ranks), None)
        if mine is None:
            self.world.made(groups)
            return None
        return self._made((name,), groups, mine.index(self.rank))

    def _made(self, axes: tuple[str, ...], groups: Sequence[tuple[int, ...]], place: int) -> Group:
        mine = next(ranks for ranks in groups if self.rank in ranks)
        if max(map(len, groups)) == 1:
            return Group(axes, mine, place, device=self.device)
        made = self.world.made(groups)
        return Group(axes, mine, place, made if len(mine) > 1 else None, device=self.device)

    def device_mesh(self, shard: Sequence[str]) -> DeviceMesh:
        """A mesh for fully_shard, of a group made here."""
        inner = self.group(tuple(shard))
        assert inner.pg is not None
        return DeviceMesh.from_group(inner.pg, self.device.type, mesh_dim_names=("shard",))


@contextmanager
def on_ranks(ranks: Sequence[int] | None) -> Iterator[None]:
    """Make these ranks of the job the world, inside the block (S607); None: it stays as it is."""
    if ranks is None:
        yield
        return
    job = comm.job()
    part = tuple(ranks)
    fits = all(type(rank) is int and 0 <= rank < job.size for rank in part)
    fits = fits and part == tuple(sorted({*part}))
    if not fits or job.rank not in part:
        named = ", ".join(map(str, part)) or "none"
        legal = f"they are some of 0 to {job.size - 1}, rising"
        why = f"rank {job.rank} is none of them" if fits else legal
        title = f"a program for ranks {named} cannot be built here: {why}"
        helps = ("call `build(ranks=...)` on the ranks that it names, and on no others",)
        raise Refusal(Diagnostic("S607", title, helps=helps))
    with comm.within(part):
        yield


def in_its_world(cls: type[T]) -> type[T]:
    """A program whose public methods run in its world, where that is a part of the job."""
    for name, found in list(vars(cls).items()):
        if isinstance(found, FunctionType) and not name.startswith("_"):
            setattr(cls, name, _in_world(found))
    return cls


def _in_world(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = self.assembly.ranks.world.part
        if not part:
            return method(self, *args, **kwargs)
        with comm.within(part):
            return method(self, *args, **kwargs)

    return run


def _wrong_world(mesh: Mesh, world: int) -> Diagnostic:
    run = f"torchrun --nproc-per-node {mesh.world} ..."
    return Diagnostic(
        "S607",
        f"the mesh needs {mesh.world} ranks, and this job has {world}",
        notes=(f"the mesh is {mesh}",),
        helps=(
            f"start {mesh.world}: `{run}`",
            f"or use a mesh of {world}: `--mesh dp={world}`",
        ),
    )
