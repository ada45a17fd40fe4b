"""What a microbatch sends inside its forward and backward, heard on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedlang.passes.costs.sent import Collective, Context
from schedlang.passes.cutting.chains import Skeleton
from schedlang.passes.laying.root import backward_root
from schedlang.placement import P, Placement, Replicate, S
from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.passes.laying.dryrun import Loss
    from schedlang.passes.preparing.prepare import Prepared
    from schedlang.runtime.sharding.shard import Edge


@dataclass(frozen=True)
class Exchange:
    """One collective of one forward and backward: what, over which axes, how many bytes, where."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    fqn: str
    backward: bool


def activations(
    context: Context, batch: Mapping[str, Any], loss: Loss | None
) -> Iterator[Collective]:
    """The collectives around modules, each as often as its module runs."""
    traced = context.traced
    sends = traced.edges or context.tokens is not None or traced.statistics is not None
    heard = _heard(context, batch, loss) if sends else []
    for (one, what), count in Counter((e, _what(context, e)) for e in heard).items():
        for places, micro in context.runs(one.fqn):
            yield Collective(
                one.kind, one.axes, "backward" if one.backward else "forward", what, one.fqn,
                count * micro, one.bytes, places, _row_of(context.plan, one.fqn),
            )  # fmt: skip


def _row_of(plan: Plan, fqn: str) -> int | None:
    """The last row that places this module, else one inside it (it gathers for its children)."""
    rows = [a for a in plan.actions if "placement" in a.primitive.writes]
    own = [a.row for a in rows if fqn in a.sites]
    below = (a.row for a in rows if any(site.startswith(f"{fqn}.") for site in a.sites))
    return own[-1] if own else next(below, None)


def _heard(context: Context, batch: Mapping[str, Any], loss: Loss | None) -> list[Exchange]:
    """What a microbatch sends: the sharded model on meta, recomputed where rows ask for it."""
    from schedlang.passes.cutting.staging import local_skeleton
    from schedlang.passes.laying.context import about_its_row, seated
    from schedlang.runtime.collectives.collective import Group, listening
    from schedlang.runtime.recording.constants import OnMeta
    from schedlang.runtime.recording.meta import hollow_batch
    from schedlang.runtime.sharding import crossing

    plan = context.plan
    model = local_skeleton(plan, context.traced)
    model.train()
    at_skeleton(plan, model, context.prepared)
    heard: list[Exchange] = []
    backward = False

    def listen(kind: str, group: Group, size: int) -> None:
        heard.append(Exchange(kind, group.axes, size, group.label, backward))

    batch, sitting = seated(plan, model, context.tokens, batch)
    inputs = hollow_batch(dict(batch))
    # a model may ask for values of masks, and what is indexed by one has a backward that does
    with about_its_row(plan), listening(listen), sitting, OnMeta(dict(batch), inputs):
        value = backward_root(model, inputs, loss)
        backward = True
        if value is not None:
            value.backward()
    crossing.forget()
    return heard


def at_skeleton(plan: Plan, model: Any, prepared: Prepared) -> None:
    """Let modules of a local model on meta keep less where rows ask for it: recomputed, or coded.

    What is moved elsewhere and comes back as it was is kept all the same.
    """
    at = Skeleton(plan, model, prepared.chains, prepared.bits)
    for action in plan.actions:
        writes, coded = action.primitive.writes, bool(action.primitive.gives_up)
        if "recompute" in writes or ("residence" in writes and coded):
            for target in plan.targets(action):
                action.primitive.apply(target, at)


# (from, to) -> kind in forward, kind in backward; of an entry the backward only where ranks differ
_ENTRY: Mapping[tuple[type, type], tuple[str, str]] = {
    (Replicate, Replicate): ("", "all-reduce"),
    (S, Replicate): ("all-gather", "reduce-scatter"),
    (Replicate, S): ("", "all-gather"),
}
_EXIT: Mapping[tuple[type, type], tuple[str, str]] = {
    (P, Replicate): ("all-reduce", ""),
    (P, S): ("reduce-scatter", "all-gather"),
    (S, Replicate): ("all-gather", ""),
    (Replicate, S): ("", "all-gather"),
}


# what a module of experts sends; shares of tokens are those of equally many for each expert
_ROUTED = {"all-to-all": "token", "all-gather": "expert", "reduce-scatter": "expert"}


def _what(context: Context, one: Exchange) -> str:
    """Which tensor of its module an exchange is of."""
    traced, plan = context.traced, context.plan
    if one.fqn in plan.contexts and set(plan.mesh.fold(one.axes)) <= set(plan.context_axes):
        return "keys and values"
    edge = next((e for e in traced.edges.get(one.fqn, ()) if e.group.axes == one.axes), None)
    if edge is None:
        return "statistics" if traced.statistics is not None else "activation"
    if edge.told is not None and one.kind in _ROUTED:
        return _ROUTED[one.kind] + (" grads" if one.backward else "s")
    enters, leaves = _ends(edge)
    entry, leave = enters[one.backward] == one.kind, leaves[one.backward] == one.kind
    if edge.head and not one.backward and not entry:
        return "loss"
    if one.kind not in (*enters, *leaves):  # between its own parts
        return "parts, backward" if one.backward else "parts"
    side = "input or output" if entry and leave else "output" if leave else "input"
    if one.backward and not (entry or leave):  # recomputed
        return "input again" if enters[False] == one.kind else "output again"
    return f"{side} grad" if one.backward else side


def _ends(edge: Edge) -> tuple[tuple[str, str], tuple[str, str]]:
    from schedlang.runtime.sharding.crossing import switches

    def kinds(table: Mapping[Any, Any], a: Placement, b: Placement) -> tuple[str, str]:
        if switches(a, b):
            return "all-to-all", "all-to-all"
        found: tuple[str, str] = table.get((type(a), type(b)), ("", ""))
        return found

    forward, backward = kinds(_ENTRY, edge.arrives, edge.wants)
    needed = edge.differ or not isinstance(edge.arrives, Replicate | S) or edge.wants != Replicate()
    enters = (forward, backward if needed else "")
    return enters, kinds(_EXIT, edge.computes, edge.leaves)
