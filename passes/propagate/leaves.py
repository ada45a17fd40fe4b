"""The sharded modules of a plan, as a trace needs them: how each computes and what it wants."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import Diagnostic, Label, Refusal
from schedlang.ir.facets import Boundary
from schedlang.ir.placement import P, R, S
from schedlang.ir.plan import Action, Plan
from schedlang.ir.primitive import Facet

if TYPE_CHECKING:
    from schedlang.ir.model import Site
    from schedlang.runtime.propagation.dry import Leaf, Wanted

LINES = ("down", "along", "deep")  # of a cube, in the order in which its axes are named
CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")
POOLS = tuple(f"{kind}Pool{dims}d" for kind in ("Max", "Avg") for dims in (1, 2, 3))
NORMS = ("GroupNorm", *(f"BatchNorm{dims}d" for dims in (1, 2, 3)))
# classes that say how they compute
CLASSES = ("Linear", "Conv1D", "Embedding", "EmbeddingBag", *CONVOLUTIONS, *POOLS, *NORMS)


def leaves_of(plan: Plan) -> dict[str, Leaf]:
    """The sharded modules of a plan; axes of size 1 shard nothing."""
    from schedlang.runtime.propagation.dry import Leaf

    _check_ties(plan)
    leaves = {}
    for fqn, boundaries in plan.boundaries.items():
        real = [b for b in boundaries if plan.mesh.size(b.axis) > 1]
        if not real:
            continue
        site = plan.model.sites[fqn]
        kind = plan.computes.get(fqn) or next((k for k in CLASSES if site.is_a(k)), "")
        kind = kind or ("norm" if _normalises(plan, site, real) else "")
        make = WANTED.get(kind, _projection)
        wanted = tuple(make(plan, fqn, kind, b) for b in real)
        split = any(plan.held(fact.name).splits for fact in site.parameters.values())
        names = tuple(fact.name for fact in site.parameters.values())
        pending = any(isinstance(w.computes, P) for w in wanted)
        bias = site.parameters.get("bias")
        own = split or fqn in plan.computes or kind in NORMS or any(w.parts for w in wanted)
        split_kind = kind if own else ""
        leaves[fqn] = Leaf(fqn, split_kind, wanted, names, bias.name if bias and pending else None)
    return leaves


def _normalises(plan: Plan, site: Site, boundaries: list[Boundary]) -> bool:
    """Does a module keep parameters along a hidden dim that comes and goes in parts?"""
    from schedlang.runtime.sharding.redistribute import dim_of

    facts = site.parameters.values()
    inside = all(len(f.shape) == 1 and plan.held(f.name).splits for f in facts)
    ends = [end for b in boundaries for end in (b.input, b.output)]
    last = all(isinstance(end, S) and dim_of(end) == -1 for end in ends)
    replaced = any(site.fqn in a.sites for a in plan.rows_changing(Facet.STRUCTURE))
    one = len(boundaries) == 1 and not site.children and not replaced
    return bool(facts) and inside and last and one


def _check_ties(plan: Plan) -> None:
    """Every module that uses a split parameter must be sharded over the same axes."""
    for name in plan.layouts:
        for used in plan.model.parameters[name].names:
            owner = plan.model.owner(used).fqn
            if not any(plan.model.sites[owner].is_a(kind) for kind in CLASSES):
                continue  # a holder; whatever it does with its parameter is followed
            known = {a for b in plan.boundaries.get(owner, ()) for a in plan.mesh.fold(b.axis)}
            for split in plan.held(name).splits:
                if not known.issuperset(plan.mesh.fold(split.axis)):
                    raise Refusal(_half_sharded(plan, name, used, split.axis))


def _half_sharded(plan: Plan, name: str, used: str, axis: str) -> Diagnostic:
    owner = plan.model.owner(used).fqn
    owners = {plan.model.owner(other).fqn for other in plan.model.parameters[name].names}
    row = next(a for a in plan.actions if owners & {*a.sites} or touches(a, name))
    return Diagnostic(
        "S506",
        f"`{owner}` shares a sharded weight, but has no `shard` row",
        Label(row.span) if row.span is not None else Label(),
        notes=(f"`{used}` and `{name}` are the same tensor", f"it is sharded over `{axis}`"),
        facts=(("parameter", used),),
        helps=(f"shard it, too: `{owner} shard(vocab, over={axis})`",),
    )


def alike(plan: Plan, fqn: str) -> list[str]:
    """The modules that stand in other layers where this one stands in its own."""
    pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(fqn)))
    kind = plan.model.sites[fqn].kind
    return [
        name for name, s in plan.model.sites.items() if pattern.fullmatch(name) and s.kind == kind
    ]


def hoisted(fqn: str, known: Leaf | None, axis: str) -> Leaf:
    """The module that gathers its input for its children, beside what it did before."""
    from schedlang.runtime.propagation.dry import Leaf, Wanted

    before = known.wanted if known is not None else ()
    wanted = Wanted(axis, R, None, None, splits=False, hoisted=True)
    return Leaf(fqn, "", (*before, wanted))


def _projection(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """What a Linear, Conv1D or Embedding wants of one axis, or a module that runs as it is."""
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
    lies = S(-1, blocks, split.uneven)
    if name == "in" and isinstance(entry, S):
        entry = replace(lies, dim=entry.dim)  # inputs lie as the weight does
    if name in ("out", "hidden"):
        head = isinstance(output, S) and output.dim == "vocab"
        cut = weight.shape[split.dim] if head else None
        return Wanted(axis, entry, output, lies, splits=True, cut=cut, head=head)
    return Wanted(axis, entry, output, P(), splits=True)


def _convolution(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """What a convolution wants of an axis that splits its channels, or positions."""
    from schedlang.runtime.propagation.dry import Wanted

    axis, entry, output = boundary.axis, boundary.input, boundary.output
    site = plan.model.sites[fqn]
    layout = plan.held(site.parameters["weight"].name)
    split = next((s for s in layout.splits if s.axis == axis), None)
    if split is None:
        return _window(plan, fqn, kind, boundary)
    name = site.dims["weight"][split.dim]
    blocks = split.blocks if len(set(split.blocks)) > 1 else len(split.blocks)
    if name == "in":
        return Wanted(axis, S(1, blocks), output, P(), splits=True)
    if plan.model.model.get_submodule(fqn).groups == 1:
        return Wanted(axis, entry or R, output, S(1, blocks), splits=True)
    own = S(1, blocks)  # each group sees its own channels
    return Wanted(axis, own, output, own, splits=False)


def _window(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """What a convolution or pool wants of an axis that splits positions, if it does."""
    from schedlang.runtime.propagation.dry import Wanted

    axis, entry = boundary.axis, boundary.input
    across = isinstance(entry, S) and isinstance(entry.dim, int) and entry.dim > 1
    return Wanted(axis, entry, boundary.output, None, splits=False, parts=across)


def _on_grid(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """What a module on a grid wants: its rows split the batch, its columns the hidden dim."""
    from schedlang.runtime.propagation.dry import Wanted

    _check_data(plan, fqn)
    if plan.boundaries[fqn].index(boundary) == 0:
        return Wanted(boundary.axis, None, None, R, splits=False, told="down")
    return replace(_results(plan, fqn, boundary), splits=True, told="along")


def _on_cube(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """What a module on a cube wants: three lines of ranks; what comes over two, and what goes."""
    from schedlang.runtime.propagation.dry import Wanted

    place = plan.boundaries[fqn].index(boundary)
    _check_data(plan, fqn)
    if place < len(LINES):
        return Wanted(boundary.axis, None, None, R, splits=False, told=LINES[place])
    if boundary.output is None:
        return Wanted(boundary.axis, boundary.input, R, R, splits=True, told="in")
    return replace(_results(plan, fqn, boundary), told="out")


def _results(plan: Plan, fqn: str, boundary: Boundary) -> Wanted:
    """How what a product gives lies, by how its weight does."""
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


def _normed(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """What a norm over a split hidden dim wants: parts, and it gives parts."""
    from schedlang.runtime.propagation.dry import Wanted

    return Wanted(boundary.axis, S(-1), boundary.output or S(-1), S(-1), splits=True)


def _check_data(plan: Plan, fqn: str) -> None:
    """The first axis of a grid splits the batch, or gradients would be summed twice; no other."""
    first, *others = (plan.mesh.fold(b.axis) for b in plan.boundaries[fqn])
    row = next(a for a in plan.rows_changing(Facet.PLACEMENT) if fqn in a.sites)
    label = Label(row.span) if row.span is not None else Label()
    if plan.mesh.size(first) > 1 and not set(first) <= set(plan.data_axes):
        said = f"no row splits the batch over `{first[0]}`, for the grid of `{fqn}`"
        add = f"add `zero(stage=0, over={first[0]})` at the end"
        raise Refusal(Diagnostic("S510", said, label, helps=(add,)))
    for axis in {plain for axes in others for plain in axes} & set(plan.data_axes):
        if plan.mesh.size(axis) > 1:
            said = f"`{axis}` cannot shard both the batch and the hidden dim of `{fqn}`"
            raise Refusal(Diagnostic("S510", said, label, helps=("leave `{axis}` out of `zero`",)))


def _experts(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """Tokens that ranks see alike are shared out and results summed; other tokens are sent."""
    from schedlang.runtime.propagation.dry import Wanted

    axis, told = boundary.axis, plan.told[fqn]
    if axis == told.within and set(plan.mesh.fold(axis)) & set(plan.data_axes):
        raise Refusal(
            Diagnostic(
                "S428",
                f"`{axis}` cannot shard both the batch and each expert of `{fqn}`",
                notes=("the ranks that share an expert must have the same tokens",),
                helps=("use an axis that no `zero` row names: `inner=tp`",),
            )
        )
    if axis in plan.data_axes:
        return Wanted(axis, None, None, None, splits=False, told=told)
    return Wanted(axis, R, R, P(), splits=True, told=told)


# kinds that a row chose (plan.computes) and what each wants of one axis
WANTED: Mapping[str, Callable[[Plan, str, str, Boundary], Wanted]] = {
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys((*POOLS, *NORMS), _window),
    "summa Linear": _on_grid,
    "summa Conv1D": _on_grid,
    "summa Embedding": _on_grid,
    "cube Linear": _on_cube,
    "cube Conv1D": _on_cube,
    "cube Embedding": _on_cube,
    "norm": _normed,
    "experts": _experts,
}


def touches(action: Action, fqn: str) -> bool:
    """Does this row shard the module, or something in it?"""
    shards = action.changes(Facet.PLACEMENT)
    return shards and any(s == fqn or s.startswith(f"{fqn}.") or not fqn for s in action.sites)
