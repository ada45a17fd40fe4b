"""Random draws of a program: native (torch's dropout, with forked generators), or logical masks.

Which ranks draw equal masks follows from the layouts of the trace. An activation differs along the
axes of rows, tokens and stages, so the generators of a step are seeded by the places along these
axes. A draw forks the generator if its mask is split over further axes, or equal along one of
these. Ranks that hold the same shard of a tensor (shared heads of keys) draw equal masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedlang.ir.model import is_inside
from schedlang.ir.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from schedlang.passes.analyze.prepare import Prepared
    from schedlang.passes.lower.build import Options
    from schedlang.runtime.comm.collectives import RankGroups
    from schedlang.runtime.propagation.trace import Tag
    from schedlang.runtime.rng.logical_dropout import LogicalDropout, LogicalWindow, WindowOfDraw
    from schedlang.runtime.rng.native_dropout import DrawFork, ForkedModule, NativeDropout
    from schedlang.runtime.scope import Scope

# (axis, for each place along the axis the place whose mask it draws)
MaskPlaces = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class ForkedDraw:
    """A draw from a forked generator, whose mask depends on the places in `along`.

    every   the mask has no dim of samples: one draw serves all rows of a batch
    """

    along: MaskPlaces
    every: bool = False


@dataclass(frozen=True)
class PlanDraws:
    """The draws of a plan: the axes in a step's seed, and the draws from forked generators.

    seed_axes       axes along which the random numbers of a step differ
    sites           module -> its draws in the order of calls; None: from the generator of the step
    logical_reason  the reason why masks must be drawn logically; "": they can be drawn natively
    """

    seed_axes: tuple[str, ...] = ()
    sites: Mapping[str, tuple[ForkedDraw | None, ...]] = field(default_factory=dict)
    logical_reason: str = ""


def draws_of(plan: Plan, prepared: Prepared, rows: int) -> PlanDraws:
    """Return which draws of a plan are equal on which ranks.

    `rows` is the number of rows of a traced microbatch.
    """
    staged, traced = prepared.staged, prepared.traced
    stage = plan.mesh.fold(staged.axis) if staged.axis is not None else ()
    base = tuple(axis for axis in plan.mesh.sizes if axis in (*plan.data_axes, *stage))
    units = staged.cut.graph.units if stage else ()
    sites: dict[str, list[ForkedDraw | None]] = {}
    for (site, call), shape in traced.mask_shapes.items():
        unbatched = traced.unbatched_masks.get((site, call), False)
        if shape and shape[0] % rows and not unbatched and not _is_recurrent(plan, site):
            return PlanDraws(
                logical_reason=f"`{site or 'the model'}` draws {shape}, not rows of {rows} samples"
            )
        axes = dict.fromkeys(a for a in base if not (unbatched and a in plan.data_axes))
        try:
            split = _split_axes(plan, prepared, (site, call))
        except LookupError as error:
            return PlanDraws(logical_reason=str(error.args[0]))
        if prepared.tokens is not None:
            dims = prepared.tokens.draws.get((site, call))
            if dims is None:
                return PlanDraws(
                    logical_reason=f"how `{site}` draws along the sequence is not known"
                )
            weights = len(shape) == 4 and shape[-2] == shape[-1] and dims[-2] == "rows"
            if "rows" not in dims or weights:  # equal on all ranks of a sequence
                axes = {a: None for a in axes if a not in plan.context_axes}
        if stage and not any(is_inside(site, unit) for unit in units):  # several stages compute it
            if any(is_inside(unit, site) for unit in units):
                reason = f"`{site or 'the model'}` draws between stages"
                return PlanDraws(logical_reason=f"{reason}, which all of them run")
            axes = {a: None for a in axes if a not in stage}
        is_base = not split and tuple(axes) == base
        along = tuple((a, tuple(range(plan.mesh.size(a)))) for a in axes) + split
        draw = None if is_base and not unbatched else ForkedDraw(along, unbatched)
        sites.setdefault(site, []).append(draw)
    return PlanDraws(base, {site: tuple(site_draws) for site, site_draws in sites.items()})


def why_logical(plan: Plan, prepared: Prepared, rows: int) -> str:
    """Return why training on several ranks draws logical masks; "" if it draws native ones."""
    if plan.mesh.world == 1 or not prepared.traced.is_random:
        return ""
    return draws_of(plan, prepared, rows).logical_reason


def _is_recurrent(plan: Plan, site: str) -> bool:
    import torch

    return isinstance(plan.model.model.get_submodule(site), torch.nn.RNNBase)


def _split_axes(plan: Plan, prepared: Prepared, draw: tuple[str, int]) -> MaskPlaces:
    """Return the axes over which a mask is split, and which places hold the same shard.

    Raises LookupError where shards overlap.
    """
    full_shape, tags = prepared.traced.mask_layouts.get(draw, ((), {}))
    places = []
    for axis, tag in sorted(tags.items()):
        first_holders = _first_holders(tag, full_shape[tag.dim], plan.mesh.size(axis))
        if first_holders is None:
            raise LookupError(f"ranks of `{axis}` share parts of what `{draw[0]}` draws")
        places.append((axis, first_holders))
    return tuple(places)


@functools.lru_cache(1024)
def _first_holders(tag: Tag, size: int, parts: int) -> tuple[int, ...] | None:
    """Return, for each place, the first place with the same shard; None where shards overlap."""
    position_sets = [
        frozenset(p for p in tag.positions(size, parts, k) if p < size) for k in range(parts)
    ]
    distinct = set(position_sets)
    if sum(map(len, distinct)) != len(frozenset().union(*distinct)):
        return None
    return tuple(position_sets.index(positions) for positions in position_sets)


# -- on one rank -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankDropout:
    """The draws of this rank in training.

    dropout                 the draws in effect; None: torch's default generator
    native                  the native draws, also where logical masks are in effect
    logical_dropout_reason  the reason for logical masks
    host_draws              seeds the draws from Python's and numpy's generators; None: the model
                            has none, or one rank has all rows
    """

    dropout: LogicalDropout | NativeDropout | None = None
    native: NativeDropout | None = None
    logical_dropout_reason: str = ""
    host_draws: Callable[[Scope], AbstractContextManager[None]] | None = None


NO_DRAW = RankDropout()


def dropout_of(
    plan: Plan,
    prepared: Prepared,
    ranks: RankGroups,
    module: nn.Module,
    batch: Mapping[str, Any],
    options: Options,
) -> RankDropout:
    """Return the draws of this rank; wrap the modules that draw from forked generators."""
    from schedlang.runtime.batch import largest_part, row_count

    host, kind = _host_draws(plan, prepared, options), options.dropout
    if kind is None and options.seed is not None:
        kind = "logical"
    if not prepared.traced.is_random or (kind is None and plan.mesh.world == 1):
        return RankDropout(host_draws=host)
    logical = kind == "logical" or options.on_meta
    native, reason = None, ""
    if not options.on_meta:
        sample = largest_part(batch, 1 if options.local else plan.share_weights, plan.micro)
        draws = draws_of(plan, prepared, row_count(sample))
        native, reason = _make_native(draws, plan, prepared, ranks, module, options)
    if native is not None and not logical:
        return RankDropout(native, native, host_draws=host)
    if native is not None:
        native.on = False
    return RankDropout(
        _make_logical(plan, prepared, ranks, module, options.seed or 0), native, reason, host
    )


def _host_draws(plan: Plan, prepared: Prepared, options: Options) -> Any:
    """Return what seeds the draws from Python's and numpy's generators; None: nothing does."""
    from schedlang.passes.propagate.loss_sums import is_statistics_relaxed
    from schedlang.runtime.global_state import HostDraws

    if not prepared.traced.draws_on_host or (options.seed is None and plan.mesh.world == 1):
        return None
    by_rows = prepared.draws_by_rows or is_statistics_relaxed(plan)
    return HostDraws(_shared_seed(options), by_rows).enter


def _shared_seed(options: Options) -> int:
    """Return a seed that is equal on all ranks."""
    import torch

    from schedlang.runtime.comm import world

    if options.seed is not None or options.on_meta:
        return options.seed or 0
    # ranks may have different seeds, for example for reading data
    seed: int = world.broadcast_object(0, torch.initial_seed())
    return seed


def _make_native(
    draws: PlanDraws,
    plan: Plan,
    prepared: Prepared,
    ranks: RankGroups,
    module: nn.Module,
    options: Options,
) -> tuple[NativeDropout | None, str]:
    """Return native dropout of this rank, or None and the reason why it is impossible."""
    from schedlang.runtime.device import default_generators
    from schedlang.runtime.rng.native_dropout import DrawFork, NativeDropout, install_forks

    if draws.logical_reason:
        return None, draws.logical_reason
    mesh, rank = plan.mesh, ranks.rank

    def fork_of(draw: ForkedDraw) -> DrawFork:
        places = tuple((axis, holders[mesh.index(rank, axis)]) for axis, holders in draw.along)
        return DrawFork(places, draw.every)

    forks_by_site = {
        site: tuple(None if draw is None else fork_of(draw) for draw in site_draws)
        for site, site_draws in draws.sites.items()
    }
    forks, unforked, reason = _find_forks(module, forks_by_site, prepared.traced.call_counts)
    if reason:
        return None, reason
    seed = _shared_seed(options)
    base = tuple((axis, mesh.index(rank, axis)) for axis in draws.seed_axes)
    native = NativeDropout(seed, base, default_generators([ranks.device]))
    install_forks(module, native, forks, unforked)
    return native, ""


def _find_forks(
    module: nn.Module, sites: Mapping[str, Sequence[DrawFork | None]], entries: Mapping[str, int]
) -> tuple[dict[str, ForkedModule], list[str], str]:
    """Return (forked modules, modules inside these that draw from the step's generator, reason).

    The reason says why native draws are impossible, or is "". A compiled module counts as one
    module: its graph draws for all modules inside.
    """
    from schedlang.runtime.rng.native_dropout import ForkedModule

    forks: dict[str, ForkedModule] = {}
    framed: list[str] = []
    remaining = dict(sites)
    for name, kind in _compiled_modules(module).items():
        within = {site: remaining.pop(site) for site in list(remaining) if is_inside(site, name)}
        distinct = {fork for draws in within.values() for fork in draws}
        if len(distinct) > 1:
            if kind == "pattern":
                return (
                    {},
                    [],
                    f"the fused `{name}` draws some masks equal on all ranks, and others different",
                )
            _make_eager(module, name)
            remaining |= within
        elif distinct and None not in distinct:
            forks[name] = ForkedModule(name, tuple(distinct), True)
        elif distinct:
            remaining[name] = (None,)
    for name, draws in remaining.items():
        if all(fork is None for fork in draws):
            continue
        inner = {
            fork
            for site, distinct in remaining.items()
            if is_inside(site, name)
            for fork in distinct
        }
        if len(inner) == 1 and name:
            forks[name] = ForkedModule(name, (draws[0],), True)
            continue
        calls = entries.get(name, 1)
        per_call = len(draws) // calls
        if len(set(draws)) > 1 and tuple(draws) != tuple(draws[:per_call]) * calls:
            return {}, [], f"`{name or 'the model'}` draws differently from call to call"
        forks[name] = ForkedModule(name, tuple(draws[:per_call]) or (draws[0],), False)
        framed.append(name)
    inside_one = [
        name
        for name in remaining
        if name not in forks and any(is_inside(name, outer) for outer in framed)
    ]
    return forks, inside_one, ""


def _compiled_modules(module: nn.Module) -> dict[str, str]:
    """Return the outermost compiled modules: "whole", or "pattern" for matches of a pattern."""
    from schedlang.runtime.forward import layer_of
    from schedlang.runtime.fusion.fuse import FusedForward

    kinds: dict[str, str] = {}
    for name, submodule in module.named_modules():
        layer = layer_of(submodule, "fuse")
        if layer is not None and not any(is_inside(name, outer) for outer in kinds):
            kinds[name] = "whole" if isinstance(layer, FusedForward) else "pattern"
    return kinds


def _make_eager(module: nn.Module, name: str) -> None:
    from schedlang.runtime.forward import layer_of
    from schedlang.runtime.fusion.fuse import FusedForward

    layer = layer_of(module.get_submodule(name), "fuse")
    assert isinstance(layer, FusedForward)
    layer.eager = "in training it draws some masks equal on all ranks, and others different"


def _make_logical(
    plan: Plan, prepared: Prepared, ranks: RankGroups, module: nn.Module, seed: int
) -> LogicalDropout:
    """Return dropout with masks that do not depend on the layout."""
    from schedlang.runtime.rng.logical_dropout import LogicalDropout
    from schedlang.runtime.scope import named_sites

    slices = windows_of(plan, prepared, ranks)
    named_sites(module)
    if parts := prepared.tokens or prepared.slicing:
        slices = parts.windows(slices)
    return LogicalDropout(seed, slices, prepared.traced.unbatched_masks)


def windows_of(plan: Plan, prepared: Prepared, ranks: RankGroups) -> WindowOfDraw:
    """Return a function that gives the window of a logical mask that this rank's shard covers."""
    from schedlang.runtime.rng.logical_dropout import LogicalWindow, evaluation_layout, is_unbatched
    from schedlang.runtime.scope import current

    # the closure must not hold the plan, which holds the original model
    mesh, masks, rank = plan.mesh, prepared.traced.mask_layouts, ranks.rank
    unbatched = prepared.traced.unbatched_masks
    is_split = bool(plan.boundaries) or any(
        plan.effective_layout(name).splits for name in plan.layouts
    )

    def slices(site: str, call: int, shape: tuple[int, ...]) -> LogicalWindow | None:
        full_shape, tags = masks.get((site, call), ((), {}))
        scope = current()
        if scope is not None and scope.evaluation:
            full_shape, tags = evaluation_layout(masks, site, len(shape), is_split)
        if not tags:
            return None
        # dim 0 holds the samples, alone or merged with another dim
        first_dim = int(not is_unbatched(unbatched, site, call) and len(shape) < len(full_shape))
        logical = list(shape)
        index: list[Any] = [None] * len(shape)
        for axis, tag in tags.items():
            dim, parts = tag.dim - first_dim, mesh.size(axis)
            logical[dim] = tag.uneven.true_size(shape[dim], parts)
            position = mesh.index(rank, axis)
            index[dim] = tag.positions(logical[dim], parts, position)
        return LogicalWindow(tuple(logical), tuple(index))

    return slices
