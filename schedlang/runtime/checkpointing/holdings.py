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
from schedlang.ir.placement import Layout, Segment, slicing_dim
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
    cache: dict[Any, list[Sharding]] = {}
    steps = {
        name: sharding_rounds(layout.sharding, sizes, cache) for name, layout in source.items()
    }
    routes = list[Route]()
    for k in range(max(map(len, steps.values()), default=1) - 1):
        changed = [name for name, steps_of in steps.items() if steps_of[k] is not steps_of[k + 1]]
        before, after = (
            {name: TensorLayout(steps[name][step], source[name].itemsize) for name in changed}
            for step in (k, k + 1)
        )
        if changed:
            routes.append(find_route(group_by_layout(before, after), math.prod(sizes), gaps=True))
    return tuple(routes)


def sharding_rounds(
    sharding: Sharding, sizes: Sequence[int], cache: dict[Any, list[Sharding]]
) -> list[Sharding]:
    """Return the sharding before the first round and after each, in places of the full tensor.

    A round changes nothing if the parts of its blocks are neither disjoint nor equal; the last
    round gives the full tensor.
    """
    if sharding.key not in cache:
        replicated = replicate_on(
            sharding.shape, range(len(sharding.part_of_rank)), len(sharding.part_of_rank)
        )
        total = sharding.sizes[sharding.copies > 0].sum()
        rounds, block = list[Sharding](), 1
        for factor in (1, *_factors(sizes)):
            block *= factor
            block_sharding = _block_sharding(sharding, block)
            disjoint = block_sharding.sizes.sum() == total
            grows = disjoint and (not rounds or block_sharding.key != rounds[-1].key)
            rounds.append(block_sharding if grows else rounds[-1])
        rounds[-1] = replicated if rounds[-1].key == replicated.key else rounds[-1]
        cache[sharding.key] = [*rounds, replicated]
    return cache[sharding.key]


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
    part_of = np.full(len(sharding.part_of_rank), NOWHERE, np.int32)
    block_numbers: dict[tuple[int, ...], int] = {}
    for start in range(0, len(part_of), block):
        held_parts = unique_sorted(sharding.part_of_rank[start : start + block])
        if block_parts := tuple(held_parts[held_parts != NOWHERE].tolist()):
            part_of[start : start + block] = block_numbers.setdefault(
                block_parts, len(block_numbers)
            )
    parts = [_bounding_part(sharding.parts, list(block_parts)) for block_parts in block_numbers]
    return Sharding(sharding.shape, SliceArray.from_slices(parts, len(sharding.shape)), part_of)


def _bounding_part(parts: SliceArray, indices: list[int]) -> TensorSlice:
    """Return the smallest part that contains some parts, in places of the full tensor."""
    return tuple(
        _merge_cells(rows[np.isin(rows[:, 0], numbers[indices])])
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
    sliced   axes over which the local shard is split again (ZeRO), along its `slicing_dim`
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
        coordinates = mesh.coordinates(rank)
        splitting = {a for axis in (*self.layout.axes, *self.sliced) for a in mesh.fold(axis)}
        if self.axis is not None and self.stages is not None:
            if mesh.index(rank, self.axis) != min(self.stages):
                return False
            splitting |= set(mesh.fold(self.axis))
        if any(mesh.index_at(coordinates, s.axis) % s.uneven.repeat for s in self.layout.splits):
            return False
        return all(index == 0 for axis, index in coordinates.items() if axis not in splitting)

    def part(self, mesh: Mesh, rank: int) -> TensorSlice:
        """Return the part that a rank holds, without padding."""
        segments = self.segments(mesh, rank)
        return tuple(tuple(cells_of(runs, n)) for runs, n in zip(segments, self.layout.shape))

    def sharding(self, mesh: Mesh, ranks: Sequence[int] = (), world: int = 0) -> Sharding:
        """Return the sharding over a job; `ranks`: those of its `world` ranks that form the
        mesh."""
        parts, part_of = _sharding(self.layout, self.sliced, mesh)
        if self.stages is not None and self.axis is not None:
            stage = mesh.index_at(_all_coordinates(mesh), self.axis)
            part_of = np.where(np.isin(stage, list(self.stages)), part_of, NOWHERE)
        if len(ranks):
            all_ranks = np.full(world, NOWHERE, part_of.dtype)
            all_ranks[list(ranks)] = part_of
            part_of = all_ranks
        return Sharding(self.layout.shape, parts, part_of)

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
    count, index = mesh.size(sliced), mesh.index(rank, sliced)
    dim = slicing_dim(layout.local_shape(mesh), count)
    length = sum(run.length for run in runs[dim])
    chunk = -(-length // count)  # as torch.chunk, which fully_shard follows
    first, last = min(index * chunk, length), min((index + 1) * chunk, length)
    return (*runs[:dim], tuple(clip_runs(runs[dim], first, last)), *runs[dim + 1 :])


@lru_cache(maxsize=1 << 8)
def _sharding(layout: Layout, sliced: tuple[str, ...], mesh: Mesh) -> tuple[SliceArray, Array]:
    """Return the distinct parts, and which of them each rank of the mesh holds, dim by dim."""
    coordinates = _all_coordinates(mesh)
    count = mesh.size(sliced) if sliced else 1
    sliced_dim = slicing_dim(layout.local_shape(mesh), count)
    cells, cell_numbers = [], np.zeros((mesh.world, len(layout.shape)), np.int64)
    for dim, size in enumerate(layout.shape):
        axes = [split.axis for split in layout.splits if split.dim == dim]
        places: list[Array] = [np.zeros(mesh.world, np.int64)]
        places += [mesh.index_at(coordinates, axis) for axis in axes]
        _, first, code = np.unique(places, axis=1, return_index=True, return_inverse=True)
        numbers_of: dict[tuple[Segment, ...], int] = {}
        numbers = [
            numbers_of.setdefault(
                layout.segments(mesh, mesh.coordinates(rank))[dim], len(numbers_of)
            )
            for rank in first.tolist()
        ]
        slices = count if dim == sliced_dim else 1
        rows = [_slices(runs, size, slices) for runs in numbers_of]
        for k, slice_rows in enumerate(rows):
            slice_rows[:, 0] += k * slices
        all_cells = np.concatenate(rows)
        used = unique_sorted(all_cells[:, 0])
        number = np.full(len(numbers_of) * slices, len(used))  # all empty slices are one part
        number[used] = np.arange(len(used))
        all_cells[:, 0] = number[all_cells[:, 0]]
        cells.append(all_cells)
        slice_index = mesh.index_at(coordinates, sliced) if slices > 1 else 0
        cell_numbers[:, dim] = number[np.array(numbers)[code.reshape(-1)] * slices + slice_index]
    part_numbers, part = np.unique(cell_numbers, axis=0, return_inverse=True)
    return SliceArray(part_numbers, cells), part.reshape(-1).astype(np.int32)


def _slices(runs: Sequence[Segment], size: int, count: int) -> Array:
    """Return the cells of a dim that is split as by `torch.chunk`, as rows of `Parts`.

    Padding beyond the true size is left out.
    """
    spans = [(run_index.start, run_index.length) for run_index in runs]
    starts, lengths = np.array(spans, np.int64).reshape(-1, 2).T
    ends, total = lengths.cumsum(), int(lengths.sum())
    chunk = max(-(-total // count), 1)
    starts_of_cells = unique_sorted(ends - lengths, np.arange(count) * chunk)
    starts_of_cells = starts_of_cells[starts_of_cells < total]
    run_index = np.searchsorted(ends, starts_of_cells, "right")
    start = starts[run_index] + starts_of_cells - (ends - lengths)[run_index]
    length = np.minimum(start + np.diff(starts_of_cells, append=total), size) - start
    rows = np.stack([starts_of_cells // chunk, starts_of_cells % chunk, start, length], 1)
    return rows[length > 0]


def _all_coordinates(mesh: Mesh) -> dict[str, Any]:
    """Return the coordinates of all ranks on each axis, as arrays."""
    sizes = tuple(mesh.sizes.values())
    indices = np.unravel_index(np.arange(mesh.world), sizes) if sizes else ()
    return dict(zip(mesh.sizes, indices))


def clip_runs(runs: tuple[Segment, ...], start: int, end: int) -> Iterator[Segment]:
    """Yield the pieces of a chain of runs between two local positions."""
    offset = 0
    for run in runs:
        run_start, run_end = max(start, offset), min(end, offset + run.length)
        if run_start < run_end:
            yield Segment(run.start + run_start - offset, run_end - run_start)
        offset += run.length


def cells_of(runs: tuple[Segment, ...], size: int) -> Iterator[Cell]:
    """Yield the runs of one dim within its true size: start in the part, in the full dim,
    length."""
    offset = 0
    for run in runs:
        length = max(0, min(run.start + run.length, size) - run.start)
        if length:
            yield offset, run.start, length
        offset += run.length


@dataclass(frozen=True)
class TransferPlan:
    """A plan of transfers of parts; for full tensors also their shapes and receivers.

    routes   run one after the other: several if all ranks receive full tensors
    """

    routes: tuple[Route, ...]
    shapes: Mapping[Any, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    receivers: Mapping[Any, Sequence[int]] = field(default_factory=dict)


PartOwners = tuple[
    tuple[tuple[tuple[Any, torch.dtype], ...], tuple[int, ...]], ...
]  # parts with their dtypes, ranks that have them
ReceiverChoice = Callable[[Sharding], Sequence[int]]
TransferPlans = dict[Any, TransferPlan]  # plans depend only on holdings, which never change
_SHORT = 1 << 12  # deliveries of a plan that is cached: large worlds have more


def _cached_plan(
    plans: TransferPlans | None, key: tuple[Any, ...], make: Callable[[], TransferPlan]
) -> TransferPlan:
    """Return the plan for a key, cached: a proof needs the same plan after each step."""
    plan = plans.get(key) if plans is not None else None
    if plan is None:
        plan = make()
        if plans is not None and sum(len(route.kind) for route in plan.routes) <= _SHORT:
            plans[key] = plan
    return plan


def plan_copies(
    holdings: Mapping[Any, Holding],
    sizes: Mapping[Any, int],
    mesh: Mesh,
    plans: TransferPlans | None = None,
) -> TransferPlan:
    """Return the plan that sends each part from its primary rank to all that hold the same.

    sizes   bytes of an element of each
    """

    def made() -> TransferPlan:
        source, target = {}, {}
        for name, holding in holdings.items():
            sharding = holding.sharding(mesh)
            senders = [rank for rank in range(mesh.world) if holding.is_primary(mesh, rank)]
            source[name], target[name] = (
                TensorLayout(s, sizes[name]) for s in (sharding.restrict_to(senders), sharding)
            )
        return TransferPlan((find_route(group_by_layout(source, target), world.size()),))

    return _cached_plan(plans, ("copies", tuple(sizes.items())), made)


def shard_of(value: Tensor, holding: Holding, mesh: Mesh, rank: int) -> Tensor:
    """Return a rank's part of a full tensor, in a new tensor; padding is zero."""
    part = value.detach()
    for dim, runs in enumerate(holding.segments(mesh, rank)):
        size, pieces = part.shape[dim], [part.narrow(dim, 0, 0)]  # a rank may hold no part
        for run in runs:
            valid = max(0, min(run.length, size - run.start))
            padding_shape = (*part.shape[:dim], run.length - valid, *part.shape[dim + 1 :])
            pieces += [part.narrow(dim, min(run.start, size), valid), part.new_zeros(padding_shape)]
        if runs != (Segment(0, size),):
            part = torch.cat(pieces, dim)
    return part.clone(memory_format=torch.contiguous_format)


def write_shard(part: Tensor, target: Tensor, holding: Holding, mesh: Mesh, rank: int) -> None:
    """Write a rank's part into the full tensor."""
    copy_overlap(part, holding.part(mesh, rank), target, full_slice(target.shape))


def zero_padding(part: Tensor, holding: Holding, mesh: Mesh, rank: int) -> Tensor:
    """Return a rank's part with zeros in the padding."""
    if holding.layout.padded == holding.layout.shape:
        return part
    zeroed, held_part = torch.zeros_like(part), holding.part(mesh, rank)
    copy_overlap(part, held_part, zeroed, held_part)
    return zeroed


def first_rank(_: Sharding) -> Sequence[int]:
    """Choose rank 0 alone as receiver: it writes, or compares."""
    return (0,)


def assemble_tensors(
    holdings: Mapping[K, Holding],
    parts: Mapping[K, Tensor],
    ranks: RankGroups,
    receivers: ReceiverChoice | None = None,
    plans: TransferPlans | None = None,
) -> dict[K, Tensor]:
    """Return full tensors on the CPU, on all ranks or on some, from the parts of all ranks.

    own   parts of this rank; a tensor without any part is left out, gaps are zeros
    to    returns the receivers of a tensor; None: all ranks
    ways  cached plans of this program
    """
    owners = tuple(
        (tuple(dtypes.items()), owner_ranks)
        for dtypes, owner_ranks in world.ranks_by_object(
            {name: part.dtype for name, part in parts.items()}
        )
    )
    key = "whole", receivers, tuple(holdings), owners

    def made() -> TransferPlan:
        is_short = plans is not None and len(holdings) * ranks.mesh.world <= _SHORT
        make = _recent_assembly if is_short else _plan_assembly
        return make(tuple(holdings.items()), owners, ranks.mesh, world.size(), receivers)

    plan = _cached_plan(plans, key, made)
    local = {name: part.detach() for name, part in parts.items()}
    with torch._C.DisableTorchFunction():  # function modes need not see copies
        full = {
            name: torch.zeros(shape, dtype=dtype)
            for name, (shape, dtype) in plan.shapes.items()
            if ranks.rank in plan.receivers[name]
        }
        if receivers is None:  # each round sends what earlier rounds have gathered
            for name, part in local.items():
                write_shard(part, full[name], holdings[name], ranks.mesh, ranks.rank)
    source = local if receivers is not None else full
    for route in plan.routes:
        redistribute_by_route(
            route, source.__getitem__, full.__getitem__, MESSAGE_BYTES, bucket_device(ranks.device)
        )
    return full


def _plan_assembly(
    holdings: tuple[tuple[Any, Holding], ...],
    part_owners: PartOwners,
    mesh: Mesh,
    job: int,
    choice: ReceiverChoice | None,
) -> TransferPlan:
    """Return the plan of an assembly in a job of `job` ranks; the arguments decide it alone."""
    parts_of_ranks = [(dict(owned), owner_ranks) for owned, owner_ranks in part_owners]
    dtypes = {name: dtype for owned, _ in parts_of_ranks for name, dtype in owned.items()}
    source, target, shapes, receivers = {}, {}, {}, {}
    for name, holding in holdings:
        if name not in dtypes:
            continue
        sharding, dtype = holding.sharding(mesh), dtypes[name]
        owners = [
            rank for owned, owner_ranks in parts_of_ranks if name in owned for rank in owner_ranks
        ]
        receivers[name] = choice(sharding) if choice is not None else range(mesh.world)
        source[name] = TensorLayout(sharding.restrict_to(owners), dtype.itemsize)
        target[name] = TensorLayout(
            replicate_on(sharding.shape, receivers[name], mesh.world), dtype.itemsize
        )
        shapes[name] = sharding.shape, dtype
    if choice is None:
        return TransferPlan(rounds_of(source, tuple(mesh.sizes.values())), shapes, receivers)
    return TransferPlan(
        (find_route(group_by_layout(source, target), job, gaps=True),), shapes, receivers
    )


# plans of this process, for programs with equal holdings that share no `TransferPlans`: those of a
# later proof in a warm rank, and those of ranks that are threads
_recent_assembly = lru_cache(maxsize=64)(_plan_assembly)
