"""Ends of a transfer: a program or a state dict, its local tensors, and its layout.

Each rank sends the layout of its end to all ranks; `EndTensors` is the result on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal, kind_of
from schedlang.ir.mesh import Mesh
from schedlang.ir.placement import Segment, merge_segments
from schedlang.runtime.checkpointing import archive
from schedlang.runtime.checkpointing.holdings import Holding, cells_of, clip_runs
from schedlang.runtime.checkpointing.index import DTYPE_NAMES, DTYPES
from schedlang.runtime.checkpointing.optimizer_state import (
    SavedOptimizer,
    optimizer_tensors,
    trained_parameters,
)
from schedlang.runtime.comm import world as comm
from schedlang.runtime.program import Program
from schedlang.runtime.redistribution.route import TensorLayout
from schedlang.runtime.redistribution.sharding import (
    NOWHERE,
    Sharding,
    SliceArray,
    TensorSlice,
    full_slice,
)
from schedlang.runtime.storage.offloaded_gradients import local_tensor

Ranks = Sequence[int]


@dataclass(frozen=True)
class EndTensors:
    """The tensors of one end on all ranks: their layouts and dtypes.

    aliases  other names of a tensor -> its name in `layouts`
    """

    layouts: dict[str, TensorLayout]
    dtypes: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    program: bool = False

    def name_of(self, name: str) -> str | None:
        """Return the name in `layouts` of a tensor; None if there is no such tensor."""
        return name if name in self.layouts else self.aliases.get(name)


# -- programs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgramLayout:
    """The layout of a program: its mesh, and the holdings of its parameters; equal on its ranks.

    buffers  holdings of the buffers' valid values; each rank has a copy of every buffer
    ranks    ranks of the job, in the order of the mesh
    """

    axes: tuple[tuple[str, int], ...]
    views: tuple[tuple[str, tuple[str, ...]], ...]
    ranks: tuple[int, ...]
    holdings: tuple[Holding, ...]
    buffers: tuple[Holding, ...]
    dtypes: tuple[tuple[str, str], ...]
    ties: tuple[tuple[str, ...], ...]

    def tensors(self, world: int, *, takes: bool) -> EndTensors:
        """Return the parameters and buffers in a job of `world` ranks.

        `takes`: the program is the target, which needs buffers on all its ranks; else only their
        valid copies.
        """
        mesh, kinds = Mesh(self.axes, self.views), dict(self.dtypes)
        buffers = (
            [replace(holding, stages=None) for holding in self.buffers] if takes else self.buffers
        )
        layouts = {
            holding.name: TensorLayout(
                holding.sharding(mesh, self.ranks, world), size_of(kinds[holding.name])
            )
            for holding in (*self.holdings, *buffers)
        }
        aliases = {o: names[0] for names in self.ties for o in names[1:] if names[0] in layouts}
        return EndTensors(layouts, kinds, aliases, True)


def size_of(dtype: str) -> int:
    """Return the bytes of an element of a dtype."""
    return DTYPES[dtype].itemsize


class ProgramEnd:
    """A program as one end of a transfer."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.anchor: object = program

    def layout(self) -> ProgramLayout:
        """Return the program's layout, to send it to all ranks."""
        assembly = self.program.assembly
        buffers = assembly.saved_buffers.items()
        return ProgramLayout(
            assembly.ranks.mesh.axes,
            assembly.ranks.mesh.views,
            tuple(assembly.ranks.world.members),
            tuple(assembly.holdings.values()),
            tuple(assembly.buffer_holding(name, buffer.shape) for name, buffer in buffers),
            tuple(archive.tensor_dtypes(self.program).items()),
            assembly.ties,
        )

    def local(self) -> dict[str, Tensor]:
        """This rank's parts, written in place."""
        return archive.model_parts(self.program)

    def moments(self) -> dict[str, Tensor]:
        """Return this rank's parts of the optimizer's state, by `moment_name` names."""
        return {moment_name(*key): part for key, part in optimizer_tensors(self.program).items()}

    def allocate_state(self, optim: SavedOptimizer) -> dict[tuple[str, str], Tensor]:
        """Allocate zeros for an optimizer's state, in the layout of the parameters."""
        return {
            (name, key): torch.zeros_like(parameter, dtype=DTYPES[dtype], requires_grad=False)
            for name, parameter in trained_parameters(self.program).items()
            for key, dtype in optim.parts.get(name, {}).items()
        }

    def drop_old_copies(self) -> None:
        """Drop gathered or moved copies of the old values, after new values were written."""
        with comm.enter_ranks(self.program.assembly.ranks.world.ranks_in_job):
            archive.settle_loaded(self.program)


def moment_name(name: str, key: str) -> str:
    """Return the name of an optimizer's tensor `key` of a parameter; no parameter has this name."""
    return f"{key} of {name}"


# -- state dicts -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateLayout:
    """The layout of a state dict on one rank: (name, full shape, dtype, part) of each tensor."""

    parts: tuple[tuple[str, tuple[int, ...], str, TensorSlice], ...]
    aliases: tuple[tuple[str, str], ...] = ()


def state_tensors(layouts: Sequence[tuple[StateLayout, Ranks]], world: int) -> EndTensors:
    """Join the layouts of state dicts on ranks.

    Raises Refusal S635 if ranks differ in a tensor's shape or dtype.
    """
    forms: dict[str, tuple[tuple[int, ...], str]] = {}
    places: dict[str, dict[TensorSlice, list[int]]] = {}
    for state, ranks in layouts:
        for name, shape, dtype, part in state.parts:
            if forms.setdefault(name, (shape, dtype)) != (shape, dtype):
                raise Refusal.of(
                    "S635",
                    f"ranks differ in `{name}`: it is {forms[name][1]}{[*forms[name][0]]} on"
                    f" one of them, and {dtype}{[*shape]} on another",
                    helps=("pass the same state on every rank, or its parts as DTensors",),
                )
            places.setdefault(name, {}).setdefault(part, []).extend(ranks)
    shared: dict[Any, Sharding] = {}
    tensors = {}
    for name, (shape, dtype) in forms.items():
        key = shape, tuple((part, tuple(ranks)) for part, ranks in places[name].items())
        if key not in shared:
            part_of = np.full(world, NOWHERE, np.int32)
            for number, ranks in enumerate(places[name].values()):
                part_of[ranks] = number
            parts = SliceArray.from_slices(tuple(places[name]), len(shape))
            shared[key] = Sharding(shape, parts, part_of)
        tensors[name] = TensorLayout(shared[key], size_of(dtype))
    aliases = {
        alias: name for state, _ in layouts for alias, name in state.aliases if alias not in tensors
    }
    return EndTensors(tensors, {name: dtype for name, (_, dtype) in forms.items()}, aliases)


class StateEnd:
    """A state dict as one end of a transfer: plain tensors are full, DTensors are shards."""

    def __init__(self, state: Mapping[str, Any], anchor: object) -> None:
        lasts = isinstance(anchor, Tensor | nn.Module)  # an empty state dict has no anchor
        self.anchor = anchor if lasts else self
        by_memory: dict[Any, str] = {}
        self.state: dict[str, Tensor] = {}
        self.also: dict[str, str] = {}
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                kind = kind_of(value) if not isinstance(value, Tensor) else "a sparse tensor"
                raise end_refusal(f"`{name}` of a state dict is {kind}, not a dense tensor")
            local = local_tensor(value)
            owner = by_memory.setdefault(_memory(value, local), name) if local.numel() else name
            if owner == name:
                self.state[name] = value
            else:
                self.also[name] = owner

    def layout(self) -> StateLayout:
        """Return the layout on this rank, to send it to all ranks."""
        parts = tuple(
            (name, tuple(value.shape), DTYPE_NAMES[value.dtype], local_slice(name, value))
            for name, value in self.state.items()
        )
        return StateLayout(parts, tuple(self.also.items()))

    def local(self) -> dict[str, Tensor]:
        """This rank's parts, written in place."""
        return {name: local_tensor(value) for name, value in self.state.items()}

    def drop_old_copies(self) -> None:
        """Do nothing after new values were written."""


def _memory(value: Tensor, t: Tensor) -> tuple[Any, ...]:
    start = t.untyped_storage().data_ptr(), t.storage_offset()
    return *start, t.device, t.dtype, t.stride(), tuple(t.shape), tuple(value.shape)


def local_slice(name: str, value: Tensor) -> TensorSlice:
    """Return this rank's part of a tensor: of a DTensor its shard, else the full tensor.

    Raises Refusal S642 for placements other than `Shard` and `Replicate`.
    """
    if not hasattr(value, "placements"):
        return full_slice(value.shape)
    runs = [[Segment(0, size)] for size in value.shape]
    sharded: Any = value
    mesh = sharded.device_mesh
    coordinate = mesh.get_coordinate()
    for axis, placement in enumerate(sharded.placements):
        if placement.is_replicate():
            continue
        if placement.is_partial() or not hasattr(placement, "dim"):
            raise end_refusal(
                f"`{name}` is a DTensor with the placement `{placement}`",
                "redistribute it first: only `Shard` and `Replicate` say where values lie",
            )
        dim, count = placement.dim % value.ndim, mesh.size(axis)
        axis_rank = coordinate[axis] if coordinate is not None else count
        strips = _chunks(runs[dim], getattr(placement, "split_factor", 1))
        runs[dim] = [run for strip in strips for run in _chunk(strip, count, axis_rank)]
    part = tuple(
        tuple(cells_of(tuple(merge_segments(run)), n)) for run, n in zip(runs, value.shape)
    )
    part_shape = tuple(sum(n for *_, n in dim) for dim in part)
    if part_shape != tuple(local_tensor(value).shape):
        raise end_refusal(
            f"`{name}` is a DTensor of {list(local_tensor(value).shape)} here, where its placements"
            " give"
            f" {list(part_shape)}"
        )
    return part


def _chunks(runs: list[Segment], count: int) -> Iterator[list[Segment]]:
    """Yield `count` chunks of runs, as `torch.chunk` splits them."""
    for index in range(count):
        yield _chunk(runs, count, index)


def _chunk(runs: list[Segment], count: int, index: int) -> list[Segment]:
    length = sum(run.length for run in runs)
    size = -(-length // count)
    return list(clip_runs(tuple(runs), min(index * size, length), min((index + 1) * size, length)))


def end_refusal(message: str, *helps: str) -> Refusal:
    """Return the refusal of an object that cannot be an end of a transfer (S642)."""
    return Refusal.of(
        "S642",
        message,
        helps=helps or ("a transfer goes between programs, modules, and state dicts of tensors",),
    )
