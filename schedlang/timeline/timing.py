"""When every operation of a timeline runs, under given costs."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedlang.cost import Number
from schedlang.timeline.clock import Clock, Needs, Ticks
from schedlang.timeline.durations import Costs, durations
from schedlang.timeline.needs import barriers, dependencies, describe
from schedlang.timeline.table import UNIT, Kind, Rows, Timeline, TimelineError

Floats = NDArray[np.float64]

# these run on a rank's copy stream, beside its computing, one after the other
COPIES = (
    Kind.OFFLOAD, Kind.RELOAD, Kind.EVICT, Kind.LOAD, Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Timing:
    """Start and end of every compute operation, and what follows from them.

    Spans, bubbles and sums are exact fractions where all costs are, else floats. `begins` and
    `ends` count in ticks of `tick` units of cost (None: in units of cost, as floats).
    """

    timeline: Timeline
    begins: Ticks
    ends: Ticks
    tick: Fraction | None
    sent: Rows
    sending_ticks: Ticks

    @cached_property
    def start(self) -> Floats:
        """Start of every operation, in units of cost, as floats."""
        return self._floats(self.begins)

    @cached_property
    def end(self) -> Floats:
        """End of every operation, in units of cost, as floats."""
        return self._floats(self.ends)

    @cached_property
    def makespan(self) -> Any:
        """From zero to the end of the last operation of all ranks."""
        return self._number(self.ends.max() if len(self.ends) else 0)

    @cached_property
    def rank_span(self) -> Any:
        """The longest time of one rank from its first operation to its last (no barrier)."""
        first, last = self._ends()
        return self._number((last - first).max() if len(first) else 0)

    @cached_property
    def busy(self) -> NDArray[Any]:
        """Time at work, per rank; copies beside the work do not count."""
        t = self.timeline
        took = self.ends - self.begins
        took[np.isin(t.kind, COPIES)] = 0
        found = np.zeros(t.ranks, dtype=took.dtype)
        low = t.starts[:-1][self._full]
        if len(low):
            found[self._full] = np.add.reduceat(took, low)
        return self._numbers(found)

    @property
    def bubble(self) -> Any:
        """Idle share of the ranks under a barrier at the end (over the makespan)."""
        return 1 - self.busy.mean() / self.makespan if self.makespan else self._number(0)

    @property
    def span_bubble(self) -> Any:
        """Idle share without a barrier (over the rank span), the measure of Zero Bubble."""
        return 1 - self.busy.mean() / self.rank_span if self.rank_span else self._number(0)

    @property
    def messages(self) -> int:
        """Transfers between ranks, activations that are parked on another one included."""
        return int(self.sent.sum())

    @property
    def sending(self) -> NDArray[Any]:
        """Time in which messages of each rank are on their way, added up."""
        return self._numbers(self.sending_ticks)

    @cached_property
    def _full(self) -> NDArray[np.bool_]:
        starts = self.timeline.starts
        full: NDArray[np.bool_] = starts[1:] > starts[:-1]
        return full

    def _ends(self) -> tuple[Ticks, Ticks]:
        low = self.timeline.starts[:-1][self._full]
        if not len(low):
            return self.begins, self.ends
        return np.minimum.reduceat(self.begins, low), np.maximum.reduceat(self.ends, low)

    def _floats(self, ticks: Ticks) -> Floats:
        scale = 1.0 if self.tick is None else float(self.tick)
        return ticks.astype(np.float64) * scale

    def _number(self, ticks: Any) -> Any:
        return float(ticks) if self.tick is None else int(ticks) * self.tick

    def _numbers(self, ticks: Ticks) -> NDArray[Any]:
        if self.tick is None:
            return ticks
        return np.array([int(x) * self.tick for x in ticks.tolist()], dtype=object)


def timing(timeline: Timeline, cost: Costs = UNIT, transfer: Number = 0.0) -> Timing:
    """When every compute operation runs, each rank in its order, as early as its inputs are there.

    `cost`: a `Cost`, whose chunks and slices take their parts of it; or time per kind, the same
    for every stage, or one time per compute row, both with `transfer` between ranks. Raises
    TimelineError, naming what each rank waits for, if the order never ends.
    """
    t = timeline.compute()
    made, used = dependencies(t)
    took = durations(t, cost, transfer, made, used)
    if min(took.rows.min(initial=0), took.lags.min(initial=0)) < 0:
        raise ValueError("costs are times: none below zero")
    copies = np.isin(t.kind, COPIES)
    apart = t.rank[made] != t.rank[used]
    sent, sending = _sent(t, made[apart], took.lags[apart])
    live = apart | (made > used) | copies[made]  # else the rank has done it anyway
    pairs = made[live], used[live], took.lags[live]
    clock = Clock(
        t.starts, took.rows, _needs(t, copies, took.rows, *pairs), copies if copies.any() else None
    )
    if waits := clock.run():
        raise TimelineError("the order never ends: " + never_ends(t, waits))
    return Timing(t, clock.start, clock.end, took.tick, sent, sending)


def _needs(
    t: Timeline, copies: NDArray[np.bool_], took: Ticks, made: Rows, used: Rows, lags: Ticks
) -> Needs:
    """The needs of every row, those of barriers too."""
    if not (t.kind == Kind.BARRIER).any():
        return Needs.of(len(t), made, used, lags)
    before, waits, table = barriers(t, copies)
    first = np.broadcast_to(table[0], table[1:].shape).ravel()
    others = table[1:].ravel()
    none = np.zeros(len(before), dtype=lags.dtype)
    return Needs.of(
        len(t),
        np.concatenate([made, before, first]),
        np.concatenate([used, waits, others]),
        np.concatenate([lags, none, -took[first]]),  # all start as the first one does
    )


def _sent(t: Timeline, made: Rows, lags: Ticks) -> tuple[Rows, Ticks]:
    """Messages that each rank sends, and their time."""
    sending = np.zeros(t.ranks, dtype=lags.dtype)
    np.add.at(sending, t.rank[made], lags)
    away = t.rank[t.kind == Kind.EVICT]
    home = t.peer[(t.kind == Kind.LOAD) & (t.peer >= 0)]
    return np.bincount(np.concatenate([t.rank[made], away, home]), minlength=t.ranks), sending


def never_ends(t: Timeline, waits: dict[int, int]) -> str:
    """A circle of rows that wait for each other, in words; the ranks stand at the keys."""
    at = {int(t.rank[row]): row for row in waits}
    rank, seen = next(iter(at)), list[int]()
    while rank in at and rank not in seen:
        seen.append(rank)
        rank = int(t.rank[waits[at[rank]]])
    circle = seen[seen.index(rank) :] if rank in seen else seen
    pairs = [f"{describe(t, at[r])} waits for {describe(t, waits[at[r]])}" for r in circle[:6]]
    return "; ".join(pairs + (["and so on"] if len(circle) > 6 else []))
