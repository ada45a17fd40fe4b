"""Exact bytes of parameters, gradients and optimizer state on each distinct kind of rank."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from schedlang.ir.features import Recomputing
from schedlang.ir.memory import ADAMW_MOMENTS
from schedlang.ir.placement import slicing_dim
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze.holdings import gathers_of, sliced_names_by_unit, state_slicing
from schedlang.passes.analyze.residence import tiers_of, window_bytes
from schedlang.passes.propagate.casts import gather_dtype

if TYPE_CHECKING:
    from schedlang.passes.partition.staging import Staged
    from schedlang.runtime.checkpointing.holdings import Holding


@dataclass(frozen=True)
class RankClass:
    """Ranks with equal memory: how many, the lowest one, and the bytes of each.

    place                             along the pipeline's axis, if there is one
    elements                          of parameters; with padding, except that of ZeRO's slices
    parameters, gradients, optimizer  bytes between two steps; parameters with all padding
    working                           additional bytes during a step, at most: of ZeRO's shards,
                                      gathered parameters and gradients not yet reduced; other
                                      versions of the weights, where they are stale; parameters that
                                      are loaded module by module
    peer                              bytes of other ranks' optimizer state that it holds for them
    cpu, disk                         bytes of parameters, gradients and optimizer state that rows
                                      keep there and not on the device, which the entries above are
                                      about
    """

    ranks: int
    first: int
    place: int | None
    elements: int
    parameters: int
    gradients: int
    optimizer: int
    working: int = 0
    cpu: int = 0
    disk: int = 0
    peer: int = 0

    @property
    def state(self) -> int:
        """Bytes of parameters, gradients and optimizer state together, on the device."""
        return self.parameters + self.gradients + self.optimizer

    def to_json(self) -> dict[str, object]:
        """Return plain values, without tiers that hold nothing."""
        away = [name for name in ("cpu", "disk", "peer") if not getattr(self, name)]
        values = {name: value for name, value in asdict(self).items() if name not in away}
        return {**values, "state": self.state}


@dataclass(frozen=True)
class _Kind:
    """Parameters with equal storage: on these stages, with equally many elements in each shard."""

    stages: frozenset[int] | None
    elements: tuple[tuple[int, int], ...]  # runs of equal shards: first index, elements of each
    itemsize: int
    coded: int | None  # bytes of each, where it is stored in codes
    trained: bool
    tiers: tuple[str, str, str]  # of the parameter, its gradients and its optimizer state


def rank_classes(
    plan: Plan, staged: Staged, holdings: Mapping[str, Holding], moments: int = ADAMW_MOMENTS
) -> tuple[RankClass, ...]:
    """Return the bytes of each distinct kind of rank, in the order of their first rank.

    `moments` are tensors of optimizer state per trained parameter, of its shape and dtype.  The
    cost grows with distinct shapes, stages and shards, not with ranks.
    """
    mesh = plan.mesh
    row, _ = state_slicing(plan)
    axes = mesh.fold(row.axes) if row is not None else ()
    kinds = Counter(_kinds(plan, holdings, axes))
    positions = mesh.size(staged.axis) if staged.axis is not None else 1
    slices = mesh.size(axes) if axes else 1
    share = mesh.world // (positions * slices)
    cuts = sorted({0, *(first_rank for kind in kinds for first_rank, _ in kind.elements)})
    by_key: dict[tuple[int, ...], list[int]] = {}
    for position in range(positions):
        working = _working(plan, staged, holdings, position)
        working += window_bytes(plan, staged, holdings, position)
        for cut, end in zip(cuts, [*cuts[1:], slices]):
            on_device, off_device = _held(kinds, position, cut, moments)
            working_bytes = working + _extra_versions(staged, position) * on_device[2]
            first_rank = _first(plan, staged, axes, position, cut)
            off_device = (
                *off_device[:2],
                _held(kinds, (position - 1) % positions, cut, moments)[1][2],
            )
            entry = by_key.setdefault(
                (position, *on_device, working_bytes, *off_device), [0, first_rank]
            )
            entry[0], entry[1] = entry[0] + share * (end - cut), min(entry[1], first_rank)
    classes = [
        RankClass(count, first_rank, position if staged.axis is not None else None, *on_device)
        for (position, *on_device), (count, first_rank) in by_key.items()
    ]
    return tuple(sorted(classes, key=lambda rank_class: rank_class.first))


def _kinds(plan: Plan, holdings: Mapping[str, Holding], axes: tuple[str, ...]) -> Iterator[_Kind]:
    """Yield the kind of every parameter; parts are measured once per distinct layout."""
    sizes_of: dict[object, tuple[tuple[int, int], ...]] = {}
    tiers = tiers_of(plan)
    for name, holding in holdings.items():
        param = plan.model.unique_parameters[name]
        key = (holding.layout, holding.sliced)
        if key not in sizes_of:
            sizes_of[key] = _sizes(plan, holding, axes)
        storage = tiers[name].as_tuple if name in tiers else ("device",) * 3
        coding = plan.model.coding_of(name)
        part = holding.layout.local_shape(plan.mesh) if coding is not None else ()
        coded = coding.bytes(part, param.itemsize) if coding is not None else None
        yield _Kind(
            holding.stages, sizes_of[key], param.itemsize, coded, param.requires_grad, storage
        )


def _sizes(plan: Plan, holding: Holding, axes: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Return runs of equal shards of a parameter: first index, elements of each."""

    def size(shard: int) -> int:
        rank = plan.mesh.member(0, axes, shard) if axes else 0
        return math.prod(holding.local_shape(plan.mesh, rank))

    count = plan.mesh.size(axes) if holding.sliced else 1
    if plan.mesh.fold(holding.sliced) != axes:  # over some of the axes: shards repeat
        return tuple((shard, size(shard)) for shard in range(count))
    sizes, shard = [], 0
    while shard < count:  # sizes never grow: full shards, at most one partial, empty ones
        sizes.append((shard, size(shard)))
        remaining = range(shard, count)
        shard += bisect_right(remaining, -sizes[-1][1], key=lambda shard_index: -size(shard_index))
    return tuple(sizes)


def _held(
    kinds: Mapping[_Kind, int], position: int, cut: int, moments: int
) -> tuple[tuple[int, int, int, int], tuple[int, int, int]]:
    """Return elements and bytes on the device, and bytes in host memory, on disk and on a peer."""
    elements, device, off_device = 0, [0, 0, 0], Counter[str]()
    for kind, count in kinds.items():
        if kind.stages is not None and position not in kind.stages:
            continue
        size = count * next(
            size for first_shard, size in reversed(kind.elements) if first_shard <= cut
        )
        elements += size
        gradients = size * kind.itemsize * kind.trained
        full = count * kind.elements[0][1]  # the first slice: fully_shard pads others to its size
        stored = full * kind.itemsize if kind.coded is None else count * kind.coded
        sizes = (stored, gradients, gradients * moments)
        for index, (tier, number) in enumerate(zip(kind.tiers, sizes)):
            if tier == "device":
                device[index] += number
            else:
                off_device[tier] += number
    return (elements, device[0], device[1], device[2]), (
        off_device["cpu"],
        off_device["disk"],
        off_device["peer"],
    )


def _extra_versions(staged: Staged, position: int) -> int:
    """Return the most versions of the weights that a place keeps besides the current one."""
    from schedlang.pipeline.timeline.versions import weight_copies

    copies = weight_copies(staged.timeline)
    return int(max((copies[stage] - 1 for stage in staged.stages_at(position)), default=0))


def _first(plan: Plan, staged: Staged, axes: tuple[str, ...], position: int, cut: int) -> int:
    """Return the lowest rank at a pipeline place and a shard index."""
    rank = plan.mesh.member(0, axes, cut) if axes else 0
    return rank if staged.axis is None else plan.mesh.member(rank, staged.axis, position)


def _recomputed_together(plan: Plan) -> int:
    """Return the most modules that are recomputed as one region; under a memory limit all may
    be."""
    rows = plan.rows_changing(Facet.RECOMPUTE)
    sizes = [len(region) for action in rows for region in action.inseparable_groups]
    limited = (a for a, row in plan.rows_with(Recomputing) if row.budget is not None)
    return max([1, *sizes, *(len(action.sites) for action in limited)])


def gathered_bytes(
    plan: Plan, holdings: Mapping[str, Holding], names: tuple[str, ...], *, cast: bool = False
) -> int:
    """Return the bytes of parameters gathered from shards of equal size; `cast`: in the compute
    dtype."""
    total, cast_dtype = 0, gather_dtype(plan, names) if cast else None
    for name in names:
        count = plan.mesh.size(holdings[name].sliced)
        shape = list(holdings[name].layout.local_shape(plan.mesh))
        dim = slicing_dim(shape, count)
        shape[dim] = -(-shape[dim] // count) * count  # as fully_shard pads
        item = 2 if cast_dtype is not None else plan.model.unique_parameters[name].itemsize
        total += math.prod(shape) * item
    return total


def _working(plan: Plan, staged: Staged, holdings: Mapping[str, Holding], position: int) -> int:
    """Return the additional bytes of ZeRO during a step.

    Stages 1 and 2 keep all units gathered through the step, stage 3 one at a time (and prefetched
    ones).  Gradients are unsharded until they are reduced: all of them at the end in stage 1, else
    one unit's.  A stage that rows of the timeline keep gathered is unsharded with its gradients,
    one at a time, with one unit in flight besides.
    """
    row, _ = state_slicing(plan)
    if row is None:
        return 0
    all_sizes, gathered = [], 0
    for stage in staged.stages_at(position):
        units = sliced_names_by_unit(plan, staged, holdings, stage).values()
        unit_sizes = [gathered_bytes(plan, holdings, names) for names in units]
        all_sizes += unit_sizes
        if gathers_of(plan, staged, stage, position) is not None:
            gathered = max(gathered, 2 * sum(unit_sizes) + max(unit_sizes, default=0))
    largest = sum(sorted(all_sizes)[-max(2, 1 + row.prefetch, 1 + _recomputed_together(plan)) :])
    parameters = sum(all_sizes) if row.stage < 3 or not row.reshard else largest
    several = plan.order is not None and plan.order.micro > 1
    gradients = sum(all_sizes) if row.stage == 1 and several else max(all_sizes, default=0)
    return max(parameters + gradients, gathered)
