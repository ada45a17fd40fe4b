"""When every operation of a timeline runs, under given costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schedlang.timeline.needs import dependencies, describe
from schedlang.timeline.table import UNIT, Kind, Rows, Timeline, TimelineError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Timing:
    """Start and end of every compute operation, in the units of the costs."""

    timeline: Timeline
    start: Floats
    end: Floats

    @property
    def makespan(self) -> float:
        """From zero to the end of the last operation of all ranks."""
        return float(self.end.max(initial=0.0))

    @property
    def rank_span(self) -> float:
        """The longest time of one rank from its first operation to its last (no barrier)."""
        first, last = self._ends()
        return float((last - first).max(initial=0.0))

    @property
    def busy(self) -> Floats:
        """Time at work, per rank."""
        t = self.timeline
        return np.bincount(t.rank, self.end - self.start, minlength=t.ranks).astype(np.float64)

    @property
    def bubble(self) -> float:
        """Idle share of the ranks under a barrier at the end (over the makespan)."""
        return 1.0 - float(self.busy.mean()) / self.makespan if self.makespan else 0.0

    @property
    def span_bubble(self) -> float:
        """Idle share without a barrier (over the rank span), the measure of Zero Bubble."""
        return 1.0 - float(self.busy.mean()) / self.rank_span if self.rank_span else 0.0

    def _ends(self) -> tuple[Floats, Floats]:
        starts = self.timeline.starts
        full = starts[1:] > starts[:-1]
        return self.start[starts[:-1][full]], self.end[starts[1:][full] - 1]


def timing(
    timeline: Timeline,
    cost: Mapping[Kind, float] | Floats = UNIT,
    transfer: float = 0.0,
) -> Timing:
    """When every compute operation runs, each rank in its order, as early as its inputs are there.

    `cost`: time per kind, or one per compute row; `transfer`: time of a transfer between ranks.
    Raises TimelineError, naming what each rank waits for, if the order never ends.
    """
    t = timeline.compute()
    if isinstance(cost, Mapping):
        table = np.array([cost.get(kind, 0.0) for kind in Kind], dtype=np.float64)
        duration = table[t.kind]
    else:
        duration = np.asarray(cost, dtype=np.float64)
    made, used = dependencies(t)
    apart = t.rank[made] != t.rank[used]
    live = apart | (made > used)  # an earlier row of the same rank has ended anyway
    start, end = _simulate(
        t, duration, made[live], used[live], np.where(apart, transfer, 0.0)[live]
    )
    return Timing(t, start, end)


def _simulate(
    t: Timeline, duration: Floats, made: Rows, used: Rows, lag: Floats
) -> tuple[Floats, Floats]:
    """Event simulation, near-linear: every row is visited once, and once more when it must wait."""
    order = np.argsort(used, kind="stable")
    first = np.searchsorted(used[order], np.arange(len(t) + 1)).tolist()
    needs, lags = made[order].tolist(), lag[order].tolist()
    cost, stop = duration.tolist(), t.starts[1:].tolist()
    at, free = t.starts[:-1].tolist(), [0.0] * t.ranks
    start, end = [0.0] * len(t), [-1.0] * len(t)
    waiting: dict[int, list[int]] = {}
    stack = list(range(t.ranks - 1, -1, -1))
    while stack:
        rank = stack.pop()
        row, now = at[rank], free[rank]
        while row < stop[rank]:
            ready, missing = now, -1
            for k in range(first[row], first[row + 1]):
                arrived = end[needs[k]]
                if arrived < 0.0:
                    missing = needs[k]
                    break
                ready = max(ready, arrived + lags[k])
            if missing >= 0:
                waiting.setdefault(missing, []).append(rank)
                break
            start[row] = ready
            now = end[row] = ready + cost[row]
            if row in waiting:
                stack.extend(waiting.pop(row))
            row += 1
        at[rank], free[rank] = row, now
    if waiting:
        pairs = [
            f"{describe(t, at[r])} waits for {describe(t, q)}"
            for q, ranks in waiting.items()
            for r in ranks
        ]
        raise TimelineError("the order never ends: " + "; ".join(pairs[:4]))
    return np.array(start), np.array(end)
