"""The sharded modules of a plan, as a trace needs them: how each computes and what it wants."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from schedlang.diagnostic import Diagnostic, Label, Refusal
from schedlang.placement import P, R, S
from schedlang.plan import Action, Boundary, Plan

if TYPE_CHECKING:
    from schedlang.runtime.dry import Leaf, Wanted

CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")
POOLS = tuple(f"{kind}Pool{dims}d" for kind in ("Max", "Avg") for dims in (1, 2, 3))
NORMS = ("GroupNorm", *(f"BatchNorm{dims}d" for dims in (1, 2, 3)))
# classes that say how they compute
CLASSES = ("Linear", "Conv1D", "Embedding", *CONVOLUTIONS, *POOLS, *NORMS)


def leaves_of(plan: Plan) -> dict[str, Leaf]:
    """The sharded modules of a plan; axes of size 1 shard nothing."""
    from schedlang.runtime.dry import Leaf

    _check_ties(plan)
    leaves = {}
    for fqn, boundaries in plan.boundaries.items():
        real = [b for b in boundaries if plan.mesh.size(b.axis) > 1]
        if not real:
            continue
        site = plan.model.sites[fqn]
        kind = plan.computes.get(fqn) or next((k for k in CLASSES if site.is_a(k)), "")
        make = WANTED.get(kind, _projection)
        wanted = tuple(make(plan, fqn, kind, b) for b in real)
        split = any(plan.held(fact.name).splits for fact in site.parameters.values())
        names = tuple(fact.name for fact in site.parameters.values())
        pending = any(isinstance(w.computes, P) for w in wanted)
        bias = site.parameters.get("bias")
        split_kind = kind if split or kind in NORMS or any(w.parts for w in wanted) else ""
        leaves[fqn] = Leaf(fqn, split_kind, wanted, names, bias.name if bias and pending else None)
    return leaves


def _check_ties(plan: Plan) -> None:
    """Every module that uses a split parameter must be sharded over the same axes."""
    for name in plan.layouts:
        for used in plan.model.parameters[name].names:
            owner = plan.model.owner(used).fqn
            if not any(plan.model.sites[owner].is_a(kind) for kind in CLASSES):
                continue  # a holder; whatever it does with its parameter is followed
            known = {b.axis for b in plan.boundaries.get(owner, ())}
            for split in plan.held(name).splits:
                if split.axis not in known:
                    raise Refusal(_half_sharded(plan, name, used, split.axis))


def _half_sharded(plan: Plan, name: str, used: str, axis: str) -> Diagnostic:
    owner = plan.model.owner(used).fqn
    owners = {plan.model.owner(other).fqn for other in plan.model.parameters[name].names}
    row = next(a for a in plan.actions if owners & {*a.sites} or touches(a, name))
    return Diagnostic(
        "S506", f"`{owner}` shares a weight that is split, and is not sharded itself",
        Label(row.span) if row.span is not None else Label(),
        notes=(f"`{used}` and `{name}` are the same tensor", f"it is split over `{axis}`"),
        helps=(f"shard it too: `{owner} shard(vocab, over={axis})`",),
    )  # fmt: skip


def alike(plan: Plan, fqn: str) -> list[str]:
    """The modules that stand in other layers where this one stands in its own."""
    pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(fqn)))
    kind = plan.model.sites[fqn].kind
    return [
        name for name, s in plan.model.sites.items() if pattern.fullmatch(name) and s.kind == kind
    ]


def hoisted(fqn: str, known: Leaf | None, axis: str) -> Leaf:
    """The module that gathers its input for its children, beside what it did before."""
    from schedlang.runtime.dry import Leaf, Wanted

    before = known.wanted if known is not None else ()
    wanted = Wanted(axis, R, None, None, splits=False, hoisted=True)
    return Leaf(fqn, "", (*before, wanted))


def _projection(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """What a Linear, Conv1D or Embedding wants of one axis, or a module that runs as it is."""
    from schedlang.runtime.dry import Wanted

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
    from schedlang.runtime.dry import Wanted

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
    from schedlang.runtime.dry import Wanted

    axis, entry = boundary.axis, boundary.input
    across = isinstance(entry, S) and isinstance(entry.dim, int) and entry.dim > 1
    return Wanted(axis, entry, boundary.output, None, splits=False, parts=across)


def _on_grid(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """What a module on a grid wants: its rows split the batch, its columns the hidden dim."""
    from schedlang.runtime.dry import Wanted

    axis, output = boundary.axis, boundary.output
    if boundary.input is None and output is None:  # a row of the grid
        _check_data(plan, fqn, axis)
        return Wanted(axis, None, None, R, splits=False)
    head = isinstance(output, S) and output.dim == "vocab"
    weight = plan.model.sites[fqn].parameters["weight"]
    cut = weight.shape[0] if head else None
    blocks = next(s.blocks for s in plan.held(weight.name).splits if s.axis == axis)
    computes = S(-1, blocks if len(set(blocks)) > 1 else len(blocks))
    if kind == "summa Embedding":
        return Wanted(axis, None, output, S(-1), splits=True)
    return Wanted(axis, boundary.input, output, computes, splits=True, cut=cut, head=head)


def _normed(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """What a norm over a split hidden dim wants: parts, and it gives parts."""
    from schedlang.runtime.dry import Wanted

    return Wanted(boundary.axis, S(-1), boundary.output or S(-1), S(-1), splits=True)


def _check_data(plan: Plan, fqn: str, axis: str) -> None:
    """The rows of a grid hold different rows of the batch: else gradients would be summed twice."""
    if set(plan.mesh.fold(axis)) <= set(plan.data_axes):
        return
    row = next(a for a in plan.actions if fqn in a.sites and "placement" in a.primitive.writes)
    raise Refusal(
        Diagnostic(
            "S510", f"nothing splits the batch over `{axis}`, the rows of the grid of `{fqn}`",
            Label(row.span) if row.span is not None else Label(),
            helps=(f"add `zero(stage=0, over={axis})` at the end",),
        )
    )  # fmt: skip


# kinds that a row chose (plan.computes) and what each wants of one axis
WANTED: Mapping[str, Callable[[Plan, str, str, Boundary], Wanted]] = {
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys((*POOLS, *NORMS), _window),
    "summa Linear": _on_grid, "summa Conv1D": _on_grid, "summa Embedding": _on_grid,
    "norm": _normed,
}  # fmt: skip


def touches(action: Action, fqn: str) -> bool:
    """Does this row shard the module, or something in it?"""
    shards = "placement" in action.primitive.writes
    return shards and any(s == fqn or s.startswith(f"{fqn}.") or not fqn for s in action.sites)
