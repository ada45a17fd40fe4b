"""Stages cut so that their times are in balance, what each repeats within its memory included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from schedlang.passes.cutting.chains import Counting, costs_of
from schedlang.passes.cutting.stages import Weight
from schedlang.passes.cutting.weights import in_flight
from schedlang.passes.laying.context import tokens_of
from schedlang.plan import Action
from schedlang.regions.partition import Repeated

if TYPE_CHECKING:
    from schedlang.regions.rotor import Cost
    from schedlang.runtime.recording.graph import StageGraph
    from schedlang.timeline import Timeline

BACKWARD = 2.0  # of a unit's forward


@dataclass(frozen=True)
class _Row:
    """A row whose modules have a limit: of each unit how many of them begin before it."""

    repeated: Repeated
    before: tuple[int, ...]


def time_of(
    counting: Counting, rows: Sequence[Action], graph: StageGraph, timeline: Timeline
) -> Weight:
    """The work of a run of units in forward, backward and second runs, which rows with a limit
    keep to what the memory of a stage makes them repeat."""
    tokens = tokens_of(counting.plan, counting.traced, counting.sample, counting.loss, None)
    whole = Counting(
        counting.plan, counting.traced, counting.staged, counting.sample, counting.loss, tokens
    )
    names = tuple(dict.fromkeys(site for row in rows for site in row.sites))
    costs = dict(zip(names, costs_of(whole, names)))
    homes = _homes(graph.units, costs)
    works = [float(flops) if home is None else 0.0 for flops, home in zip(graph.flops, homes)]
    for name, cost in costs.items():
        if name in homes:
            works[homes.index(name)] += cost.forward
    sums = [0.0, *accumulate(works)]
    beside = _beside(timeline)
    made = [_row(row, costs, homes, beside) for row in rows]

    def weight(stage: int, low: int, high: int) -> float:
        again = sum(r.repeated.of(stage, r.before[low], r.before[high]) for r in made)
        return (1 + BACKWARD) * (sums[high] - sums[low]) + again

    return weight


def _homes(units: Sequence[str], costs: Mapping[str, Any]) -> list[str | None]:
    """The module with a limit that each unit is, or lies in."""
    found = []
    for unit in units:
        above = unit
        while above and above not in costs:
            above = above.rpartition(".")[0]
        found.append(above or None)
    return found


def _row(
    row: Action, costs: Mapping[str, Cost], homes: Sequence[str | None], beside: Sequence[float]
) -> _Row:
    firsts = {name: place for place, name in reversed(list(enumerate(homes))) if name is not None}
    mine = sorted((firsts[name], name) for name in row.sites if name in firsts)
    starts = [place for place, _ in mine]
    before = tuple(sum(place < unit for place in starts) for unit in range(len(homes) + 1))
    limit = row.primitive.limit
    assert limit is not None
    memory = [int(limit / share) for share in beside]
    return _Row(Repeated([costs[name] for _, name in mine], memory), before)


def _beside(timeline: Timeline) -> list[float]:
    """Of each stage, how many microbatches of all stages of its ranks are kept at a time."""
    alive = in_flight(timeline)
    homes = timeline.homes.tolist()
    found = []
    for stage in range(timeline.stages):
        places = {row[stage] for row in homes}
        kept = [
            sum(alive[other] for other in range(timeline.stages)
                if any(row[other] == place for row in homes))
            for place in places
        ]  # fmt: skip
        found.append(max(1.0, *kept))
    return found
