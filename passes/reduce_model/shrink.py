"""Shrink: the same classes and the same schedule with every size as small as its meaning allows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.language import nodes as n
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.reduce_model.minimise import written_in
from schedlang.passes.reduce_model.narrow import Data, Narrowing, runs
from schedlang.passes.reduce_model.recipe import Recipe, recipes, refused
from schedlang.passes.reduce_model.small_batch import Batch
from schedlang.passes.reduce_model.whole import Whole, codes, whole
from schedlang.report import Gap, Report

if TYPE_CHECKING:
    from torch import nn

    from schedlang.ir.modelfile import ModelFile


@dataclass(frozen=True)
class Shrunk:
    """A reduced model: its plan with values, its batches, and what was reduced.

    `whole` is the plan in full size.
    """

    plan: Plan
    batches: tuple[Batch, ...]
    said: str
    gaps: tuple[Gap, ...]
    whole: Plan


def shrink(
    tree: n.File,
    settings: Settings,
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    loss: Callable[..., Any] | None = None,
    make: Callable[..., nn.Module] | None = None,
    seed: int = 0,
) -> Shrunk:
    """A reduced model under the same schedule, and what to verify it with.

    The schedule is planned at full size first, and traced in full width: what does not divide is
    refused there.  A mesh given in the settings that one machine runs is the one of the reduced
    model; else one is chosen.  `make` is a function with sizes as defaults that makes the model.
    Raises Refusal S751 where the model cannot be made smaller, S752 where no reduction keeps the
    schedule's meaning, S753 where batches do not fit it.
    """
    full = whole(tree, settings, model)
    recipe = _recipe(model, make)
    narrowing = Narrowing(full, recipe, Data(batches, loss, seed))
    for mesh in itertools.islice(full.meshes(requires=False), 1):
        narrowing.full_width(mesh)

    def at(mesh: Mapping[str, int], requires: bool) -> Shrunk:
        plan, fewer, sizes = narrowing.at(mesh, requires)
        said = _said(recipe, sizes, full.plan, plan)
        return Shrunk(plan, fewer, said, _gaps(full.plan, plan), full.plan)

    return _first(full, at)


def given(
    tree: n.File,
    settings: Settings,
    model: nn.Module,
    smaller: nn.Module,
    batches: Sequence[Batch],
    loss: Callable[..., Any] | None = None,
) -> Shrunk:
    """The same with a reduced model that somebody made: the model file's `small()`."""
    full = whole(tree, settings, model)
    runs(smaller, batches, loss)

    def at(mesh: Mapping[str, int], requires: bool) -> Shrunk:
        plan = full.at(smaller, mesh, requires)
        said = f"to the model of `small()`, mesh {full.plan.mesh} -> {plan.mesh}"
        gaps = _gaps(full.plan, plan)
        return Shrunk(plan, tuple(batches), said, gaps, full.plan)

    return _first(full, at)


def _first(full: Whole, at: Callable[[Mapping[str, int], bool], Shrunk]) -> Shrunk:
    """On the first mesh that serves.  Where only a `require` is in the way, which holds at full
    size, it is left out and the report says so."""
    reasons: list[Refusal] = []
    for requires in (True, False):
        for mesh in full.meshes(requires):
            try:
                found = at(mesh, requires)
            except Refusal as refusal:
                reasons.append(refusal)
                continue
            left_out = Gap("`require` on the reduced model", "nothing: they hold at full size")
            return found if requires else replace(found, gaps=(*found.gaps, left_out))
        if reasons and "S104" not in codes(reasons):
            break
    raise (
        reasons[0]
        if reasons
        else refused("S752", "the knobs that set the mesh allow no mesh of 8 ranks or fewer")
    )


def _recipe(model: nn.Module, make: Callable[..., nn.Module] | None) -> Recipe:
    """Find a recipe that remakes the model in full size; refuse (S751) if none does."""
    wrong: list[Refusal] = []
    for recipe in recipes(model, make):
        try:
            _same_model(recipe, model)
            return recipe
        except Refusal as refusal:
            wrong.append(refusal)
    if wrong:
        raise wrong[0]
    also = "; it is on the meta device, and cannot run" if lies_on_meta(model) else ""
    raise refused(
        "S751",
        f"it has no `config` as in transformers, and `model()` takes no sizes{also}",
        "or let `model()` take sizes: `def model(width: int = 8192)`",
    )


def _same_model(recipe: Recipe, model: nn.Module) -> None:
    """Made anew in full size it is the model, or reducing it would verify another one."""
    from schedlang.ir.model import ModelFacts

    again = recipe.meta({})
    if again is None:
        raise refused("S751", "its class cannot be called with only its configuration")
    old, new = ModelFacts(model), ModelFacts(again)
    if {f: s.classes for f, s in old.sites.items()} != {f: s.classes for f, s in new.sites.items()}:
        raise refused(
            "S751", "its modules differ from those that its class builds: they were changed"
        )
    shapes = {name: fact.shape for name, fact in old.parameters.items()}
    if shapes != {name: fact.shape for name, fact in new.parameters.items()}:
        raise refused(
            "S751", "its shapes differ from those that its class builds: they were changed"
        )
    if old.ties != new.ties or written_in(model) != written_in(again):
        raise refused("S751", "ties, hooks or attributes were changed after it was built")


# -- what is said about it ---------------------------------------------------------------------


def _said(recipe: Recipe, chosen: Mapping[str, int], old: Plan, new: Plan) -> str:
    parts = [
        f"{name} {size} -> {chosen[name]}"
        for name, size in recipe.sizes.items()
        if chosen.get(name, size) != size
    ]
    if old.mesh != new.mesh:
        parts.append(f"mesh {old.mesh} -> {new.mesh}")
    return ", ".join(parts) or "nothing"


def _gaps(old: Plan, new: Plan) -> tuple[Gap, ...]:
    hidden = "overflow of numbers, tiles of kernels, memory, and what else only size shows"
    found = [Gap("the sizes of the whole model", hidden)]
    for axis, size in old.mesh.axes:
        now = new.mesh.size(axis)
        if 1 < now < size:
            found.append(Gap(f"more than {now} ranks along `{axis}`", "mistakes of a longer ring"))
        if now == 1 < size:
            found.append(Gap(f"the axis `{axis}`", "every mistake of the rows that use it"))
    return tuple(found)


def remarked(report: Report, small: Shrunk | None) -> Report:
    """The report of a reduced model says what was reduced, and what that cannot show."""
    if small is None:
        return report
    facts = (*report.facts, ("reduced", small.said))
    return replace(report, facts=facts, gaps=(*report.gaps, *small.gaps))


# -- who asks ----------------------------------------------------------------------------------


def lies_on_meta(model: nn.Module) -> bool:
    """Tell whether the model lies on the meta device."""
    return any(p.is_meta for p in model.parameters())


def shrunk(
    tree: n.File,
    settings: Settings,
    file: ModelFile,
    model: nn.Module,
    batches: Sequence[Batch],
    seed: int,
) -> Shrunk:
    """The reduction of a model file's model: by its `small()`, or by what its sizes are."""
    smaller = file.small(seed)
    if smaller is not None:
        own = [file.small_batch(seed + step) for step in range(len(batches))]
        return given(tree, settings, model, smaller, own, file.loss)
    make = file.module.model
    return shrink(tree, settings, model, batches, loss=file.loss, make=make, seed=seed)
