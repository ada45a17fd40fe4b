"""Holdings: which rank holds which part of a parameter; and assembly of full tensors from parts.

`rounds_of`: an all-gather by recursive doubling, in rounds over growing blocks of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from schedlang.ir.mesh import Mesh
from schedlang.ir.placement import Layout, Segment
from schedlang.runtime.comm import world
from schedlang.runtime.comm.collectives import RankGroups
from schedlang.runtime.redistribution.execution import bucket_device, redistribute_by_route
from schedlang.runtime.redistribution.route import Route, TensorLayout, find_route, group_by_layout
from schedlang.runtime.redistribution.sharding import (
    NOWHERE,
    Array,
    Cell,
    Sharding,
    SliceArray,
    TensorSlice,
    copy_overlap,
    full_slice,
    replicate_on,
    unique_sorted,
)


def rounds_of(source: Mapping[Any, TensorLayout], sizes: Sequence[int]) -> tuple[Route, ...]:
    """Return the rounds by which all ranks of the world get some tensors in full.

    Ranks write received parts at their place in the full tensor, where their own parts are already:
    each round sends from there. Parts that no rank holds are not sent.

    sizes   of the axes of the mesh, the slowest first: blocks are runs of ranks along them
    """
    known: dict[Any, list[Sharding]] = {}
    steps = {
        name: sharding_rounds(layout.sharding, sizes, known) for name, layout in source.items()
    }
    done = list[Route]()
    for k in range(max(map(len, steps.values()), default=1) - 1):
        some = [name for name, each in steps.items() if each[k] is not each[k + 1]]
        before, after = (
            {name: TensorLayout(steps[name][at], source[name].itemsize) for name in some}
            for at in (k, k + 1)
        )
        if some:
            done.append(find_route(group_by_layout(before, after), math.prod(sizes), gaps=True))
    return tuple(done)


def sharding_rounds(
    sharding: Sharding, sizes: Sequence[int], known: dict[Any, list[Sharding]]
) -> list[Sharding]:
    """Return the sharding before the first round and after each, in places of the full tensor.

    A round changes nothing if the parts of its blocks are neither disjoint nor equal; the last
    round gives the full tensor.
    """
    if sharding.key not in known:
        every = replicate_on(
            sharding.shape, range(len(sharding.part_of_rank)), len(sharding.part_of_rank)
        )
        total = sharding.sizes[sharding.copies > 0].sum()
        found, block = list[Sharding](), 1
        for factor in (1, *_factors(sizes)):
            block *= factor
            one = _block_sharding(sharding, block)
            disjoint = one.sizes.sum() == total
            more = disjoint and (not found or one.key != found[-1].key)
            found.append(one if more else found[-1])
        found[-1] = every if found[-1].key == every.key else found[-1]
        known[sharding.key] = [*found, every]
    return known[sharding.key]


def _factors(sizes: Sequence[int]) -> Iterator[int]:
    """Yield the prime factors of all axes, of the fastest axis first."""
    for size in reversed(sizes):
        factor = 2
        while size > 1:
            while size % factor == 0:
                yield factor
                size //= factor
            factor += 1


def _block_sharding(sharding: Sharding, block: int) -> Sharding:
    """Return the sharding in which each rank has the bounding part of its block of ranks."""
    of = np.full(len(sharding.part_of_rank), NOWHERE, np.int32)
    known: dict[tuple[int, ...], int] = {}
    for low in range(0, len(of), block):
        held = unique_sorted(sharding.part_of_rank[low : low + block])
        if some := tuple(held[held != NOWHERE].tolist()):
            of[low : low + block] = known.setdefault(some, len(known))
    parts = [_bounding_part(sharding.parts, list(some)) for some in known]
    return Sharding(sharding.shape, SliceArray.from_slices(parts, len(sharding.shape)), of)


def _bounding_part(parts: SliceArray, some: list[int]) -> TensorSlice:
    """Return the smallest part that contains some parts, in places of the full tensor."""
    return tuple(
        _merge_cells(rows[np.isin(rows[:, 0], numbers[some])])
        for numbers, rows in zip(parts.numbers.T, parts.cells)
    )


def _merge_cells(rows: Array) -> tuple[tuple[int, int, int], ...]:
    """Return the cells of one dim, with adjacent ones merged."""
    order = np.argsort(rows[:, 2], kind="stable")
    starts = rows[order, 2]
    ends = np.maximum.accumulate(starts + rows[order, 3])
    first = np.flatnonzero(np.concatenate([[True], starts[1:] > ends[:-1]])[: len(starts)])
    last = np.append(first[1:], len(starts))[: len(first)] - 1
    return tuple((s, s, e - s) for s, e in zip(starts[first].tolist(), ends[last].tolist()))


K = TypeVar("K")
MESSAGE_BYTES = 16 << 20  # bytes of a message of an assembly


@dataclass(frozen=True)
class Holding:
    """The placement of the parts of one parameter.

    layout   its splits by `shard` and `pad`
    sliced   axes over which dim 0 of the local shard is split again (ZeRO)
    stages   places along `axis` (the pipeline's) that hold it; None: all
    """

    name: str
    layout: Layout
    sliced: tuple[str, ...] = ()
    axis: str | None = None
    stages: frozenset[int] | None = None

    def is_held(self, mesh: Mesh, rank: int) -> bool:
        """Return whether a rank holds a part."""
        if self.stages is None or self.axis is None:
            return True
        return mesh.index(rank, self.axis) in self.stages

    def segments(self, mesh: Mesh, rank: int) -> tuple[tuple[Segment, ...], ...]:
        """Return the runs of the (padded) full tensor that a rank holds, by dim, in local order."""
        return _segments(self.layout, self.sliced, mesh, rank)

    def is_primary(self, mesh: Mesh, rank: int) -> bool:
        """Return whether a rank is the primary holder of its part, among equal ones."""
        if not self.is_held(mesh, rank):
            return False
        here = mesh.coordinates(rank)
        splitting = {a for axis in (*self.layout.axes, *self.sliced) for a in mesh.fold(axis)}
        if self.axis is not None and self.stages is not None:
            if mesh.index(rank, self.axis) != min(self.stages):
                return False
            splitting |= set(mesh.fold(self.axis))
        if any(mesh.index_at(here, s.axis) % s.uneven.repeat for s in self.layout.splits):
            return False
        return all(place == 0 for axis, place in here.items() if axis not in splitting)

    def part(self, mesh: Mesh, rank: int) -> TensorSlice:
        """Return the part that a rank holds, without padding."""
        segments = self.segments(mesh, rank)
        return tuple(tuple(cells_of(runs, n)) for runs, n in zip(segments, self.layout.shape))

    def sharding(self, mesh: Mesh, ranks: Sequence[int] = (), world: int = 0) -> Sharding:
        """Return the sharding over a job; `ranks`: those of its `world` ranks that form the
        mesh."""
        parts, of = _sharding(self.layout, self.sliced, mesh)
        if self.stages is not None and self.axis is not None:
            place = mesh.index_at(_all_coordinates(mesh), self.axis)
            of = np.where(np.isin(place, list(self.stages)), of, NOWHERE)
        if len(ranks):
            everyone = np.full(world, NOWHERE, of.dtype)
            everyone[list(ranks)] = of
            of = everyone
        return Sharding(self.layout.shape, parts, of)

    def local_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        runs = self.segments(mesh, rank)
        return tuple(sum(run.length for run in dim) for dim in runs)


# Cached: the arguments are immutable, and each step of a proof needs the runs of every rank again.
# Bounded: a mesh of thousands of ranks has as many parts.
@lru_cache(maxsize=1 << 13)
def _segments(
    layout: Layout, sliced: tuple[str, ...], mesh: Mesh, rank: int
) -> tuple[tuple[Segment, ...], ...]:
    runs = layout.segments(mesh, mesh.coordinates(rank))
    if not sliced:
        return runs
    count, place = mesh.size(sliced), mesh.index(rank, sliced)
    length = sum(run.length for run in runs[0])
    chunk = -(-length // count)  # as torch.chunk, which fully_shard follows
    first, last = min(place * chunk, length), min((place + 1) * chunk, length)
    return (tuple(clip_runs(runs[0], first, last)), *runs[1:])


@lru_cache(maxsize=1 << 8)
def _sharding(layout: Layout, sliced: tuple[str, ...], mesh: Mesh) -> tuple[SliceArray, Array]:
    """Return the distinct parts, and which of them each rank of the mesh holds, dim by dim."""
    coordinates = _all_coordinates(mesh)
    cells, of = [], np.zeros((mesh.world, len(layout.shape)), np.int64)
    for dim, size in enumerate(layout.shape):
        over = [split.axis for split in layout.splits if split.dim == dim]
        places: list[Array] = [np.zeros(mesh.world, np.int64)]
        places += [mesh.index_at(coordinates, axis) for axis in over]
        _, first, code = np.unique(places, axis=1, return_index=True, return_inverse=True)
        known: dict[tuple[Segment, ...], int] = {}
        numbers = [
            known.setdefault(layout.segments(mesh, mesh.coordinates(rank))[dim], len(known))
            for rank in first.tolist()
        ]
        slices = mesh.size(sliced) if sliced and dim == 0 else 1
        rows = [_slices(runs, size, slices) for runs in known]
        for k, some in enumerate(rows):
            some[:, 0] += k * slices
        every = np.concatenate(rows)
        there = unique_sorted(every[:, 0])
        number = np.full(len(known) * slices, len(there))  # all empty slices are one part
        number[there] = np.arange(len(there))
        every[:, 0] = number[every[:, 0]]
        cells.append(every)
        at = mesh.index_at(coordinates, sliced) if slices > 1 else 0
        of[:, dim] = number[np.array(numbers)[code.reshape(-1)] * slices + at]
    found, part = np.unique(of, axis=0, return_inverse=True)
    return SliceArray(found, cells), part.reshape(-1).astype(np.int32)


def _slices(runs: Sequence[Segment], size: int, count: int) -> Array:
    """Return the cells of a dim that is split as by `torch.chunk`, as rows of `Parts`.

    Padding beyond the true size is left out.
    """
    spans = [(run.start, run.length) for run in runs]
    starts, lengths = np.array(spans, np.int64).reshape(-1, 2).T
    ends, total = lengths.cumsum(), int(lengths.sum())
    chunk = max(-(-total // count), 1)
    low = unique_sorted(ends - lengths, np.arange(count) * chunk)
    low = low[low < total]
    run = np.searchsorted(ends, low, "right")
    start = starts[run] + low - (ends - lengths)[run]
    length = np.minimum(start + np.diff(low, append=total), size) - start
    rows = np.stack([low // chunk, low % chunk, start, length], 1)
    return rows[length > 0]


def _all_coordinates(mesh: Mesh) -> dict[str, Any]:
    """Return the coordinates of all ranks on each axis, as arrays."""
    sizes = tuple(mesh.sizes.values())
    found = np.unravel_index(np.arange(mesh.world), sizes) if sizes else ()
    return dict(zip(mesh.sizes, found))


def clip_runs(runs: tuple[Segment, ...], first: int, last: int) -> Iterator[Segment]:
    """Yield the pieces of a chain of runs between two local positions."""
    at = 0
    for run in runs:
        low, high = max(first, at), min(last, at + run.length)
        if low < high:
            yield Segment(run.start + low - at, high - low)
        at += run.length


def cells_of(runs: tuple[Segment, ...], size: int) -> Iterator[Cell]:
    """Yield the runs of one dim within its true size: start in the part, in the full dim,
    length."""
    at = 0
    for run in runs:
        length = max(0, min(run.start + run.length, size) - run.start)
        if length:
            yield at, run.start, length
        at += run.length


@dataclass(frozen=True)
class TransferPlan:
    """A plan of transfers of parts; for full tensors also their shapes and receivers.

    routes   run one after the other: several if all ranks receive full tensors
    """

    routes: tuple[Route, ...]
    shapes: Mapping[Any, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    receivers: Mapping[Any, Sequence[int]] = field(default_factory=dict)


PartOwners = Sequence[
    tuple[Mapping[Any, torch.dtype], tuple[int, ...]]
]  # parts with their dtypes, ranks that have them
ReceiverChoice = Callable[[Sharding], Sequence[int]]
TransferPlans = dict[Any, TransferPlan]  # plans depend only on holdings, which never change
_SHORT = 1 << 12  # deliveries of a plan that is cached: large worlds have more


def _cached_plan(
    ways: TransferPlans | None, key: tuple[Any, ...], make: Callable[[], TransferPlan]
) -> TransferPlan:
    """Return the plan for a key, cached: a proof needs the same plan after each step."""
    found = ways.get(key) if ways is not None else None
    if found is None:
        found = make()
        if ways is not None and sum(len(one.kind) for one in found.routes) <= _SHORT:
            ways[key] = found
    return found


def plan_copies(
    holdings: Mapping[Any, Holding],
    sizes: Mapping[Any, int],
    mesh: Mesh,
    ways: TransferPlans | None = None,
) -> TransferPlan:
    """Return the plan that sends each part from its primary rank to all that hold the same.

    sizes   bytes of an element of each
    """

    def made() -> TransferPlan:
        source, target = {}, {}
        for name, one in holdings.items():
            sharding = one.sharding(mesh)
            speak = [rank for rank in range(mesh.world) if one.is_primary(mesh, rank)]
            source[name], target[name] = (
                TensorLayout(s, sizes[name]) for s in (sharding.restrict_to(speak), sharding)
            )
        return TransferPlan((find_route(group_by_layout(source, target), world.size()),))

    return _cached_plan(ways, ("copies", tuple(sizes.items())), made)


def shard_of(value: Tensor, holding: Holding, mesh: Mesh, rank: int) -> Tensor:
    """Return a rank's part of a full tensor, in a new tensor; padding is zero."""
    part = value.detach()
    for dim, runs in enumerate(holding.segments(mesh, rank)):
        size, pieces = part.shape[dim], [part.narrow(dim, 0, 0)]  # a rank may hold no part
        for run in runs:
            true = max(0, min(run.length, size - run.start))
            beyond = (*part.shape[:dim], run.length - true, *part.shape[dim + 1 :])
            pieces += [part.narrow(dim, min(run.start, size), true), part.new_zeros(beyond)]
        if runs != (Segment(0, size),):
            part = torch.cat(pieces, dim)
    return part.clone(memory_format=torch.contiguous_format)


def write_shard(part: Tensor, into: Tensor, holding: Holding, mesh: Mesh, rank: int) -> None:
    """Write a rank's part into the full tensor."""
    copy_overlap(part, holding.part(mesh, rank), into, full_slice(into.shape))


def zero_padding(part: Tensor, holding: Holding, mesh: Mesh, rank: int) -> Tensor:
    """Return a rank's part with zeros in the padding."""
    if holding.layout.padded == holding.layout.shape:
        return part
    made, at = torch.zeros_like(part), holding.part(mesh, rank)
    copy_overlap(part, at, made, at)
    return made


def first_rank(_: Sharding) -> Sequence[int]:
    """Choose rank 0 alone as receiver: it writes, or compares."""
    return (0,)


def assemble_tensors(
    holdings: Mapping[K, Holding],
    own: Mapping[K, Tensor],
    ranks: RankGroups,
    to: ReceiverChoice | None = None,
    ways: TransferPlans | None = None,
) -> dict[K, Tensor]:
    """Return full tensors on the CPU, on all ranks or on some, from the parts of all ranks.

    own   parts of this rank; a tensor without any part is left out, gaps are zeros
    to    returns the receivers of a tensor; None: all ranks
    ways  cached plans of this program
    """
    having = world.ranks_by_object({name: part.dtype for name, part in own.items()})
    known = tuple((tuple(found.items()), some) for found, some in having)
    key = "whole", to, tuple(holdings), known
    way = _cached_plan(ways, key, lambda: _plan_assembly(holdings, having, ranks.mesh, to))
    mine = {name: part.detach() for name, part in own.items()}
    with torch._C.DisableTorchFunction():  # function modes need not see copies
        made = {
            name: torch.zeros(shape, dtype=dtype)
            for name, (shape, dtype) in way.shapes.items()
            if ranks.rank in way.receivers[name]
        }
        if to is None:  # each round sends what earlier rounds have gathered
            for name, part in mine.items():
                write_shard(part, made[name], holdings[name], ranks.mesh, ranks.rank)
    here = mine if to is not None else made
    for one in way.routes:
        redistribute_by_route(
            one, here.__getitem__, made.__getitem__, MESSAGE_BYTES, bucket_device(ranks.device)
        )
    return made


def _plan_assembly(
    holdings: Mapping[Any, Holding], having: PartOwners, mesh: Mesh, to: ReceiverChoice | None
) -> TransferPlan:
    dtypes = {name: dtype for found, _ in having for name, dtype in found.items()}
    source, target, shapes, wanted = {}, {}, {}, {}
    for name in (name for name in holdings if name in dtypes):
        sharding, dtype = holdings[name].sharding(mesh), dtypes[name]
        there = [rank for found, some in having if name in found for rank in some]
        wanted[name] = to(sharding) if to is not None else range(mesh.world)
        source[name] = TensorLayout(sharding.restrict_to(there), dtype.itemsize)
        target[name] = TensorLayout(
            replicate_on(sharding.shape, wanted[name], mesh.world), dtype.itemsize
        )
        shapes[name] = sharding.shape, dtype
    if to is None:
        return TransferPlan(rounds_of(source, tuple(mesh.sizes.values())), shapes, wanted)
    return TransferPlan(
        (find_route(group_by_layout(source, target), world.size(), gaps=True),), shapes, wanted
    )
