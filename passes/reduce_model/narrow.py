"""A smaller model under the same schedule: layers first, then widths, then values and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.reduce_model.depth import Deep, counterpart, deep_sizes, shows_all
from schedlang.passes.reduce_model.minimise import (
    Key,
    Quantity,
    Rules,
    Search,
    Split,
    counted,
    keeps,
    learned,
    limits,
)
from schedlang.passes.reduce_model.recipe import Recipe, refused
from schedlang.passes.reduce_model.small_batch import Batch, Cutting, small
from schedlang.passes.reduce_model.whole import Whole, parts, stage_mesh, trace

if TYPE_CHECKING:
    from torch import nn

    from schedlang.ir.model import ModelFacts, Site

LIMIT = 64  # what no shape depends on, such as the longest sequence
MADE, PLANNED = 200, 12  # choices of sizes that are made, and planned, before giving up


@dataclass(frozen=True)
class Data:
    """Batches, loss and the seed of the model's values."""

    batches: Sequence[Batch]
    loss: Any
    seed: int


class Narrowing:
    """Tries to make a model smaller, for one mesh after the other."""

    def __init__(self, whole: Whole, recipe: Recipe, data: Data) -> None:
        self.whole, self.recipe, self.data = whole, recipe, data
        self._layers: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
        self._known: dict[tuple[tuple[str, int], ...], list[Quantity]] = {}

    def full_width(self, mesh: Mapping[str, int]) -> None:
        """Refuse what the ranks would meet at full size: fewer layers, traced in full width.

        Layers that are alike are traced alike.
        """
        sizes = stage_mesh(self.whole.plan, mesh)
        shallow = self._shallow(self._fewest(mesh))
        _flags(self.whole.plan.model, shallow)
        plan = self.whole.at(shallow, sizes, requires=False)
        trace(plan, self.data.batches[0], self.data.loss)

    def at(
        self, mesh: Mapping[str, int], requires: bool
    ) -> tuple[Plan, tuple[Batch, ...], Mapping[str, int]]:
        """The plan of the smallest model that keeps everything, its batches and its sizes.

        Refuses S752 and S753, and whatever the rows refuse on each choice of sizes.
        """
        fixed = self._fewest(mesh)
        known = self._learned(fixed)
        fixed = fixed | {name: min(self.recipe.sizes[name], LIMIT) for name in limits(known)}
        known = [q for q in known if not set(q.depends) & set(fixed)]
        rules = _rules(self.whole.plan, self._shallow(fixed), mesh)
        reasons: list[Refusal] = []
        for tried, chosen in enumerate(Search(self.recipe.sizes, known, rules)):
            if tried == MADE or len(reasons) == PLANNED:
                break
            sizes = fixed | chosen
            made = self.recipe.meta(sizes)
            if made is None or not keeps(known, counted(made), rules):
                continue
            try:
                return *_filled(self.whole, self.recipe, sizes, mesh, requires, self.data), sizes
            except Refusal as refusal:
                reasons.append(refusal)
        said = ", ".join(f"{axis}={size}" for axis, size in mesh.items()) or "one rank"
        raise (
            reasons[0]
            if reasons
            else refused("S752", f"on a mesh of {said} no sizes keep the divisibility")
        )

    def _shallow(self, fixed: Mapping[str, int]) -> nn.Module:
        made = self.recipe.meta(fixed)
        assert made is not None, "the sizes chosen so far make a model"
        return made

    def _learned(self, fixed: Mapping[str, int]) -> list[Quantity]:
        key = tuple(fixed.items())
        if key not in self._known:
            self._known[key] = learned(self.recipe, fixed)
        return self._known[key]

    def _fewest(self, mesh: Mapping[str, int]) -> dict[str, int]:
        """The numbers of layers, each as small as it can be."""
        sizes = stage_mesh(self.whole.plan, mesh)
        key = tuple(sizes.items())
        if key not in self._layers:
            fixed: dict[str, int] = {}
            for deep in deep_sizes(self.recipe, self.whole.plan.model):
                fixed[deep.name] = _layers(self.whole, self.recipe, deep, fixed, sizes)
            self._layers[key] = fixed
        return self._layers[key]


def _layers(
    whole: Whole, recipe: Recipe, deep: Deep, fixed: Mapping[str, int], sizes: Mapping[str, int]
) -> int:
    for layers in range(1, deep.layers):
        made = recipe.meta({**fixed, deep.name: layers})
        if made is None:
            continue
        _flags(whole.plan.model, made)
        try:
            plan = whole.at(made, sizes, requires=False)
        except Refusal:
            continue
        if shows_all(whole.plan, plan, deep.lists):
            return layers
    return deep.layers


# -- widths ------------------------------------------------------------------------------------


def _rules(plan: Plan, model: nn.Module, mesh: Mapping[str, int]) -> Rules:
    """Collect what the rows of the schedule require of sizes."""
    named = [name for layout in plan.layouts.values() for name in layout.axes]
    named += [b.axis for boundaries in plan.boundaries.values() for b in boundaries]
    over = {axis for name in named for axis in plan.mesh.fold(name)}
    splits = {Split(size, mesh[axis]) for axis, size in plan.mesh.axes if axis in over}
    rows = frozenset(
        Key(fqn, name, dim)
        for fqn, site in _facts(model).sites.items()
        for name, dim in _tables(site)
    )
    return Rules(tuple(splits), tuple(dict.fromkeys(_pads(plan))), rows)


def _tables(site: Site) -> list[tuple[str, int]]:
    """The parameters of a module that have a row for each id, and which dim that is."""
    named = [(name, dims) for name, dims in site.dims.items() if name in site.parameters]
    return [(name, dims.index("vocab")) for name, dims in named if "vocab" in dims]


def _pads(plan: Plan) -> list[tuple[int, int]]:
    """Dims that are padded, by their size, and to a multiple of what."""
    return [(one.size, one.multiple) for one in plan.padded]


# -- values ------------------------------------------------------------------------------------


def _filled(
    whole: Whole,
    recipe: Recipe,
    chosen: Mapping[str, int],
    mesh: Mapping[str, int],
    requires: bool,
    data: Data,
) -> tuple[Plan, tuple[Batch, ...]]:
    """The reduced model with values, planned and traced; and batches for it."""
    import torch

    torch.manual_seed(data.seed)
    with torch.device("cpu"):
        made = recipe.make(chosen)
    _flags(whole.plan.model, made)
    plan = whole.at(made, mesh, requires)
    cutting = _cutting(whole.plan, plan, recipe, chosen)
    fewer = tuple(small(batch, cutting) for batch in data.batches)
    runs(made, fewer, data.loss)
    trace(plan, fewer[0], data.loss)
    return plan, fewer


def _flags(old: ModelFacts, made: nn.Module) -> None:
    """Copy requires_grad, dtype and training mode from the whole model."""
    sites = _facts(made).sites
    lists = {
        fqn: (len(site.children), len(old.children(fqn)))
        for fqn, site in sites.items()
        if fqn in old.sites and len(site.children) < len(old.children(fqn))
    }
    for name, tensor in made.named_parameters():
        like = old.model.get_parameter(counterpart(name, lists))
        tensor.requires_grad_(like.requires_grad)
        tensor.data = tensor.data.to(like.dtype)
    for fqn, module in made.named_modules():
        module.training = old.model.get_submodule(counterpart(fqn, lists)).training


def _cutting(old: Plan, new: Plan, recipe: Recipe, chosen: Mapping[str, int]) -> Cutting:
    tables: dict[int, int] = {}
    for fqn, site in new.model.sites.items():
        for name, dim in _tables(site):
            before = old.model.sites[fqn].parameters[name].shape[dim]
            tables[before] = site.parameters[name].shape[dim]
    sizes: dict[int, set[int]] = {}
    for name, size in chosen.items():
        sizes.setdefault(recipe.sizes[name], set()).add(size)
    dims = {old: new.pop() for old, new in sizes.items() if len(new) == 1}
    return Cutting(dims, tables, recipe.specials, (parts(old), parts(new)))


def runs(model: nn.Module, batches: Sequence[Batch], loss: Any) -> None:
    """The reduced model and the loss take the reduced batches, or it is refused here (S753)."""
    import copy

    import torch

    from schedlang.runtime.batch import called

    try:
        with torch.no_grad():
            for batch in batches:
                output = called(copy.deepcopy(model), batch)
                if loss is not None:
                    loss(output, batch)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise refused(
            "S753", reason, "and `small_batch(seed)`: it returns a batch for it"
        ) from error


def _facts(model: nn.Module) -> ModelFacts:
    from schedlang.ir.model import ModelFacts

    return ModelFacts(model)
