"""Random draws of a program: by torch's dropout, with which modules forked, or logically, and why.

Who draws what follows from the layouts of the trace.  An activation differs along the axes of rows,
tokens and stages, so a step is seeded by the places along them; a mask that is split over further
axes, or the same along one of these, is a fork.  Ranks that hold the same part of a tensor (heads
of keys that several share) draw as one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedlang.ir.model import inside
from schedlang.ir.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from schedlang.passes.analyze.prepare import Prepared
    from schedlang.runtime.comm.collectives import Ranks
    from schedlang.runtime.propagation.trace import Tag
    from schedlang.runtime.rng.logical_dropout import LogicalDropout, Slices, Window
    from schedlang.runtime.rng.native import Fork, Forked, NativeDropout

# by axis: the place whose masks each place draws
Along = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Apart:
    """A draw that is no other rank's but of those that `along` names.

    every   it has no dim of samples: one draw for all rows of a batch
    """

    along: Along
    every: bool = False


@dataclass(frozen=True)
class Draws:
    """The draws of a plan: the axes of a step's seed, and those that are not of it.

    base   axes along which the numbers of a step differ
    sites  module -> its draws in the order of its calls, None: with the numbers of the step
    why    why masks are drawn logically all the same; "": they are drawn natively
    """

    base: tuple[str, ...] = ()
    sites: Mapping[str, tuple[Apart | None, ...]] = field(default_factory=dict)
    why: str = ""


def draws_of(plan: Plan, prepared: Prepared, rows: int) -> Draws:
    """Return which draws of a plan are alike on which ranks; `rows` are those of a traced
    microbatch."""
    staged, traced = prepared.staged, prepared.traced
    stage = plan.mesh.fold(staged.axis) if staged.axis is not None else ()
    base = tuple(axis for axis in plan.mesh.sizes if axis in (*plan.data_axes, *stage))
    units = staged.cut.graph.units if stage else ()
    sites: dict[str, list[Apart | None]] = {}
    for (site, turn), shape in traced.drawn.items():
        every = traced.unbatched.get((site, turn), False)
        if shape and shape[0] % rows and not every and not _recurrent(plan, site):
            return Draws(why=f"`{site or 'the model'}` draws {shape}, not rows of {rows} samples")
        axes = dict.fromkeys(a for a in base if not (every and a in plan.data_axes))
        try:
            split = _split(plan, prepared, (site, turn))
        except LookupError as error:
            return Draws(why=str(error.args[0]))
        if prepared.tokens is not None:
            dims = prepared.tokens.draws.get((site, turn))
            if dims is None:
                return Draws(why=f"how `{site}` draws along the sequence is not known")
            weights = len(shape) == 4 and shape[-2] == shape[-1] and dims[-2] == "rows"
            if "rows" not in dims or weights:  # ranks of a sequence have it whole, or agree on it
                axes = {a: None for a in axes if a not in plan.context_axes}
        if stage and not any(inside(site, unit) for unit in units):  # several stages compute it
            if any(inside(unit, site) for unit in units):
                said = f"`{site or 'the model'}` draws between stages"
                return Draws(why=f"{said}, which all of them run")
            axes = {a: None for a in axes if a not in stage}
        same = not split and tuple(axes) == base
        along = tuple((a, tuple(range(plan.mesh.size(a)))) for a in axes) + split
        apart = None if same and not every else Apart(along, every)
        sites.setdefault(site, []).append(apart)
    return Draws(base, {site: tuple(found) for site, found in sites.items()})


def drawn_logically(plan: Plan, prepared: Prepared, rows: int) -> str:
    """Return why masks of a training on several ranks are drawn logically; "" if they are not."""
    if plan.mesh.world == 1 or not prepared.traced.random:
        return ""
    return draws_of(plan, prepared, rows).why


def _recurrent(plan: Plan, site: str) -> bool:
    import torch

    return isinstance(plan.model.model.get_submodule(site), torch.nn.RNNBase)


def _split(plan: Plan, prepared: Prepared, draw: tuple[str, int]) -> Along:
    """The axes over which a mask is split, and which places hold the same part of it."""
    whole, tags = prepared.traced.masks.get(draw, ((), {}))
    found = []
    for axis, tag in sorted(tags.items()):
        first = _holders(tag, whole[tag.dim], plan.mesh.size(axis))
        if first is None:
            raise LookupError(f"ranks of `{axis}` share parts of what `{draw[0]}` draws")
        found.append((axis, first))
    return tuple(found)


@functools.lru_cache(1024)
def _holders(tag: Tag, size: int, parts: int) -> tuple[int, ...] | None:
    """Return, for each place, the first that holds the same; None where some share a part."""
    held = [frozenset(p for p in tag.positions(size, parts, k) if p < size) for k in range(parts)]
    different = set(held)
    if sum(map(len, different)) != len(frozenset().union(*different)):
        return None
    return tuple(held.index(one) for one in held)


# -- on one rank -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dropout:
    """The draws of this rank in training; `native` also where a proof draws logically."""

    used: LogicalDropout | NativeDropout | None = None
    native: NativeDropout | None = None
    why: str = ""  # why logically


def dropout_of(
    plan: Plan, prepared: Prepared, ranks: Ranks, module: nn.Module, options: DropoutOptions
) -> Dropout:
    """Return what draws on this rank; change modules whose draws are forks."""
    if not prepared.traced.random or (options.kind is None and plan.mesh.world == 1):
        return Dropout()
    logical = options.kind == "logical" or options.on_meta
    native, why = None, ""
    if not options.on_meta:
        native, why = _native(plan, prepared, ranks, module, options)
    if native is not None and not logical:
        return Dropout(native, native)
    if native is not None:
        native.on = False
    return Dropout(_logical(plan, prepared, ranks, module, options.seed or 0), native, why)


@dataclass(frozen=True)
class DropoutOptions:
    """The draws that `build` was given for: their kind, their seed, and rows of a microbatch."""

    kind: str | None
    seed: int | None
    rows: int
    on_meta: bool = False


def _native(
    plan: Plan, prepared: Prepared, ranks: Ranks, module: nn.Module, options: DropoutOptions
) -> tuple[NativeDropout | None, str]:
    """Torch's own dropout on this rank; None where it cannot be told who draws what, and why."""
    import torch

    from schedlang.runtime.comm import world
    from schedlang.runtime.device import default_generators
    from schedlang.runtime.rng.native import Fork, NativeDropout, install

    draws = draws_of(plan, prepared, options.rows)
    if draws.why:
        return None, draws.why
    mesh, rank = plan.mesh, ranks.rank

    def fork(apart: Apart) -> Fork:
        places = tuple((axis, first[mesh.index(rank, axis)]) for axis, first in apart.along)
        return Fork(places, apart.every)

    at = {
        site: tuple(None if apart is None else fork(apart) for apart in found)
        for site, found in draws.sites.items()
    }
    forks, plain, why = _forks(module, at, prepared.traced.entries)
    if why:
        return None, why
    seed = options.seed
    if seed is None:  # ranks may have seeded apart, as for what they read
        seed = world.broadcast_object(0, torch.initial_seed())
    base = tuple((axis, mesh.index(rank, axis)) for axis in draws.base)
    native = NativeDropout(seed, base, default_generators([ranks.device]))
    install(module, native, forks, plain)
    return native, ""


def _forks(
    module: nn.Module, sites: Mapping[str, Sequence[Fork | None]], entries: Mapping[str, int]
) -> tuple[dict[str, Forked], list[str], str]:
    """The modules to be changed, those inside of them that draw with the step, and what cannot be.

    A compiled module is one: what is inside of it draws in its graph.
    """
    from schedlang.runtime.rng.native import Forked

    forks: dict[str, Forked] = {}
    framed: list[str] = []
    left = dict(sites)
    for name, kind in _compiled(module).items():
        within = {site: left.pop(site) for site in list(left) if inside(site, name)}
        found = {one for draws in within.values() for one in draws}
        if len(found) > 1:
            if kind == "pattern":
                return {}, [], f"the fused `{name}` draws some masks alike and some apart"
            _eager(module, name)
            left |= within
        elif found and None not in found:
            forks[name] = Forked(name, tuple(found), True)
        elif found:
            left[name] = (None,)
    for name, draws in left.items():
        if all(one is None for one in draws):
            continue
        below = {one for site, found in left.items() if inside(site, name) for one in found}
        if len(below) == 1 and name:
            forks[name] = Forked(name, (draws[0],), True)
            continue
        calls = entries.get(name, 1)
        each = len(draws) // calls
        if len(set(draws)) > 1 and tuple(draws) != tuple(draws[:each]) * calls:
            return {}, [], f"`{name or 'the model'}` draws otherwise from call to call"
        forks[name] = Forked(name, tuple(draws[:each]) or (draws[0],), False)
        framed.append(name)
    inside_one = [
        name for name in left if name not in forks and any(inside(name, outer) for outer in framed)
    ]
    return forks, inside_one, ""


def _compiled(module: nn.Module) -> dict[str, str]:
    """The outermost modules that are compiled: whole, or where a pattern matches."""
    from schedlang.runtime.forward import layer_of
    from schedlang.runtime.fusion.fuse import Fuse

    found: dict[str, str] = {}
    for name, one in module.named_modules():
        layer = layer_of(one, "fuse")
        if layer is not None and not any(inside(name, outer) for outer in found):
            found[name] = "whole" if isinstance(layer, Fuse) else "pattern"
    return found


def _eager(module: nn.Module, name: str) -> None:
    from schedlang.runtime.forward import layer_of
    from schedlang.runtime.fusion.fuse import Fuse

    layer = layer_of(module.get_submodule(name), "fuse")
    assert isinstance(layer, Fuse)
    layer.eager = "in training it draws some masks alike on all ranks, and some apart"


def _logical(
    plan: Plan, prepared: Prepared, ranks: Ranks, module: nn.Module, seed: int
) -> LogicalDropout:
    """Masks that do not depend on the layout."""
    from schedlang.runtime.rng.logical_dropout import LogicalDropout
    from schedlang.runtime.scope import named_sites

    slices = windows_of(plan, prepared, ranks)
    named_sites(module)
    if parts := prepared.tokens or prepared.slicing:
        slices = parts.windows(slices)
    return LogicalDropout(seed, slices, prepared.traced.unbatched)


def windows_of(plan: Plan, prepared: Prepared, ranks: Ranks) -> Slices:
    """The part of a logical mask that shards of this rank hold."""
    from schedlang.runtime.rng.logical_dropout import Window, is_unbatched, of_evaluation
    from schedlang.runtime.scope import current

    # not the plan itself: a program that keeps it keeps the original model with it
    mesh, masks, rank = plan.mesh, prepared.traced.masks, ranks.rank
    unbatched = prepared.traced.unbatched
    split = bool(plan.boundaries) or any(plan.held(name).splits for name in plan.layouts)

    def slices(site: str, call: int, shape: tuple[int, ...]) -> Window | None:
        whole, tags = masks.get((site, call), ((), {}))
        here = current()
        if here is not None and here.evaluation:
            whole, tags = of_evaluation(masks, site, len(shape), split)
        if not tags:
            return None
        # dim 0 holds the samples: alone, or with something that each of them has several of
        first = int(not is_unbatched(unbatched, site, call) and len(shape) < len(whole))
        logical = list(shape)
        index: list[Any] = [None] * len(shape)
        for axis, tag in tags.items():
            dim, parts = tag.dim - first, mesh.size(axis)
            logical[dim] = tag.uneven.true(shape[dim], parts)
            place = mesh.index(rank, axis)
            index[dim] = tag.positions(logical[dim], parts, place)
        return Window(tuple(logical), tuple(index))

    return slices
