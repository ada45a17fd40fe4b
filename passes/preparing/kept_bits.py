"""What cannot stand beside activations in fewer bits: what else decides of what is saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedlang.diagnostic import Diagnostic, Label, Refusal
from schedlang.passes.laying.kept_parts import experts_of, meeting, splitting
from schedlang.passes.preparing.routing import routings
from schedlang.plan import Action, Plan
from schedlang.source import NOWHERE

if TYPE_CHECKING:
    from schedlang.passes.cutting.staging import Staged
    from schedlang.passes.laying.propagate import Traced
    from schedlang.runtime.slicing.slices import Slicing

WHY = {
    "recompute": "what is recomputed inside is not compressed, and nothing that is dropped at"
    " run time",
    "structure": "its kernel saves other tensors than the module does",
    "residence": "what is offloaded inside is not compressed, and no parameters that are moved"
    " in and out",
}


def check_kept(plan: Plan, traced: Traced, staged: Staged, slicing: Slicing | None) -> None:
    """Refuse rows about the same modules (S857), split tensors (S858) and orders (S859) for which
    nothing says what one process would keep."""
    if not plan.kept:
        return
    coded = [row for row in plan.actions if _keeps(row)]
    for row in coded:
        for other in plan.actions:
            facet = next((f for f in WHY if f in other.primitive.writes), None)
            if facet is None or _keeps(other) or getattr(other.primitive, "what", "") in _STATE:
                continue
            _check_meeting(row, other, facet)
    _check_choices(plan, traced)
    _check_results(plan)
    _check_split(plan, coded[0])
    _check_capacity(plan, coded[0])
    _check_order(staged, slicing, coded[0])


_STATE = ("gradients", "optimizer")  # which no forward saves


def _keeps(row: Action) -> bool:
    return row.name == "compress" and "residence" in row.primitive.writes


def _check_meeting(row: Action, other: Action, facet: str) -> None:
    """Two rows about modules of which one holds the other, or is it."""
    moves = other.name == "offload" and getattr(other.primitive, "what", "") == "activations"
    again = other.primitive.reruns(other.sites, ()) is not None
    pairs = ((a, b) for a in row.sites for b in other.sites)
    pairs = ((a, b) for a, b in pairs if not (moves and _holds(b, a)))  # whole numbers may move
    pairs = ((a, b) for a, b in pairs if not (again and _holds(a, b)))  # inputs may be rounded
    met = next(((a, b) for a, b in pairs if _holds(a, b) or _holds(b, a)), None)
    if met is None:
        return
    label = Label(row.span or NOWHERE, f"compresses the activations of `{met[0]}`")
    also = Label(other.span or NOWHERE, f"`{other.name}` selects `{met[1]}`")
    raise Refusal(
        Diagnostic(
            "S857", f"`{other.name}` and `compress(activations)` both select `{met[0]}`",
            label, (also,), (WHY[facet],),
            ("select other modules in one of the two rows, or drop one",),
        )
    )  # fmt: skip


def _check_choices(plan: Plan, traced: Traced) -> None:
    """A second run from rounded inputs would choose otherwise than the first (S857)."""
    for row, site in ((action, site) for action in meeting(plan) for site in action.sites):
        found = next((fqn for fqn in traced.choices if _holds(site, fqn)), None)
        if found is not None:
            label = Label(row.span or NOWHERE, "recomputes from compressed inputs")
            raise Refusal(
                Diagnostic(
                    "S857", f"`{site}` could choose differently when it is recomputed", label, (),
                    (f"`{traced.choices[found]}` in `{found}` depends on values",
                     "rounded inputs may change the choice: the backward would be of a"
                     " different function"),
                    ("drop one of the two rows",),
                )
            )  # fmt: skip


def _check_results(plan: Plan) -> None:
    """What is kept beside inputs is what one process has, too: no message (S857)."""
    for row in meeting(plan):
        if not any("collective" in one.save for one in row.primitive.reruns(row.sites, ()) or ()):
            continue
        label = Label(row.span or NOWHERE, "saves results for the recomputation")
        raise Refusal(
            Diagnostic("S857", "the compressed results would differ from those of a single process",
                       label, (), ("results of collectives do not exist in a single process",),
                       ("leave `collective` out: collectives are then repeated",))
        )  # fmt: skip


def _inside(name: str, modules: tuple[str, ...]) -> bool:
    return any(_holds(module, name) for module in modules)


def _check_capacity(plan: Plan, row: Action) -> None:
    """A limit of experts counts tokens of the whole batch, and one process takes it in parts."""
    limited = [fqn for fqn, _ in routings(plan)]
    if not limited or plan.shares * plan.micro == 1:
        return
    raise Refusal(
        Diagnostic(
            "S858", f"`{limited[0]}` has a `capacity` for the full batch, and activations are"
            " compressed", Label(row.span or NOWHERE, "rounds saved activations"), (),
            (f"a single process takes the batch in {plan.shares * plan.micro} parts, as the ranks"
             " do, and counts the tokens of each part separately",),
            ("leave out `capacity=`", "or drop this row"),
        )
    )  # fmt: skip


def _holds(outer: str, inner: str) -> bool:
    return outer in ("", inner) or inner.startswith(f"{outer}.")


def _check_split(plan: Plan, row: Action) -> None:
    """Blocks of a part are others than blocks of the whole; along one axis of weights one process
    can tell them."""
    data = {a for r in plan.replicas for over in r.axes for a in plan.mesh.fold(over)}
    stage = {a for cut in plan.cuts for a in plan.mesh.fold(cut.axis)}
    split = [axis for axis in plan.mesh.sizes if plan.mesh.size(axis) > 1]
    split = [a for a in split if a in plan.used_axes and a not in data | stage]
    weights = splitting(plan)
    apart = experts_of(plan)
    experts = {a for n, one in plan.layouts.items() if _inside(n, apart) for a in one.axes}
    routed = [axis for name, layout in plan.layouts.items() if not _inside(name, apart)
              for axis in layout.axes if axis in data and plan.mesh.size(axis) > 1]  # fmt: skip
    tokens = [axis for axis in plan.context_axes if plan.mesh.size(axis) > 1]
    others = [axis for axis in split if axis not in (*weights, *tokens, *experts)]
    bad = [*others, *routed, *weights[1:]]
    if not bad:
        return
    raise Refusal(
        Diagnostic(
            "S858", f"activations sharded over `{bad[0]}` cannot be compressed",
            Label(row.span or NOWHERE, "rounds saved activations, block by block"), (),
            ("a shard has other blocks than the full tensor; a single process can reproduce them"
             " for one axis that shards weights and one that splits tokens",),
            (f"leave `{bad[0]}` out: split the batch with `zero` instead",
             f"or set `{bad[0]}` to 1: `--mesh {bad[0]}=1`"),
        )
    )  # fmt: skip


def _check_order(staged: Staged, slicing: Slicing | None, row: Action) -> None:
    """Where weights are stale or sequences cut, a tensor is saved in several pieces or versions."""
    from schedlang.timeline.versions import is_stale

    stale = is_stale(staged.timeline)
    if not stale and slicing is None:
        return
    what = "uses several versions of the weights" if stale else "splits sequences into slices"
    raise Refusal(
        Diagnostic(
            "S859", f"activations are compressed, and the order {what}",
            Label(row.span or NOWHERE, "rounds saved activations"), (),
            ("what a single process would round is not known for such an order",),
            ('use a synchronous order without slices: `pipeline(order="1F1B", micro=...)`',),
        )
    )  # fmt: skip
