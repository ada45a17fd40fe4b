"""Shrink: the same classes and the same schedule with every size as small as its meaning allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang import nodes as n
from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.depth import Deep, counterpart, deep_sizes, shows_all
from schedlang.passes.expand import expand
from schedlang.passes.minimise import Rules, Search, Split, keeps
from schedlang.passes.quantities import Key, counted, learned, limits
from schedlang.passes.recipe import Recipe, recipe_of
from schedlang.passes.small_batch import Batch, Cutting, small
from schedlang.passes.small_mesh import small_meshes
from schedlang.passes.state import Settings
from schedlang.plan import Plan
from schedlang.report import Gap

if TYPE_CHECKING:
    from torch import nn

    from schedlang.model import ModelFacts

LIMIT = 64  # what no shape depends on, such as the longest sequence
TRIES = 24  # choices of sizes that are planned before giving up
OFFER = "define `small()` in the model file: the model as it is to be verified"


@dataclass(frozen=True)
class Shrunk:
    """What is verified in place of the whole: a plan with values, its batches, and what was done."""

    plan: Plan
    batches: tuple[Batch, ...]
    said: str
    gaps: tuple[Gap, ...]


@dataclass(frozen=True)
class Whole:
    """The schedule as written: its syntax, settings and plan for the model in full size."""

    tree: n.File
    settings: Settings
    plan: Plan

    def at(self, model: nn.Module, mesh: Mapping[str, int], requires: bool = True) -> Plan:
        """The same text planned for another model on another mesh."""
        from schedlang.model import ModelFacts

        items = self.tree.items
        if not requires:
            items = tuple(item for item in items if not isinstance(item, n.Require))
        knobs = {k: v for k, v in self.settings.knobs.items() if k not in self._sizing()}
        given = Settings(knobs, mesh)
        made = expand(replace(self.tree, items=items), ModelFacts(model), given).plan
        assert made is not None
        return made

    def _sizing(self) -> set[str]:
        """The knobs that size axes: the mesh sets them."""
        args = [a for item in self.tree.items if isinstance(item, n.Mesh) for a in item.args]
        named = [a.value for a in args if isinstance(a, n.Keyword)]
        return {value.text for value in named if isinstance(value, n.Name)}


def shrink(
    tree: n.File, settings: Settings, model: nn.Module, batches: Sequence[Batch], *,
    loss: Callable[..., Any] | None = None, make: Callable[..., nn.Module] | None = None,
    small_model: Callable[[], nn.Module] | None = None, seed: int = 0,
) -> Shrunk:  # fmt: skip
    """A reduced model under the same schedule, and what to verify it with.

    The schedule is planned and traced at full size first: what does not divide there is refused
    there.  `make` is a function with sizes as defaults that makes the model, `small_model` one that
    makes the reduced model itself.  Raises Refusal S721 where the model cannot be made smaller,
    S722 where no reduction keeps the schedule's meaning, S723 where batches do not fit it.
    """
    plan = expand(tree, _facts(model), settings).plan
    assert plan is not None
    whole = Whole(tree, settings, plan)
    if small_model is not None:
        return _given(whole, small_model, batches, seed)
    recipe = recipe_of(model, make)
    if recipe is None:
        raise _refused("S721", "what sizes it is made of is not known",
                       "or let `model()` take sizes: `def model(width: int = 8192)`")  # fmt: skip
    _same_model(recipe, model)
    _enough_layers(plan)
    reasons: list[Refusal] = []
    for requires in (True, False):
        for mesh in _meshes(whole):
            try:
                return _reduced(whole, recipe, mesh, requires, batches, loss, seed)
            except Refusal as refusal:
                reasons.append(refusal)
    raise reasons[0]


def _facts(model: nn.Module) -> ModelFacts:
    from schedlang.model import ModelFacts

    return ModelFacts(model)


def _enough_layers(plan: Plan) -> None:
    """Refuse a list that is cut into more stages than it has layers (S613)."""
    from schedlang.passes.stages import Unit, even

    for cut in plan.cuts:
        if cut.trunk is not None:
            units = [Unit(child, 1) for child in plan.model.children(cut.trunk)]
            chunks = plan.order.chunks if plan.order is not None else 1
            even(units, plan.mesh.size(cut.axis) * chunks)


def _trace(plan: Plan, batches: Sequence[Batch], loss: Any) -> None:
    """Follow full widths through fewer layers on the meta device: what does not divide is refused.

    Layers that are alike are traced alike, so the fewest that show all kinds stand for all.
    """
    from schedlang.passes.prepare import prepare
    from schedlang.runtime.parts import split

    micro = plan.order.micro if plan.order is not None else 1
    sample = split(dict(batches[0]), plan.mesh.size(plan.data_axes), micro)[0][0].inputs
    prepare(plan, sample, loss)


def _refused(code: str, reason: str, *helps: str) -> Refusal:
    titles = {
        "S721": "this model cannot be made smaller",
        "S722": "no smaller model shows all that the schedule does",
        "S723": "the batch does not fit the reduced model",
    }
    return Refusal(Diagnostic(code, titles[code], notes=(reason,), helps=(OFFER, *helps)))


def _same_model(recipe: Recipe, model: nn.Module) -> None:
    """Made anew in full size it is the model, or reducing it would verify another one."""
    again = recipe.meta({})
    if again is None:
        raise _refused("S721", "its class cannot be called with its configuration alone")
    old, new = _facts(model), _facts(again)
    if {f: s.classes for f, s in old.sites.items()} != {f: s.classes for f, s in new.sites.items()}:
        raise _refused("S721", "its modules are not those that its class makes: they were changed")
    shapes = {name: fact.shape for name, fact in old.parameters.items()}
    if shapes != {name: fact.shape for name, fact in new.parameters.items()}:
        raise _refused("S721", "its shapes are not those that its class makes: they were changed")
    if old.ties != new.ties or counted(model) != counted(again):
        raise _refused("S721", "ties or numbers of its modules were changed after it was made")


def _meshes(whole: Whole) -> Iterator[dict[str, int]]:
    """Smaller meshes whose sizes the knobs of the file accept."""
    for mesh in small_meshes(whole.plan.mesh.sizes):
        try:
            knobs = {k: v for k, v in whole.settings.knobs.items() if k not in whole._sizing()}
            expand(whole.tree, None, Settings(knobs, mesh))
        except Refusal:
            continue
        yield mesh


# -- layers, then widths -----------------------------------------------------------------------


def _reduced(
    whole: Whole, recipe: Recipe, mesh: Mapping[str, int], requires: bool,
    batches: Sequence[Batch], loss: Any, seed: int,
) -> Shrunk:  # fmt: skip
    fixed, sizes = _shallow(whole, recipe, mesh)
    shallow = recipe.meta(fixed)
    assert shallow is not None
    _trace(whole.at(shallow, sizes, requires=False), batches, loss)
    known = learned(recipe, fixed)
    fixed |= {name: min(recipe.sizes[name], LIMIT) for name in limits(known)}
    known = [q for q in known if not set(q.depends) & set(fixed)]
    rules = _rules(whole.plan, shallow, mesh)
    first: Refusal | None = None
    for tried, sizes in enumerate(Search(recipe.sizes, known, rules)):
        chosen = {**fixed, **sizes}
        made = recipe.meta(chosen)
        if made is None or not keeps(known, counted(made), rules):
            continue
        try:
            plan = whole.at(made, mesh, requires)
        except Refusal as refusal:
            first = first or refusal
            if tried > TRIES:
                break
            continue
        return _finished(whole, recipe, chosen, mesh, requires, batches, seed)
    raise first or _refused("S722", f"on {dict(mesh)} no sizes keep what divides what")


def _shallow(
    whole: Whole, recipe: Recipe, mesh: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """The numbers of layers, each as small as it can be, and the mesh with fewer stages only."""
    cut = {axis for one in whole.plan.cuts for axis in whole.plan.mesh.fold(one.axis)}
    sizes = {a: mesh[a] if a in cut else size for a, size in whole.plan.mesh.axes}
    fixed: dict[str, int] = {}
    for deep in deep_sizes(recipe, whole.plan.model):
        fixed[deep.name] = _layers(whole, recipe, deep, fixed, sizes)
    return fixed, sizes


def _layers(
    whole: Whole, recipe: Recipe, deep: Deep, fixed: Mapping[str, int], sizes: Mapping[str, int]
) -> int:
    for layers in range(1, deep.layers):
        made = recipe.meta({**fixed, deep.name: layers})
        if made is None:
            continue
        try:
            plan = whole.at(made, sizes, requires=False)
        except Refusal:
            continue
        if shows_all(whole.plan, plan, deep.lists):
            return layers
    return deep.layers


def _rules(plan: Plan, model: nn.Module, mesh: Mapping[str, int]) -> Rules:
    facts = _facts(model)
    over = {axis for layout in plan.layouts.values() for name in layout.axes
            for axis in plan.mesh.fold(name)}  # fmt: skip
    over |= {a for bs in plan.boundaries.values() for b in bs for a in plan.mesh.fold(b.axis)}
    splits = {Split(size, mesh[axis]) for axis, size in plan.mesh.axes if axis in over}
    tables = frozenset(
        Key(fqn, name, dims.index("vocab"))
        for fqn, site in facts.sites.items()
        for name, dims in site.dims.items()
        if "vocab" in dims and name in site.parameters
    )
    pads = [
        (plan.layout(site.parameters["weight"].name).shape[dims.index(primitive.dim)],
         primitive.multiple)
        for action in plan.actions if action.name == "pad"
        for primitive in [action.primitive]
        for site in [plan.model.sites[fqn] for fqn in action.sites]
        for dims in [site.dims["weight"]]
    ]  # fmt: skip
    return Rules(tuple(splits), tuple(dict.fromkeys(pads)), tables)


def _finished(
    whole: Whole, recipe: Recipe, chosen: Mapping[str, int], mesh: Mapping[str, int],
    requires: bool, batches: Sequence[Batch], seed: int,
) -> Shrunk:  # fmt: skip
    """The reduced model with values, planned; and batches for it."""
    import torch

    torch.manual_seed(seed)
    with torch.device("cpu"):
        made = recipe.make(chosen)
    _flags(whole.plan.model, made)
    plan = whole.at(made, mesh, requires)
    cut = _cutting(whole.plan, plan, recipe, chosen)
    fewer = tuple(small(batch, cut) for batch in batches)
    _runs(made, fewer[0])
    return Shrunk(plan, fewer, _said(recipe, chosen, whole.plan, plan), _gaps(whole.plan, plan))


def _flags(old: ModelFacts, made: nn.Module) -> None:
    """What is frozen and of which dtype, as in the whole model."""
    lists = {
        fqn: (len(site.children), len(old.children(fqn)))
        for fqn, site in _facts(made).sites.items()
        if fqn in old.sites and len(site.children) < len(old.children(fqn))
    }
    tensors = dict(old.model.named_parameters(remove_duplicate=False))
    for name, tensor in made.named_parameters():
        like = tensors[counterpart(name, lists)]
        tensor.requires_grad_(like.requires_grad)
        tensor.data = tensor.data.to(like.dtype)
    made.train(old.model.training)


def _cutting(old: Plan, new: Plan, recipe: Recipe, chosen: Mapping[str, int]) -> Cutting:
    tables = {}
    for fqn, site in new.model.sites.items():
        before = old.model.sites.get(fqn)
        for name, dims in site.dims.items():
            if before is not None and "vocab" in dims and name in site.parameters:
                dim = dims.index("vocab")
                tables[before.parameters[name].shape[dim]] = site.parameters[name].shape[dim]
    dims = {recipe.sizes[name]: size for name, size in chosen.items() if size < recipe.sizes[name]}
    return Cutting(dims, tables, recipe.specials, (_parts(old), _parts(new)))


def _parts(plan: Plan) -> int:
    return plan.mesh.size(plan.data_axes) * (plan.order.micro if plan.order is not None else 1)


def _runs(model: nn.Module, batch: Batch) -> None:
    """The reduced model takes the reduced batch, or it is refused here."""
    import copy

    import torch

    try:
        with torch.no_grad():
            copy.deepcopy(model)(**batch)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise _refused("S723", reason, "and `small_batch(seed)`: batches for it") from error


# -- what is said about it ---------------------------------------------------------------------


def _said(recipe: Recipe, chosen: Mapping[str, int], old: Plan, new: Plan) -> str:
    parts = [
        f"{name} {recipe.sizes[name]} -> {size}"
        for name, size in sorted(chosen.items(), key=lambda one: list(recipe.sizes).index(one[0]))
        if size != recipe.sizes[name]
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
