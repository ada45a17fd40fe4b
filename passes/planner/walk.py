"""Random walks over plans, and a simulation that times again only what a step of one changes.

* FlexFlow's walk: better plans are taken, worse ones seldom.
* An order whose operations are timed again from those that changed.
* The walk over cuts of a chain, timed that way.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np

from schedlang.pipeline.timeline.table import Kind, Timeline, dependencies

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class Walked(Generic[Plan]):
    """The best plan of a walk: its cost, and how many steps were taken of those proposed."""

    plan: Plan
    cost: float
    taken: int


def walk(
    start: Plan,
    propose: Callable[[Plan, random.Random], Plan],
    cost: Callable[[Plan], float],
    steps: int,
    heat: float = 0.05,
    seed: int = 0,
) -> Walked[Plan]:
    """The best plan that a walk of Metropolis and Hastings meets.

    propose  a neighbour; as likely to come from one of two plans to the other as back
    cost     seconds; infinite for a plan that does not fit
    heat     share of the cost by which a worse plan is taken once in e times
    FlexFlow (Jia et al., MLSys 2019) walks so over strategies of operators.
    """
    chance = random.Random(seed)
    here, now = start, cost(start)
    best, least, taken = here, now, 0
    for _ in range(steps):
        there = propose(here, chance)
        then = cost(there)
        if _accepted(now, then, heat, chance):
            here, now, taken = there, then, taken + 1
            if now < least:
                best, least = here, now
    return Walked(best, least, taken)


def _accepted(now: float, then: float, heat: float, chance: random.Random) -> bool:
    if then <= now:
        return True
    return chance.random() < math.exp((now - then) / (heat * now))


# -- delta simulation ------------------------------------------------------------------------------

PLAIN = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.RECOMPUTE)


class Retimed:
    """An order whose operations are timed once, and then from those on whose times change.

    Raises ValueError for an order with operations beside computing (copies, updates, barriers).
    """

    def __init__(self, line: Timeline, took: Sequence[float], send: float = 0.0) -> None:
        if not np.isin(line.kind, PLAIN).all():
            raise ValueError("only orders that compute and send are timed again in part")
        self.took = [float(t) for t in took]
        made, used = dependencies(line)
        before: list[list[tuple[int, float]]] = [[] for _ in self.took]
        after: list[list[int]] = [[] for _ in self.took]
        rank = line.rank.tolist()
        pairs = [*zip(made.tolist(), used.tolist(), strict=True)]
        pairs += [(row - 1, row) for row in range(1, len(rank)) if rank[row] == rank[row - 1]]
        for one, other in pairs:
            before[other].append((one, send if rank[one] != rank[other] else 0.0))
            after[one].append(other)
        self.before, self.after = before, after
        self.place = _sorted(before, after)
        self.end = [0.0] * len(self.took)
        self.last = [int(stop) - 1 for stop in line.starts[1:]]
        self.timed = 0  # operations, in all
        for row in sorted(range(len(rank)), key=self.place.__getitem__):
            self.end[row] = self._ends(row)

    def _ends(self, row: int) -> float:
        self.timed += 1
        ready = max((self.end[one] + lag for one, lag in self.before[row]), default=0.0)
        return ready + self.took[row]

    @property
    def seconds(self) -> float:
        """The end of the last operation of all ranks."""
        return max(self.end[row] for row in self.last)

    def change(self, took: Iterable[tuple[int, float]]) -> None:
        """Give some operations other times, and time again all that ends at another time then."""
        heap: list[tuple[int, int]] = []
        waiting: set[int] = set()

        def wait(row: int) -> None:
            if row not in waiting:
                waiting.add(row)
                heapq.heappush(heap, (self.place[row], row))

        for row, seconds in took:
            if self.took[row] != seconds:
                self.took[row] = seconds
                wait(row)
        while heap:
            _, row = heapq.heappop(heap)
            waiting.discard(row)
            end = self._ends(row)
            if end != self.end[row]:
                self.end[row] = end
                for later in self.after[row]:
                    wait(later)


def _sorted(before: list[list[tuple[int, float]]], after: list[list[int]]) -> list[int]:
    """Places of rows in an order in which each comes after all that it needs."""
    missing = [len(needs) for needs in before]
    free = [row for row, count in enumerate(missing) if count == 0]
    place = [0] * len(before)
    for at, row in enumerate(free):  # grows while it is read
        place[row] = at
        for later in after[row]:
            missing[later] -= 1
            if missing[later] == 0:
                free.append(later)
    if len(free) < len(before):
        raise ValueError("the order never ends")
    return place


# -- cuts ------------------------------------------------------------------------------------------

Units = tuple[int, ...]


def walk_cuts(
    line: Timeline,
    times: Sequence[tuple[float, float]],
    start: Units,
    steps: int,
    send: float = 0.0,
    weights: float = 0.5,
    heat: float = 0.05,
    seed: int = 0,
) -> Walked[Units]:
    """The best cut that a walk meets: a unit at a time goes over from a stage to the next.

    The arguments are those of `simulated`.
    """
    forward, backward = ([0.0, *accumulate(side)] for side in zip(*times, strict=True))
    rows: list[list[tuple[int, int]]] = [[] for _ in start]
    for row, (kind, stage) in enumerate(zip(line.kind.tolist(), line.stage.tolist(), strict=True)):
        rows[stage].append((row, kind))

    def spans(units: Units, stages: Iterable[int]) -> Iterable[tuple[int, float]]:
        ends = [0, *accumulate(units)]
        for stage in stages:
            low, high = ends[stage], ends[stage + 1]
            ahead, back = forward[high] - forward[low], backward[high] - backward[low]
            share = {
                Kind.F: ahead,
                Kind.RECOMPUTE: ahead,
                Kind.B: back,
                Kind.W: weights * back,
                Kind.I: back - weights * back,
            }
            yield from ((row, share[Kind(kind)]) for row, kind in rows[stage])

    took = dict(spans(start, range(len(start))))
    timed = Retimed(line, [took[row] for row in range(len(line))], send)
    shown = start

    def cost(units: Units) -> float:
        nonlocal shown
        timed.change(spans(units, _differing(units, shown)))
        shown = units
        return timed.seconds

    def propose(units: Units, chance: random.Random) -> Units:
        if len(units) == 1:
            return units
        source = chance.randrange(len(units))
        target = source + chance.choice((-1, 1))
        if not 0 <= target < len(units) or units[source] == 1:
            return units
        moved = list(units)
        moved[source] -= 1
        moved[target] += 1
        return tuple(moved)

    return walk(start, propose, cost, steps, heat, seed)


def _differing(one: Units, other: Units) -> list[int]:
    """Stages whose units differ, in number or in place."""
    ends = list(zip([0, *accumulate(one)], [0, *accumulate(other)], strict=True))
    return [
        stage
        for stage in range(len(one))
        if ends[stage][0] != ends[stage][1] or ends[stage + 1][0] != ends[stage + 1][1]
    ]
