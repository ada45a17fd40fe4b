"""Shrink a model: the same classes and schedule, with sizes as small as their meaning allows.

The number of layers is reduced first, then widths, then the model gets values and batches. The
schedule is planned at full size before, and traced in full width. The result is for `verify`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.model import ModelFacts, Site
from schedlang.ir.module_copies import copy_module
from schedlang.ir.plan import Plan
from schedlang.language import nodes as n
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.partition.stage_assignment import ChainUnit, even_stages, trunk_modules
from schedlang.passes.reduce_model.blocks import full_model_name, shows_all_kinds
from schedlang.passes.reduce_model.sizes import (
    AxisRanks,
    LayerSize,
    ModelRecipe,
    QuantityPlace,
    SizedQuantity,
    SizeRules,
    SizeSearch,
    dropout_rates,
    find_free_sizes,
    find_layer_sizes,
    find_recipes,
    learn_quantities,
    plain_attributes,
    read_quantities,
    reduction_refusal,
    satisfies_rules,
)
from schedlang.passes.reduce_model.small_batch import Batch, BatchReduction, reduce_batch
from schedlang.report import Gap, Report

if TYPE_CHECKING:
    from torch import nn

    from schedlang.ir.modelfile import ModelFile

# -- meshes for one machine ------------------------------------------------------------------------


MAX_SMALL_RANKS = 8


def small_meshes(axes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield smaller sizes of the axes, the best first; only the mesh itself if it is small enough.

    The best mesh has no axis of size 1, axes of different sizes (so that a reduction over the
    wrong axis shows), and few ranks.
    """
    if math.prod(axes.values()) <= MAX_SMALL_RANKS:
        yield dict(axes)
        return
    ranges = [range(1, min(size, MAX_SMALL_RANKS) + 1) for size in axes.values()]
    meshes = [
        dict(zip(axes, sizes))
        for sizes in itertools.product(*ranges)
        if math.prod(sizes) <= MAX_SMALL_RANKS
    ]
    yield from sorted(
        (mesh for mesh in meshes if max(mesh.values()) > 1), key=lambda m: _cost(m, axes)
    )


def _cost(mesh: Mapping[str, int], axes: Mapping[str, int]) -> tuple[int, int, int]:
    left_out = sum(mesh[name] == 1 < size for name, size in axes.items())
    sizes = [size for size in mesh.values() if size > 1]
    return left_out, len(sizes) - len(set(sizes)), math.prod(sizes)


# -- the schedule at full size ---------------------------------------------------------------------


@dataclass(frozen=True)
class FullSchedule:
    """The schedule at full size: its syntax tree, settings and plan for the full model.

    `reduce_to_given` is the mesh that the user requested for the reduced model, if any.
    """

    tree: n.File
    settings: Settings
    plan: Plan
    given_mesh: Mapping[str, int] | None = None

    def plan_for(self, model: nn.Module, mesh: Mapping[str, int], requires: bool = True) -> Plan:
        """Return the plan of the same file for another model on another mesh."""
        facts = ModelFacts(model)
        # the model was made by its class, not by the model file
        facts.python_replacements.update(self.plan.model.replacements)
        plan = expand(self._tree(requires), facts, self._set(mesh)).plan
        assert plan is not None
        return plan

    def accepted_meshes(self, requires: bool) -> Iterator[Mapping[str, int]]:
        """Yield small meshes that the file's knobs accept, the best first."""
        if self.given_mesh is not None:
            yield self.given_mesh
            return
        for mesh in small_meshes(self.plan.mesh.sizes):
            try:
                expand(self._tree(requires), None, self._set(mesh))
            except Refusal:
                continue
            yield mesh

    def _tree(self, requires: bool) -> n.File:
        items = self.tree.items
        kept_items = tuple(item for item in items if requires or not isinstance(item, n.Require))
        return replace(self.tree, items=kept_items)

    def _set(self, mesh: Mapping[str, int]) -> Settings:
        """Return settings for a mesh, without the knobs that size its axes."""
        args = [a for item in self.tree.items if isinstance(item, n.Mesh) for a in item.args]
        values = [a.value for a in args if isinstance(a, n.Keyword)]
        sizing = {value.text for value in values if isinstance(value, n.Name)}
        return Settings({k: v for k, v in self.settings.knobs.items() if k not in sizing}, mesh)


def plan_full_size(tree: n.File, settings: Settings, model: nn.Module) -> FullSchedule:
    """Plan the schedule at full size; refuse sizes that are not divisible there.

    A mesh in the settings that fits on one machine is the mesh of the reduced model; the full mesh
    is then the file's.
    """
    requested = expand(tree, None, settings).mesh if settings.mesh else None
    small = requested is not None and requested.world <= MAX_SMALL_RANKS
    if small:
        settings = replace(settings, mesh={})
    plan = expand(tree, ModelFacts(model), settings).plan
    assert plan is not None
    _enough_layers(plan)
    return FullSchedule(tree, settings, plan, dict(requested.axes) if small and requested else None)


def _enough_layers(plan: Plan) -> None:
    """Refuse (S613) a list that is split into more stages than it has layers."""
    for cut in plan.cuts:
        if cut.trunks:
            even_stages(
                [ChainUnit(name, 1) for name in trunk_modules(plan, cut)], plan.stages(cut.axis)
            )


def count_batch_parts(plan: Plan) -> int:
    """Return the number of parts into which a batch is split."""
    return plan.shares * (plan.micro)


def trace_plan(plan: Plan, batch: Batch, loss: Any) -> None:
    """Trace a plan on the meta device; raise the refusals that ranks would raise."""
    from schedlang.runtime.batch import split_batch

    micro = plan.micro
    try:
        sample = split_batch(dict(batch), plan.share_weights, micro)[0][0].inputs
    except Refusal:  # fewer rows than parts: shapes can be traced nevertheless
        sample = dict(batch)
    prepare(plan, sample, loss)


def stage_mesh(plan: Plan, mesh: Mapping[str, int]) -> dict[str, int]:
    """Return the full mesh, with the sizes of `mesh` for the axes of stages."""
    cut = {axis for one in plan.cuts for axis in plan.mesh.fold(one.axis)}
    return {axis: mesh[axis] if axis in cut else size for axis, size in plan.mesh.axes}


def codes_of(refusals: Sequence[Refusal]) -> set[str]:
    """Return the codes of all diagnostics of some refusals."""
    return {d.code for refusal in refusals for d in refusal.diagnostics}


MAX_FREE_SIZE = 64  # bound of sizes on which no shape depends, such as the longest sequence
# choices of sizes that are made, and planned, before the search stops
MAX_MADE, MAX_PLANNED = 200, 12


@dataclass(frozen=True)
class ReductionData:
    """The batches, the loss, and the seed of the model's values."""

    batches: Sequence[Batch]
    loss: Any
    seed: int


class ModelReducer:
    """The search for a smaller model; results are cached between meshes."""

    def __init__(self, full: FullSchedule, recipe: ModelRecipe, data: ReductionData) -> None:
        self.whole, self.recipe, self.data = full, recipe, data
        self._fewest_layers: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
        self._known: dict[tuple[tuple[str, int], ...], list[SizedQuantity]] = {}

    def check_full_width(self, mesh: Mapping[str, int]) -> None:
        """Raise the refusals of full size: trace the plan in full width, with fewer layers.

        Fewer layers suffice, since equal layers have equal traces.
        """
        sizes = stage_mesh(self.whole.plan, mesh)
        shallow = self._shallow(self._fewest(mesh))
        _copy_flags(self.whole.plan.model, shallow)
        plan = self.whole.plan_for(shallow, sizes, requires=False)
        trace_plan(plan, self.data.batches[0], self.data.loss)

    def reduce_to(
        self, mesh: Mapping[str, int], requires: bool
    ) -> tuple[Plan, tuple[Batch, ...], Mapping[str, int]]:
        """Return the plan of the smallest model that satisfies all rules, its batches and sizes.

        Raises S752, S753, or the first refusal of the rows, if no choice of sizes is accepted.
        """
        fixed = self._fewest(mesh)
        quantities = self._learned(fixed)
        free = find_free_sizes(quantities)
        fixed = fixed | {name: min(self.recipe.sizes[name], MAX_FREE_SIZE) for name in free}
        quantities = [quantity for quantity in quantities if not set(quantity.depends) & set(fixed)]
        rules = _rules(self.whole.plan, self._shallow(fixed), mesh)
        reasons: list[Refusal] = []
        for attempt, new_sizes in enumerate(SizeSearch(self.recipe.sizes, quantities, rules)):
            if attempt == MAX_MADE or len(reasons) == MAX_PLANNED:
                break
            sizes = fixed | new_sizes
            model = self.recipe.make_on_meta(sizes)
            if model is None or not satisfies_rules(quantities, read_quantities(model), rules):
                continue
            try:
                return *_make_reduced(
                    self.whole, self.recipe, sizes, mesh, requires, self.data
                ), sizes
            except Refusal as refusal:
                reasons.append(refusal)
        text = ", ".join(f"{axis}={size}" for axis, size in mesh.items()) or "one rank"
        raise (
            reasons[0]
            if reasons
            else reduction_refusal("S752", f"on a mesh of {text} no sizes keep the divisibility")
        )

    def _shallow(self, fixed: Mapping[str, int]) -> nn.Module:
        model = self.recipe.make_on_meta(fixed)
        assert model is not None, "the sizes chosen so far make a model"
        return model

    def _learned(self, fixed: Mapping[str, int]) -> list[SizedQuantity]:
        key = tuple(fixed.items())
        if key not in self._known:
            self._known[key] = learn_quantities(self.recipe, fixed)
        return self._known[key]

    def _fewest(self, mesh: Mapping[str, int]) -> dict[str, int]:
        """Return the smallest possible numbers of layers, by size name."""
        sizes = stage_mesh(self.whole.plan, mesh)
        key = tuple(sizes.items())
        if key not in self._fewest_layers:
            fixed: dict[str, int] = {}
            for deep in find_layer_sizes(self.recipe, self.whole.plan.model):
                fixed[deep.name] = _fewest_layers(self.whole, self.recipe, deep, fixed, sizes)
            self._fewest_layers[key] = fixed
        return self._fewest_layers[key]


def _fewest_layers(
    full: FullSchedule,
    recipe: ModelRecipe,
    layer_size: LayerSize,
    fixed: Mapping[str, int],
    sizes: Mapping[str, int],
) -> int:
    for layers in range(1, layer_size.layers):
        model = recipe.make_on_meta({**fixed, layer_size.name: layers})
        if model is None:
            continue
        _copy_flags(full.plan.model, model)
        try:
            plan = full.plan_for(model, sizes, requires=False)
        except Refusal:
            continue
        if shows_all_kinds(full.plan, plan, layer_size.lists):
            return layers
    return layer_size.layers


# -- widths ------------------------------------------------------------------------------------


def _rules(plan: Plan, model: nn.Module, mesh: Mapping[str, int]) -> SizeRules:
    """Return the rules for sizes that follow from the rows of the schedule."""
    axis_names = [name for layout in plan.layouts.values() for name in layout.axes]
    axis_names += [b.axis for boundaries in plan.boundaries.values() for b in boundaries]
    sharding_axes = {axis for name in axis_names for axis in plan.mesh.fold(name)}
    splits = {AxisRanks(size, mesh[axis]) for axis, size in plan.mesh.axes if axis in sharding_axes}
    rows = frozenset(
        QuantityPlace(fqn, name, dim)
        for fqn, site in ModelFacts(model).sites.items()
        for name, dim in _tables(site)
    )
    return SizeRules(tuple(splits), tuple(dict.fromkeys(_pads(plan))), rows)


def _tables(site: Site) -> list[tuple[str, int]]:
    """Return (parameter, dim) of a module's parameters that have a row for each id."""
    dims_by_name = [(name, dims) for name, dims in site.dims.items() if name in site.parameters]
    return [(name, dims.index("vocab")) for name, dims in dims_by_name if "vocab" in dims]


def _pads(plan: Plan) -> list[tuple[int, int]]:
    """Return (size, multiple) of the padded dims."""
    return [(padded.size, padded.multiple) for padded in plan.padded]


# -- values ------------------------------------------------------------------------------------


def _make_reduced(
    full: FullSchedule,
    recipe: ModelRecipe,
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
    requires: bool,
    data: ReductionData,
) -> tuple[Plan, tuple[Batch, ...]]:
    """Make the reduced model with values; return its plan, after a trace, and its batches."""
    import torch

    torch.manual_seed(data.seed)
    with torch.device("cpu"):
        model = recipe.make(sizes)
    _copy_flags(full.plan.model, model)
    plan = full.plan_for(model, mesh, requires)
    cutting = _cutting(full.plan, plan, recipe, sizes)
    reduced_batches = tuple(reduce_batch(batch, cutting) for batch in data.batches)
    check_reduced_run(model, reduced_batches, data.loss)
    trace_plan(plan, reduced_batches[0], data.loss)
    return plan, reduced_batches


def _copy_flags(old: ModelFacts, made: nn.Module) -> None:
    """Copy requires_grad, dtype and training mode from the full model to a reduced model."""
    sites = ModelFacts(made).sites
    lists = {
        fqn: (len(site.children), len(old.children(fqn)))
        for fqn, site in sites.items()
        if fqn in old.sites and len(site.children) < len(old.children(fqn))
    }
    for name, tensor in made.named_parameters():
        original = old.model.get_parameter(full_model_name(name, lists))
        tensor.requires_grad_(original.requires_grad)
        tensor.data = tensor.data.to(original.dtype)
    for fqn, module in made.named_modules():
        module.training = old.model.get_submodule(full_model_name(fqn, lists)).training


def _cutting(
    old: Plan, new: Plan, recipe: ModelRecipe, new_sizes: Mapping[str, int]
) -> BatchReduction:
    tables: dict[int, int] = {}
    for fqn, site in new.model.sites.items():
        for name, dim in _tables(site):
            old_size = old.model.sites[fqn].parameters[name].shape[dim]
            tables[old_size] = site.parameters[name].shape[dim]
    sizes: dict[int, set[int]] = {}
    for name, size in new_sizes.items():
        sizes.setdefault(recipe.sizes[name], set()).add(size)
    dims = {old: new.pop() for old, new in sizes.items() if len(new) == 1}
    return BatchReduction(
        dims, tables, recipe.specials, (count_batch_parts(old), count_batch_parts(new))
    )


def check_reduced_run(model: nn.Module, batches: Sequence[Batch], loss: Any) -> None:
    """Refuse (S753) batches that the reduced model or the loss rejects."""
    import torch

    from schedlang.runtime.batch import run_model

    try:
        with torch.no_grad():
            for batch in batches:
                output = run_model(copy_module(model), batch)
                if loss is not None:
                    loss(output, batch)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise reduction_refusal(
            "S753", reason, "and `small_batch(seed)`: it returns a batch for it"
        ) from error


@dataclass(frozen=True)
class ReducedModel:
    """A reduced model: its plan with values, its batches, and a description of the reduction.

    `gaps` are what the reduced model cannot show; `plan_full_size` is the plan at full size.
    """

    plan: Plan
    batches: tuple[Batch, ...]
    description: str
    gaps: tuple[Gap, ...]
    full_plan: Plan


def shrink(
    tree: n.File,
    settings: Settings,
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    loss: Callable[..., Any] | None = None,
    make: Callable[..., nn.Module] | None = None,
    seed: int = 0,
) -> ReducedModel:
    """Return a reduced model under the same schedule, with batches for it.

    The schedule is first planned at full size, and traced in full width; sizes that are not
    divisible are refused there. A mesh in the settings that fits on one machine is the mesh of the
    reduced model; otherwise a mesh is chosen. `make` is a function that makes the model; its
    parameters with integer defaults are sizes. Raises Refusal S751 where the model cannot be
    reduced, S752 where no reduction keeps the meaning of the schedule, S753 where batches do not
    fit the reduced model.
    """
    full = plan_full_size(tree, settings, model)
    recipe = _find_recipe(model, make)
    narrowing = ModelReducer(full, recipe, ReductionData(batches, loss, seed))
    for mesh in itertools.islice(full.accepted_meshes(requires=False), 1):
        narrowing.check_full_width(mesh)

    def at(mesh: Mapping[str, int], requires: bool) -> ReducedModel:
        plan, fewer, sizes = narrowing.reduce_to(mesh, requires)
        text = _describe_reduction(recipe, sizes, full.plan, plan)
        return ReducedModel(plan, fewer, text, _gaps(full.plan, plan), full.plan)

    return _first_accepted(full, at)


def reduce_to_given(
    tree: n.File,
    settings: Settings,
    model: nn.Module,
    smaller: nn.Module,
    batches: Sequence[Batch],
    loss: Callable[..., Any] | None = None,
) -> ReducedModel:
    """Return the reduction with a given smaller model: the result of the model file's `small()`."""
    full = plan_full_size(tree, settings, model)
    check_reduced_run(smaller, batches, loss)

    def at(mesh: Mapping[str, int], requires: bool) -> ReducedModel:
        plan = full.plan_for(smaller, mesh, requires)
        text = f"to the model of `small()`, mesh {full.plan.mesh} -> {plan.mesh}"
        gaps = _gaps(full.plan, plan)
        return ReducedModel(plan, tuple(batches), text, gaps, full.plan)

    return _first_accepted(full, at)


def _first_accepted(
    full: FullSchedule, reduce_on: Callable[[Mapping[str, int], bool], ReducedModel]
) -> ReducedModel:
    """Return the model reduced for the first mesh that is accepted.

    If only `require` statements fail on all meshes, they are left out, and a gap reports this; they
    hold at full size.
    """
    reasons: list[Refusal] = []
    for requires in (True, False):
        for mesh in full.accepted_meshes(requires):
            try:
                reduced = reduce_on(mesh, requires)
            except Refusal as refusal:
                reasons.append(refusal)
                continue
            left_out = Gap("`require` on the reduced model", "nothing: they hold at full size")
            return reduced if requires else replace(reduced, gaps=(*reduced.gaps, left_out))
        if reasons and "S104" not in codes_of(reasons):
            break
    raise (
        reasons[0]
        if reasons
        else reduction_refusal(
            "S752", "the knobs that set the mesh allow no mesh of 8 ranks or fewer"
        )
    )


def _find_recipe(model: nn.Module, make: Callable[..., nn.Module] | None) -> ModelRecipe:
    """Return a recipe that makes the full model again; refuse (S751) if there is none."""
    refusals: list[Refusal] = []
    for recipe in find_recipes(model, make):
        try:
            _check_same_model(recipe, model)
            return recipe
        except Refusal as refusal:
            refusals.append(refusal)
    if refusals:
        raise refusals[0]
    meta_note = "; it is on the meta device, and cannot run" if has_meta_parameters(model) else ""
    raise reduction_refusal(
        "S751",
        f"it has no `config` as in transformers, and `model()` takes no sizes{meta_note}",
        "or let `model()` take sizes: `def model(width: int = 8192)`",
    )


def _check_same_model(recipe: ModelRecipe, model: nn.Module) -> None:
    """Refuse (S751) a recipe whose full model differs from the model."""
    rebuilt = recipe.make_on_meta({})
    if rebuilt is None:
        raise reduction_refusal("S751", "its class cannot be called with only its configuration")
    old, new = ModelFacts(model), ModelFacts(rebuilt)
    if {f: s.classes for f, s in old.sites.items()} != {f: s.classes for f, s in new.sites.items()}:
        raise reduction_refusal(
            "S751", "its modules differ from those that its class builds: they were changed"
        )
    shapes = {name: param.shape for name, param in old.parameters.items()}
    if shapes != {name: param.shape for name, param in new.parameters.items()}:
        raise reduction_refusal(
            "S751", "its shapes differ from those that its class builds: they were changed"
        )
    if old.ties != new.ties or plain_attributes(model) != plain_attributes(rebuilt):
        raise reduction_refusal("S751", "ties, hooks or attributes were changed after it was built")


# -- the report --------------------------------------------------------------------------------


def _describe_reduction(
    recipe: ModelRecipe, new_sizes: Mapping[str, int], old: Plan, new: Plan
) -> str:
    parts = [
        f"{name} {size} -> {new_sizes[name]}"
        for name, size in recipe.sizes.items()
        if new_sizes.get(name, size) != size
    ]
    if old.mesh != new.mesh:
        parts.append(f"mesh {old.mesh} -> {new.mesh}")
    return ", ".join(parts) or "nothing"


def _gaps(old: Plan, new: Plan) -> tuple[Gap, ...]:
    hidden = "overflow of numbers, tiles of kernels, memory, and what else only size shows"
    gaps = [Gap("the sizes of the whole model", hidden)]
    for axis, size in old.mesh.axes:
        new_size = new.mesh.size(axis)
        if 1 < new_size < size:
            gaps.append(
                Gap(f"more than {new_size} ranks along `{axis}`", "mistakes of a longer ring")
            )
        if new_size == 1 < size:
            gaps.append(Gap(f"the axis `{axis}`", "every mistake of the rows that use it"))
    for name in sorted(dropout_rates(old.model.model) - dropout_rates(new.model.model)):
        gaps.append(Gap(f"`{name}`, which is 0 in the reduced model", "mistakes of random numbers"))
    return tuple(gaps)


def with_reduction(report: Report, small: ReducedModel | None) -> Report:
    """Return the report with the reduction and its gaps; unchanged without a reduction."""
    if small is None:
        return report
    facts = (*report.facts, ("reduced", small.description))
    return replace(report, facts=facts, gaps=(*report.gaps, *small.gaps))


# -- model files -------------------------------------------------------------------------------


def has_meta_parameters(model: nn.Module) -> bool:
    """Return whether the model has parameters on the meta device."""
    return any(p.is_meta for p in model.parameters())


def reduce_model_file(
    tree: n.File,
    settings: Settings,
    file: ModelFile,
    model: nn.Module,
    batches: Sequence[Batch],
    seed: int,
) -> ReducedModel:
    """Return the reduction of a model file's model: by its `small()`, or by its sizes."""
    smaller = file.small(seed)
    if smaller is not None:
        small_batches = [file.small_batch(seed + step) for step in range(len(batches))]
        return reduce_to_given(tree, settings, model, smaller, small_batches, file.loss)
    make = file.module.model
    return shrink(tree, settings, model, batches, loss=file.loss, make=make, seed=seed)
