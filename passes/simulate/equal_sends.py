"""Units of a pipeline that send the same: two of each kind are heard, and tell of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from schedlang.ir.plan import Plan
from schedlang.ir.sharing import holders
from schedlang.ir.told import below, kind_of

if TYPE_CHECKING:
    from schedlang.passes.analyze.prepare import Prepared


@dataclass(frozen=True)
class Exchange:
    """One collective of one forward and backward: what, over which axes, how many bytes, where.

    Without a kind it stands for all that a unit sends there.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    fqn: str
    backward: bool


def unit_kinds(plan: Plan, prepared: Prepared) -> dict[str, object]:
    """Return the units of a pipeline, each with what is equal for those that compute the same.

    Equal ones have run the same operators, on results of the same sizes, when the stages were cut.
    Empty where a row treats modules by the stage that they are in, or tokens by ranks.
    """
    traced, staged, graph = prepared.traced, prepared.staged, prepared.staged.cut.graph
    apart = prepared.chains or prepared.bits or plan.kept or plan.contexts or traced.statistics
    if staged.axis is None or apart or len(set(graph.units)) < len(graph.units):
        return {}
    rows: dict[str, list[int]] = {}
    for action in plan.actions:
        for site in action.sites:
            rows.setdefault(site, []).append(action.row)
    heard = {unit for unit, leaf in graph.leaves if leaf < 0}  # by hooks, in it
    found: dict[str, object] = {}
    for unit, name in enumerate(graph.units):
        modules = tuple(
            (
                fqn[len(name) :],
                tuple(one.requires_grad for one in plan.model.sites[fqn].parameters.values()),
                tuple(rows.get(fqn, ())),
                plan.boundaries.get(fqn, ()),
                tuple(replace(e, group=replace(e.group, label="")) for e in traced.edges[fqn])
                if fqn in traced.edges
                else None,
                fqn in traced.sharing,
            )
            for fqn in below(plan.model, name)
        )
        ran = graph.ran[2 * unit + 1], graph.saved[unit], graph.given[unit]
        alone = name if unit in heard else ""
        found[name] = kind_of(plan.model, name), modules, ran, alone
    return found


def of_all(
    heard: Sequence[Exchange], kinds: Mapping[str, object], reached: Mapping[str, object]
) -> list[Exchange] | None:
    """Return what all units send, where those that were passed over are told by others of their
    kind; None where these do not send the same, or backward has not `reached` all alike."""
    own: dict[str, list[list[Exchange]]] = {name: [[], []] for name in kinds}
    passed: dict[str, list[int]] = {}
    for one in heard:
        if not one.kind:
            passed.setdefault(one.fqn, [0, 0])[one.backward] += 1
            continue
        for name in (one.fqn, *holders(one.fqn)):
            if name in own:
                own[name][one.backward].append(replace(one, fqn=one.fqn[len(name) :]))
    ran: dict[object, list[str]] = {}
    for name, kind in kinds.items():
        if name not in passed:
            ran.setdefault(kind, []).append(name)
    for name, (forward, backward) in passed.items():
        first, second = ran[kinds[name]]
        alike = own[first] == own[second] and reached[first] == reached[second] == reached[name]
        if not alike or any(own[name]) or (forward, backward) != (1, bool(reached[name])):
            return None
    return [*_spread(heard, kinds, own, ran)]


def _spread(
    heard: Sequence[Exchange],
    kinds: Mapping[str, object],
    own: Mapping[str, list[list[Exchange]]],
    ran: Mapping[object, Sequence[str]],
) -> Iterator[Exchange]:
    """Yield each exchange; where a unit was passed over, those of the second of its kind."""
    for one in heard:
        if one.kind:
            yield one
            continue
        for like in own[ran[kinds[one.fqn]][-1]][one.backward]:
            yield replace(like, fqn=one.fqn + like.fqn)
