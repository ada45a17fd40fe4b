"""Equal units of a pipeline: sends of two of each kind are recorded, and stand for the others.

`traffic` uses this to record fewer units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from schedlang.ir.module_attributes import module_kind, modules_below
from schedlang.ir.plan import Plan
from schedlang.ir.sharing import parents_of

if TYPE_CHECKING:
    from schedlang.passes.analyze.prepare import Prepared


@dataclass(frozen=True)
class Exchange:
    """One collective of one forward and backward: kind, axes, bytes, module.

    With an empty kind it stands for all sends of a unit.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    fqn: str
    backward: bool


def unit_kinds(plan: Plan, prepared: Prepared) -> dict[str, object]:
    """Map the units of a pipeline to keys that are equal for units with the same computation.

    Equal units ran the same operators on results of the same sizes when the stages were split.
    Empty where a row treats modules by their stage, or tokens by ranks.
    """
    traced, staged, graph = prepared.traced, prepared.staged, prepared.staged.cut.graph
    distinguishes = (
        prepared.chains
        or prepared.bits
        or plan.activation_codings
        or plan.contexts
        or traced.statistics
    )
    if staged.axis is None or distinguishes or len(set(graph.units)) < len(graph.units):
        return {}
    rows = plan.rows_by_module()
    hooked = {unit for unit, leaf in graph.leaves if leaf < 0}  # hooks inside these units
    kinds: dict[str, object] = {}
    for unit, name in enumerate(graph.units):
        modules = tuple(
            (
                fqn[len(name) :],
                tuple(param.requires_grad for param in plan.model.sites[fqn].parameters.values()),
                tuple(rows.get(fqn, ())),
                plan.boundaries.get(fqn, ()),
                tuple(replace(e, group=replace(e.group, label="")) for e in traced.edges[fqn])
                if fqn in traced.edges
                else None,
                fqn in traced.sharing_modules,
            )
            for fqn in modules_below(plan.model, name)
        )
        unit_costs = (
            graph.operator_classes[2 * unit + 1],
            graph.saved_bytes[unit],
            graph.argument_bytes[unit],
        )
        own_name = name if unit in hooked else ""
        kinds[name] = module_kind(plan.model, name), modules, unit_costs, own_name
    return kinds


def expand_to_all(
    exchanges: Sequence[Exchange], kinds: Mapping[str, object], reached: Mapping[str, object]
) -> list[Exchange] | None:
    """Return the sends of all units: skipped units get those of others of their kind.

    None where units of a kind do not send the same, or backward has not `reached` them equally.
    """
    by_unit: dict[str, list[list[Exchange]]] = {name: [[], []] for name in kinds}
    pass_counts: dict[str, list[int]] = {}
    for exchange in exchanges:
        if not exchange.kind:
            pass_counts.setdefault(exchange.fqn, [0, 0])[exchange.backward] += 1
            continue
        for name in (exchange.fqn, *parents_of(exchange.fqn)):
            if name in by_unit:
                by_unit[name][exchange.backward].append(
                    replace(exchange, fqn=exchange.fqn[len(name) :])
                )
    names_by_kind: dict[object, list[str]] = {}
    for name, kind in kinds.items():
        if name not in pass_counts:
            names_by_kind.setdefault(kind, []).append(name)
    for name, (forward, backward) in pass_counts.items():
        first, second = names_by_kind[kinds[name]]
        equal = (
            by_unit[first] == by_unit[second] and reached[first] == reached[second] == reached[name]
        )
        if not equal or any(by_unit[name]) or (forward, backward) != (1, bool(reached[name])):
            return None
    return [*_spread(exchanges, kinds, by_unit, names_by_kind)]


def _spread(
    exchanges: Sequence[Exchange],
    kinds: Mapping[str, object],
    by_unit: Mapping[str, list[list[Exchange]]],
    names_of: Mapping[object, Sequence[str]],
) -> Iterator[Exchange]:
    """Yield each exchange; for a skipped unit those of the second unit of its kind."""
    for exchange in exchanges:
        if exchange.kind:
            yield exchange
            continue
        for recorded in by_unit[names_of[kinds[exchange.fqn]][-1]][exchange.backward]:
            yield replace(recorded, fqn=exchange.fqn + recorded.fqn)
