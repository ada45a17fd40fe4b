"""This job's ranks: the process group of the world, and one group per axis of the mesh."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from schedlang.diagnostic import Diagnostic, Refusal, guess
from schedlang.mesh import Mesh
from schedlang.runtime.collectives.agreement import WAIT, all_come
from schedlang.runtime.collectives.collective import Group

_PR_SET_PDEATHSIG = 1
TIMEOUT = timedelta(minutes=10)  # of a collective that others do not join
_SETTLE = 0.1  # seconds at the end of a process for gloo's threads to let go of their tensors


def join_world(device: str | None = None, wait: float = WAIT) -> None:
    """Join the job that torchrun started, if there is one and nobody has joined yet.

    Raises Refusal S651 where other ranks do not come for so many seconds.
    """
    _settle_at_exit()
    _end_with_torchrun()
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        all_come(wait)
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=TIMEOUT)


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A process group that waits as long as that of the world does; torch's own waits otherwise."""
    return dist.new_group(list(ranks), timeout=_patience())  # type: ignore[no-any-return]


def _patience() -> timedelta | None:
    """The time-out of the world's group.  Private: torch tells it nowhere else."""
    world = dist.group.WORLD
    assert world is not None
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    try:
        found = world._get_backend(torch.device(kind)).options._timeout
    except (AttributeError, RuntimeError):  # a backend without options: the one of the user's torch
        return None
    return found if isinstance(found, timedelta) else None


@cache
def _end_with_torchrun() -> None:
    """Have Linux end this rank with the torchrun that started it.

    An agent that is killed ends nobody, and its ranks would hold their devices and wait for each
    other.  Of other starters nothing is known: Linux counts the end of the thread that started us.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != 1:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@cache
def _settle_at_exit() -> None:
    """Before the interpreter ends, give gloo's threads a moment in which they can take its lock.

    A thread drops the tensors of a collective after it has told the waiting rank; if it needs the
    interpreter for that and the interpreter is ending, Python ends the thread inside a C++
    destructor, and the process aborts.  The groups live as long as a Program holds them, so
    `destroy_process_group` does not join the threads.
    """
    atexit.register(time.sleep, _SETTLE)


class Ranks:
    """The place of this process on a mesh; groups are made when first asked for.

    All ranks must ask for the same groups in the same order.
    """

    def __init__(self, mesh: Mesh) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != mesh.world:
            raise Refusal(_wrong_world(mesh, world))
        self.mesh = mesh
        self.rank = dist.get_rank() if world > 1 else 0
        self.at = mesh.coordinates(self.rank)
        self._groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}
        self._along: dict[tuple[str, ...], Group] = {}  # asked for by every sharded module

    def place(self, axis: str) -> int:
        """The place of this rank along an axis or a view, from 0; refuses others (S204)."""
        if axis not in self.mesh.names:
            raise Refusal(
                Diagnostic(
                    "S204", f"the mesh has no axis `{axis}`", notes=(f"the mesh is {self.mesh}",),
                    helps=(guess(axis, self.mesh.names, "it has"),) if self.mesh.names else (),
                )
            )  # fmt: skip
        return self.mesh.index(self.rank, axis)

    def group(self, over: str | Sequence[str]) -> Group:
        """This rank's group along axes; a group of one has no process group."""
        name = (over,) if isinstance(over, str) else tuple(over)
        if name not in self._along:
            axes = self.mesh.fold(over)
            place = self.mesh.index(self.rank, axes)
            made = self._made(name, self.mesh.groups(axes), place)
            self._along[name] = self._ordered(made, over) if isinstance(over, str) else made
        return self._along[name]

    def _ordered(self, group: Group, over: str) -> Group:
        """The same ranks, counted by the axes in the order in which they are named."""
        ranks = self.mesh.group(self.rank, over)
        if ranks == group.ranks:
            return group
        order = tuple(group.ranks.index(rank) for rank in ranks)
        return replace(group, ranks=ranks, rank=ranks.index(self.rank), order=order)

    def again(self, over: str | Sequence[str]) -> dist.ProcessGroup | None:
        """A second process group over the same ranks, for traffic the other way."""
        groups = self.mesh.groups(self.mesh.fold(over))
        found = None
        for ranks in groups:
            made = new_group(ranks) if len(ranks) > 1 else None
            found = made if self.rank in ranks else found
        return found

    @property
    def one_way(self) -> bool:
        """Whether messages of two ranks in both directions could stop each other in one group."""
        return torch.cuda.is_available() and dist.is_initialized() and dist.get_backend() == "nccl"

    def subset(self, name: str, groups: Sequence[tuple[int, ...]]) -> Group | None:
        """This rank's group among disjoint ones that need not cover the world; None if in none."""
        mine = next((ranks for ranks in groups if self.rank in ranks), None)
        if mine is None:
            for ranks in groups:
                if len(ranks) > 1:
                    new_group(ranks)
            return None
        return self._made((name,), groups, mine.index(self.rank))

    def _made(self, axes: tuple[str, ...], groups: Sequence[tuple[int, ...]], place: int) -> Group:
        mine = next(ranks for ranks in groups if self.rank in ranks)
        if len(mine) == 1 and all(len(ranks) == 1 for ranks in groups):
            return Group(axes, mine, place)
        key = tuple(sorted(groups))
        if key not in self._groups:
            self._groups[key] = self._new(groups)
        return Group(axes, mine, place, self._groups[key] if len(mine) > 1 else None)

    def _new(self, groups: Sequence[tuple[int, ...]]) -> dist.ProcessGroup:
        if groups == [tuple(range(self.mesh.world))]:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        found = None
        for ranks in groups:
            if len(ranks) > 1:
                made = new_group(ranks)
                found = made if self.rank in ranks else found
        assert found is not None or any(len(r) == 1 for r in groups)
        return found  # type: ignore[return-value]

    def device_mesh(self, shard: Sequence[str]) -> DeviceMesh:
        """A mesh for fully_shard, of a group made here."""
        inner = self.group(tuple(shard))
        assert inner.pg is not None
        kind = "cuda" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu"
        return DeviceMesh.from_group(inner.pg, kind, mesh_dim_names=("shard",))


def _wrong_world(mesh: Mesh, world: int) -> Diagnostic:
    run = f"torchrun --nproc-per-node {mesh.world} ..."
    return Diagnostic(
        "S607",
        f"the mesh needs {mesh.world} ranks, and this job has {world}",
        notes=(f"the mesh is {mesh}",),
        helps=(
            f"start {mesh.world}: `{run}`",
            f"or give a mesh of {world}, as `--mesh dp={world}`",
        ),
    )
