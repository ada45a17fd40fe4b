"""The sharded modules of a plan: how each computes, and the layouts that it needs on each axis."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import Diagnostic, Label, Refusal
from schedlang.ir.annotations import Boundary
from schedlang.ir.model import inside
from schedlang.ir.placement import P, R, S, Split
from schedlang.ir.plan import Action, Plan
from schedlang.ir.primitive import Facet

if TYPE_CHECKING:
    from schedlang.ir.model import Site
    from schedlang.runtime.propagation.dry import Leaf, Wanted


CUBE_LINES = ("down", "along", "deep")  # lines of a cube, in the order of its axes
CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")
POOLS = tuple(f"{kind}Pool{dims}d" for kind in ("Max", "Avg") for dims in (1, 2, 3))
NORMS = ("GroupNorm", *(f"BatchNorm{dims}d" for dims in (1, 2, 3)))
# classes whose computation is known
CLASSES = ("Linear", "Conv1D", "Embedding", "EmbeddingBag", *CONVOLUTIONS, *POOLS, *NORMS)


def leaves_of(plan: Plan) -> dict[str, Leaf]:
    """Return the sharded modules of a plan, by name; axes of size 1 are left out."""
    from schedlang.runtime.propagation.dry import Leaf

    if plan.model.ties:
        _check_ties(plan)
    leaves = {}
    for fqn, boundaries in plan.boundaries.items():
        real = [b for b in boundaries if plan.mesh.size(b.axis) > 1]
        if not real:
            continue
        site = plan.model.sites[fqn]
        kind = plan.computes.get(fqn) or next((k for k in CLASSES if site.is_a(k)), "")
        kind = kind or ("norm" if _is_split_norm(plan, site, real) else "")
        make = WANTED.get(kind, _wanted_by_projection)
        wanted = tuple(make(plan, fqn, kind, b) for b in real)
        split = any(plan.held(fact.name).splits for fact in site.parameters.values())
        names = tuple(fact.name for fact in site.parameters.values())
        pending = any(isinstance(w.computes, P) for w in wanted)
        bias = site.parameters.get("bias")
        own = split or fqn in plan.computes or kind in NORMS or any(w.parts for w in wanted)
        split_kind = kind if own else ""
        last = bias.name if bias and pending else None
        inner = _full_adapter_parameters(plan, site, wanted) if len(site.dims) > 2 else ()
        leaves[fqn] = Leaf(fqn, split_kind, wanted, names, last, inner)
    return leaves


def _full_adapter_parameters(
    plan: Plan, site: Site, wanted: tuple[Wanted, ...]
) -> tuple[tuple[str, str], ...]:
    """Return pairs of an axis of the weight and a parameter that this axis does not split.

    The parameters are those inside an adapter.
    """
    from schedlang.runtime.adapted import Adapted

    inner = Adapted.inner if site.is_a("Adapted") else ()
    axes = [one.axis for one in wanted if one.splits]
    facts = [site.parameters[name] for name in inner if name in site.parameters]
    return tuple(
        (axis, fact.name)
        for axis in axes
        for fact in facts
        if not set(plan.mesh.fold(axis)) & plan.split_axes(fact.name)
    )


def _is_split_norm(plan: Plan, site: Site, boundaries: list[Boundary]) -> bool:
    """Return whether a module's parameters have one dim, split like the last dim of its tensors."""
    from schedlang.runtime.sharding.shard import dim_of

    facts = site.parameters.values()
    inside = all(len(f.shape) == 1 and plan.held(f.name).splits for f in facts)
    ends = [end for b in boundaries for end in (b.input, b.output)]
    last = all(isinstance(end, S) and dim_of(end) == -1 for end in ends)
    replaced = any(site.fqn in a.sites for a in plan.rows_changing(Facet.STRUCTURE))
    one = len(boundaries) == 1 and not site.children and not replaced
    return bool(facts) and inside and last and one


def _check_ties(plan: Plan) -> None:
    """Refuse (S506) a module that uses a split parameter and is not sharded over the same axes."""
    for names in plan.model.ties:
        name = names[0]
        for used in names if name in plan.layouts else ():
            owner = plan.model.owner(used).fqn
            if not any(plan.model.sites[owner].is_a(kind) for kind in CLASSES):
                continue  # only holds the parameter; its operations are traced
            known = {a for b in plan.boundaries.get(owner, ()) for a in plan.mesh.fold(b.axis)}
            for split in plan.held(name).splits:
                if not known.issuperset(plan.mesh.fold(split.axis)):
                    raise Refusal(_missing_row(plan, name, used, split))


def _missing_row(plan: Plan, name: str, used: str, split: Split) -> Diagnostic:
    site, axis = plan.model.owner(used), split.axis
    owners = [plan.model.owner(other) for other in plan.model.parameters[name].names]
    row = next(
        a for a in plan.actions if {o.fqn for o in owners} & {*a.sites} or shards_module(a, name)
    )
    words = any(owner.is_a("Embedding") for owner in owners)
    styles = ("vocab" if words else "col", "col" if site.is_a("Embedding") else "row")
    style = styles[split.dim ^ site.is_a("Conv1D")] if split.dim < 2 else styles[0]
    return Diagnostic(
        "S506",
        f"`{site.fqn}` shares a sharded weight, but has no `shard` row",
        Label(row.span),
        notes=(f"`{used}` and `{name}` are the same tensor", f"it is sharded over `{axis}`"),
        facts=(("parameter", used),),
        helps=(f"shard it, too: `{site.fqn} shard({style}, over={axis})`",),
    )


def same_module_of_layers(plan: Plan, fqn: str) -> list[str]:
    """Return the modules of the same kind whose names differ from `fqn` in numbers only."""
    pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(fqn)))
    kind = plan.model.sites[fqn].kind
    return [
        name for name, s in plan.model.sites.items() if pattern.fullmatch(name) and s.kind == kind
    ]


def hoist_gather(fqn: str, known: Leaf | None, axis: str) -> Leaf:
    """Return the leaf of a module that also gathers its input, for its children."""
    from schedlang.runtime.propagation.dry import Leaf, Wanted

    before = known.wanted if known is not None else ()
    wanted = Wanted(axis, R, None, None, splits=False, hoisted=True)
    return Leaf(fqn, "", (*before, wanted))


def _wanted_by_projection(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """Return the layouts that a Linear, Conv1D, Embedding or unchanged module needs on one axis."""
    from schedlang.runtime.propagation.dry import Wanted

    axis, entry, output = boundary.axis, boundary.input, boundary.output
    site = plan.model.sites[fqn]
    weight = site.parameters.get("weight")
    layout = plan.held(weight.name) if weight is not None else None
    split = next((s for s in layout.splits if s.axis == axis), None) if layout else None
    if not kind or split is None or layout is None or weight is None:
        return Wanted(axis, entry, output, None, splits=False, differ=boundary.differ)
    name = site.dims["weight"][split.dim]
    blocks = split.blocks if len(set(split.blocks)) > 1 else len(split.blocks)
    weight_layout = S(-1, blocks, split.uneven)
    if name == "in" and isinstance(entry, S):
        entry = replace(weight_layout, dim=entry.dim)  # inputs have the layout of the weight
    if name in ("out", "hidden"):
        head = isinstance(output, S) and output.dim == "vocab"
        cut = weight.shape[split.dim] if head else None
        return Wanted(axis, entry, output, weight_layout, splits=True, cut=cut, head=head)
    return Wanted(axis, entry, output, P(), splits=True)


def _wanted_by_convolution(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """Return the layouts that a convolution needs on an axis that splits channels or positions."""
    from schedlang.runtime.propagation.dry import Wanted

    axis, entry, output = boundary.axis, boundary.input, boundary.output
    site = plan.model.sites[fqn]
    layout = plan.held(site.parameters["weight"].name)
    split = next((s for s in layout.splits if s.axis == axis), None)
    if split is None:
        return _wanted_by_window(plan, fqn, kind, boundary)
    name = site.dims["weight"][split.dim]
    blocks = split.blocks if len(set(split.blocks)) > 1 else len(split.blocks)
    if name == "in":
        return Wanted(axis, S(1, blocks), output, P(), splits=True)
    if plan.model.model.get_submodule(fqn).groups == 1:
        return Wanted(axis, entry or R, output, S(1, blocks), splits=True)
    own = S(1, blocks)  # each group has its own channels
    return Wanted(axis, own, output, own, splits=False)


def _wanted_by_window(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """Return the layouts of a convolution, pool or norm on an axis that may split positions."""
    from schedlang.runtime.propagation.dry import Wanted

    axis, entry = boundary.axis, boundary.input
    across = isinstance(entry, S) and isinstance(entry.dim, int) and entry.dim > 1
    return Wanted(axis, entry, boundary.output, None, splits=False, parts=across)


def _wanted_on_grid(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """Return the layouts of a module on a grid: rows split the batch, columns the hidden dim."""
    from schedlang.runtime.propagation.dry import Wanted

    _check_data(plan, fqn)
    if plan.boundaries[fqn].index(boundary) == 0:
        return Wanted(boundary.axis, None, None, R, splits=False, told="down")
    return replace(_wanted_results(plan, fqn, boundary), splits=True, told="along")


def _wanted_on_cube(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """Return the layouts of a module on a cube: two lines split inputs, the third one results."""
    from schedlang.runtime.propagation.dry import Wanted

    place = plan.boundaries[fqn].index(boundary)
    _check_data(plan, fqn)
    if place < len(CUBE_LINES):
        return Wanted(boundary.axis, None, None, R, splits=False, told=CUBE_LINES[place])
    if boundary.output is None:
        return Wanted(boundary.axis, boundary.input, R, R, splits=True, told="in")
    return replace(_wanted_results(plan, fqn, boundary), told="out")


def _wanted_results(plan: Plan, fqn: str, boundary: Boundary) -> Wanted:
    """Return the layout of a product's results, which is that of its weight."""
    from schedlang.runtime.propagation.dry import Wanted

    site, output = plan.model.sites[fqn], boundary.output
    weight, head = site.parameters["weight"], isinstance(output, S) and output.dim == "vocab"
    if site.is_a("Embedding"):
        return Wanted(boundary.axis, None, output, S(-1), splits=False)
    outer = site.dims["weight"].index("out")
    blocks = next((s.blocks for s in plan.layout(weight.name).splits if s.dim == outer), (1,))
    computes = S(-1, blocks if len(set(blocks)) > 1 else len(blocks))
    cut = weight.shape[outer] if head else None
    entry = boundary.input
    return Wanted(boundary.axis, entry, output, computes, splits=False, cut=cut, head=head)


def _wanted_by_norm(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """Return the layouts of a norm over a split hidden dim: input and output are split."""
    from schedlang.runtime.propagation.dry import Wanted

    return Wanted(boundary.axis, S(-1), boundary.output or S(-1), S(-1), splits=True)


def _check_data(plan: Plan, fqn: str) -> None:
    """Refuse (S510) a grid where not exactly the first axis splits the batch.

    Gradients would be summed twice.
    """
    first, *others = (plan.mesh.fold(b.axis) for b in plan.boundaries[fqn])
    row = next(a for a in plan.rows_changing(Facet.PLACEMENT) if fqn in a.sites)
    label = Label(row.span)
    if plan.mesh.size(first) > 1 and not set(first) <= set(plan.data_axes):
        said = f"no row splits the batch over `{first[0]}`, for the grid of `{fqn}`"
        add = f"add `zero(stage=0, over={first[0]})` at the end"
        raise Refusal.of("S510", said, label, helps=(add,))
    for axis in {plain for axes in others for plain in axes} & set(plan.data_axes):
        if plan.mesh.size(axis) > 1:
            said = f"`{axis}` cannot shard both the batch and the hidden dim of `{fqn}`"
            raise Refusal.of("S510", said, label, helps=(f"leave `{axis}` out of `zero`",))


def _wanted_by_experts(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """Return the layouts of a layer of experts on one axis.

    Tokens are sent on a data axis; on others, whose ranks have equal tokens, results are summed.
    """
    from schedlang.runtime.propagation.dry import Wanted

    axis, told = boundary.axis, plan.told[fqn]
    if axis == told.within and set(plan.mesh.fold(axis)) & set(plan.data_axes):
        raise Refusal.of(
            "S428",
            f"`{axis}` cannot shard both the batch and each expert of `{fqn}`",
            notes=("the ranks that share an expert must have the same tokens",),
            helps=("use an axis that no `zero` row names: `inner=tp`",),
        )
    if axis in plan.data_axes:
        return Wanted(axis, None, None, None, splits=False, told=told)
    return Wanted(axis, R, R, P(), splits=True, told=told)


# kind of a module (its class, or chosen by a row in plan.computes) -> its layouts on one axis
WANTED: Mapping[str, Callable[[Plan, str, str, Boundary], Wanted]] = {
    **dict.fromkeys(CONVOLUTIONS, _wanted_by_convolution),
    **dict.fromkeys((*POOLS, *NORMS), _wanted_by_window),
    "summa Linear": _wanted_on_grid,
    "summa Conv1D": _wanted_on_grid,
    "summa Embedding": _wanted_on_grid,
    "cube Linear": _wanted_on_cube,
    "cube Conv1D": _wanted_on_cube,
    "cube Embedding": _wanted_on_cube,
    "norm": _wanted_by_norm,
    "experts": _wanted_by_experts,
}


def shards_module(action: Action, fqn: str) -> bool:
    """Return whether a row shards the module or a module inside it."""
    shards = action.changes(Facet.PLACEMENT)
    return shards and any(inside(s, fqn) for s in action.sites)
