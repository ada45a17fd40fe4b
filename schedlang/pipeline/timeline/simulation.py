"""Simulation of a timeline under given costs: a rank runs its rows in order, each once it is
ready."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedlang.pipeline.cost import Cost, Number
from schedlang.pipeline.timeline.table import (
    UNIT_TIMES,
    Kind,
    Rows,
    Timeline,
    TimelineError,
    barrier_waits,
    dependencies,
    describe_row,
)

# -- the clock -------------------------------------------------------------------------------------


Ticks = NDArray[Any]  # float64, int64, or objects where whole numbers are too large for int64

MIN_RANKS_FOR_ROUNDS = (
    32  # from this many ranks rounds over all ranks are quicker than one row at a time
)
WINDOW, MIN_ROWS_PER_ROUND = (
    256,
    12,
)  # rounds measured, and rows per round below which single rows are quicker


@dataclass(frozen=True)
class Dependencies:
    """The rows that must have ended before each row, and how long after their end it may start.

    Those of row r are `made[first[r]:first[r + 1]]`, with `lag` likewise.
    """

    first: Rows
    made: Rows
    lag: Ticks

    @staticmethod
    def of(count: int, src: Rows, dst: Rows, lag: Ticks) -> Dependencies:
        """Sort pairs of rows by the row that needs the other."""
        order = np.argsort(dst, kind="stable")
        first = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(np.bincount(dst, minlength=count), out=first[1:])
        return Dependencies(first, src[order], lag[order])


class Simulator:
    """State of a simulation: the current row of each rank, when it is free, which rows have ended.

    `copies` marks rows that run on a rank's copy stream, one after the other, overlapped with
    others.
    """

    def __init__(
        self,
        starts: Rows,
        duration: Ticks,
        needs: Dependencies,
        copies: NDArray[np.bool_] | None = None,
    ) -> None:
        self.duration, self.needs, self.copies = duration, needs, copies
        self.at, self.stop = starts[:-1].copy(), starts[1:].copy()
        zero = np.zeros(len(self.at), dtype=duration.dtype)
        self.free, self.copied, self.ready = zero, zero.copy(), zero.copy()
        self.cursor = needs.first[self.at]
        self.start = np.zeros_like(duration)
        self.end = np.full_like(duration, -1)

    def run(self) -> dict[int, int]:
        """Run to the end, or until no rank advances; return each stuck row with the row it waits
        for."""
        exact = self.duration.dtype == object
        if len(self.at) < MIN_RANKS_FOR_ROUNDS or exact or not self._rounds():
            self._steps()
        stuck = np.flatnonzero(self.at < self.stop)
        return {int(self.at[r]): int(self.needs.made[self.cursor[r]]) for r in stuck}

    def _rounds(self) -> bool:
        """Run one row of every rank that can, in rounds; False where rounds have too few rows to
        pay."""
        active = np.flatnonzero(self.at < self.stop)
        row_count, rounds = 0, 0
        while active.size:
            advanced = self._round(active)
            if not advanced.size:
                break
            row_count, rounds = row_count + len(advanced), rounds + 1
            if (self.at[advanced] == self.stop[advanced]).any():
                active = active[self.at[active] < self.stop[active]]
            if rounds % WINDOW == 0:
                if row_count < WINDOW * MIN_ROWS_PER_ROUND:
                    return False
                row_count = 0
        return True

    def _round(self, active: Rows) -> Rows:
        """Run one row of every rank that can run one; return those ranks."""
        rows = self.at[active]
        last, cursor = self.needs.first[rows + 1], self.cursor[active]
        ready = self.ready[active]
        pending = np.flatnonzero(cursor < last)
        while pending.size:
            k = cursor[pending]
            ended = self.end[self.needs.made[k]]
            known = ended >= 0
            pending, k, ended = pending[known], k[known], ended[known]
            ready[pending] = np.maximum(ready[pending], ended + self.needs.lag[k])
            cursor[pending] = k + 1
            pending = pending[k + 1 < last[pending]]
        self.cursor[active], self.ready[active] = cursor, ready
        runnable = cursor == last
        ranks, rows, ready = active[runnable], rows[runnable], ready[runnable]
        start = np.maximum(self.free[ranks], ready)
        if self.copies is not None:
            self._run_on_streams(ranks, rows, start)
        else:
            self.free[ranks] = start + self.duration[rows]
        self.start[rows] = start
        self.end[rows] = start + self.duration[rows]
        self.at[ranks] += 1
        self.ready[ranks] = 0
        advanced: Rows = ranks
        return advanced

    def _run_on_streams(self, ranks: Rows, rows: Rows, start: Ticks) -> None:
        """Add the duration of rows on the stream of each; copies wait for the copies before
        them."""
        assert self.copies is not None
        copy = self.copies[rows]
        start[copy] = np.maximum(start[copy], self.copied[ranks[copy]])
        end = start + self.duration[rows]
        self.copied[ranks[copy]] = end[copy]
        self.free[ranks[~copy]] = end[~copy]

    def _steps(self) -> None:
        """Simulate by events, near-linear: a row is visited once, and once more when it must
        wait."""
        first, src, lag = (x.tolist() for x in vars(self.needs).values())
        cost, stop, at = self.duration.tolist(), self.stop.tolist(), self.at.tolist()
        start, end = self.start.tolist(), self.end.tolist()
        free, copied, since = self.free.tolist(), self.copied.tolist(), self.ready.tolist()
        cursor = self.cursor.tolist()
        copies = None if self.copies is None else self.copies.tolist()
        waiting: dict[int, list[int]] = {}
        stack = list(range(len(at) - 1, -1, -1))
        while stack:
            rank = stack.pop()
            row, now, ready, k = at[rank], free[rank], since[rank], cursor[rank]
            while row < stop[rank]:
                stops = first[row + 1]
                while k < stops and (ended := end[src[k]]) >= 0:
                    if ended + lag[k] > ready:
                        ready = ended + lag[k]
                    k += 1
                if k < stops:
                    waiting.setdefault(src[k], []).append(rank)
                    break
                begin = now if now > ready else ready
                if copies is not None and copies[row]:
                    begin = max(begin, copied[rank])
                    copied[rank] = begin + cost[row]
                else:
                    now = begin + cost[row]
                start[row], end[row], ready = begin, begin + cost[row], 0
                if row in waiting:
                    stack.extend(waiting.pop(row))
                row += 1
            at[rank], free[rank], since[rank], cursor[rank] = row, now, ready, k
        dtype = self.duration.dtype
        self.start, self.end = np.array(start, dtype), np.array(end, dtype)
        self.at, self.cursor = np.array(at), np.array(cursor)


# -- costs of rows, in ticks: whole numbers where costs are exact ----------------------------------


Costs = Cost | Mapping[Kind, Number] | NDArray[Any] | Sequence[Number]
MAX_TICK = 2**62


@dataclass(frozen=True)
class Durations:
    """Ticks of each row and of each transfer; a tick is `tick` units of cost, None: floats."""

    rows: Ticks
    lags: Ticks
    tick: Fraction | None


def row_durations(t: Timeline, cost: Costs, transfer: Number, src: Rows, dst: Rows) -> Durations:
    """Return the costs of rows, and of the transfers (made, used) between ranks.

    `transfer` is the time of a transfer where `cost` is not a `Cost`, which has its own.
    """
    row_at: Any
    lag_at: Any = (0,)
    if isinstance(cost, Cost):
        rows, lags = _row_costs(t, cost), _lags(t, cost)
        row_at = (t.kind, *_index(rows.shape[1:], t.stage, t.slice))
        lag_at = _index(lags.shape, t.stage[src], t.stage[dst], t.slice[src])
    elif isinstance(cost, Mapping):
        rows, lags = _array([cost.get(kind, 0) for kind in Kind]), _array([transfer])
        row_at = (t.kind,)
    else:
        rows, lags, row_at = _array(cost), _array([transfer]), slice(None)
        if len(rows) != len(t):
            raise ValueError(f"{len(rows)} costs for {len(t)} operations")
    costs = np.concatenate([rows.ravel(), lags.ravel()])
    costs, tick = exact_ticks(costs, len(t) + len(src))
    rows, lags = costs[: rows.size].reshape(rows.shape), costs[rows.size :].reshape(lags.shape)
    delays = np.zeros(len(src), dtype=costs.dtype)
    delays[:] = lags[lag_at]
    delays[t.rank[src] == t.rank[dst]] = 0
    return Durations(rows[row_at], delays, tick)


def relative_weights(weights: Sequence[Number], count: int, name: str) -> NDArray[Any]:
    """Normalise relative weights to a mean of one, exact where they are given exactly."""
    if len(weights) != count:
        raise ValueError(f"{len(weights)} weights of {name}, and there are {count}")
    total = sum(exact_number(x) for x in weights)
    return np.array([exact_number(x) * count / total for x in weights], dtype=object)


_ONE = np.array([Fraction(1)], dtype=object)


def _row_costs(t: Timeline, cost: Cost) -> NDArray[Any]:
    """Return costs [kind, stage, slice] in units of cost; stage and slice of size one where all are
    equal."""
    recompute = cost.f if cost.recompute is None else cost.recompute
    sliced = {
        Kind.F: cost.f,
        Kind.I: cost.i,
        Kind.W: cost.w,
        Kind.RECOMPUTE: recompute,
        Kind.B: exact_number(cost.i) + exact_number(cost.w),
        Kind.EVICT: cost.evict,
        Kind.LOAD: cost.load,
        Kind.OFFLOAD: cost.offload,
        Kind.RELOAD: cost.reload,
    }
    unsliced = {
        Kind.UNSHARD: cost.unshard,
        Kind.RESHARD: cost.reshard,
        Kind.REDUCE: cost.reduce,
        Kind.STEP: cost.step,
    }
    stage = _ONE if cost.shares is None else relative_weights(cost.shares, t.stages, "stages")
    stage = stage * Fraction(t.ranks, max(1, t.stages))
    part = _ONE if cost.slices is None else relative_weights(cost.slices, t.slices, "slices")
    part = part / max(1, t.slices)
    table = _column(sliced) * stage[:, None] * part + _column(unsliced) * stage[:, None]
    table[Kind.BARRIER] = exact_number(cost.barrier)
    return np.asarray(table)


def _column(costs: Mapping[Kind, Number]) -> NDArray[Any]:
    numbers = [exact_number(costs.get(kind, 0)) for kind in Kind]
    return np.array(numbers, dtype=object)[:, None, None]


def _lags(t: Timeline, cost: Cost) -> NDArray[Any]:
    """Return lags [from stage, to stage, slice], of size one where all are equal."""
    part = relative_weights(cost.slices, t.slices, "slices") if cost.slices is not None else _ONE
    table = np.full((1, 1, 1), exact_number(cost.comm), dtype=object)
    if cost.between is not None:
        table = np.full((t.stages, t.stages, 1), exact_number(cost.comm), dtype=object)
        for (source, target), value in cost.between.items():
            table[source, target] = table[target, source] = exact_number(value)
    return table * (part / max(1, t.slices))


def _index(shape: tuple[int, ...], *columns: Any) -> tuple[Any, ...]:
    """Return columns as an index; a dim of size one has index 0 for all."""
    return tuple(c if size > 1 else 0 for size, c in zip(shape, columns))


def exact_number(value: Number) -> Number:
    """Convert to an exact number: Python's own types, integers as fractions."""
    if isinstance(value, np.generic):
        value = value.item()
    return Fraction(value) if isinstance(value, int) else value


def _array(values: Any) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype == np.float64:
        return array
    return np.array([exact_number(x) for x in values], dtype=object)


def exact_ticks(table: NDArray[Any], count: int) -> tuple[Ticks, Fraction | None]:
    """Return a table as floats, or as whole numbers of ticks and the length of a tick.

    `count` is how many entries may be added up without overflow.
    """
    if table.dtype != object or any(isinstance(x, float) for x in table.ravel()):
        return table.astype(np.float64), None
    scale = math.lcm(*{x.denominator for x in table.ravel()})
    ticks = np.array([int(x * scale) for x in table.ravel()], dtype=object).reshape(table.shape)
    largest = max((abs(x) for x in ticks.ravel()), default=0)
    return ticks.astype(np.int64 if largest * (count + 1) < MAX_TICK else object), Fraction(
        1, scale
    )


# -- timings ---------------------------------------------------------------------------------------


Floats = NDArray[np.float64]

# kinds on a rank's copy stream, overlapped with its computing, one after the other
COPY_KINDS = (
    Kind.OFFLOAD,
    Kind.RELOAD,
    Kind.EVICT,
    Kind.LOAD,
    Kind.UNSHARD,
    Kind.RESHARD,
    Kind.REDUCE,
)


@dataclass(frozen=True, eq=False)
class Timing:
    """Start and end of every compute operation, and derived figures.

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
        """The time from zero to the end of the last operation of all ranks."""
        return self._number(self.ends.max() if len(self.ends) else 0)

    @cached_property
    def rank_span(self) -> Any:
        """The longest time of one rank from its first operation to its last (no barrier)."""
        first, last = self._ends()
        return self._number((last - first).max() if len(first) else 0)

    @cached_property
    def busy(self) -> NDArray[Any]:
        """Time at work, per rank; copies that overlap with work do not count."""
        t = self.timeline
        durations = self.ends - self.begins
        durations[np.isin(t.kind, COPY_KINDS)] = 0
        totals = np.zeros(t.ranks, dtype=durations.dtype)
        low = t.starts[:-1][self._full]
        if len(low):
            totals[self._full] = np.add.reduceat(durations, low)
        return self._numbers(totals)

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
        """Number of transfers between ranks, evicted activations included."""
        return int(self.sent.sum())

    @property
    def sending(self) -> NDArray[Any]:
        """Time in which messages of each rank are in flight, added up."""
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


def simulate_timeline(
    timeline: Timeline, cost: Costs = UNIT_TIMES, transfer: Number = 0.0
) -> Timing:
    """Time every compute operation: each rank in its order, as early as its inputs arrive.

    `cost`: a `Cost`, of which chunks and slices have their shares; or time per kind, the same for
    every stage, or one time per compute row, both with `transfer` between ranks. Raises
    TimelineError, naming what each rank waits for, if the order never ends.
    """
    t = timeline.compute()
    src, dst = dependencies(t)
    costs = row_durations(t, cost, transfer, src, dst)
    if min(costs.rows.min(initial=0), costs.lags.min(initial=0)) < 0:
        raise ValueError("costs are times: none below zero")
    copies = np.isin(t.kind, COPY_KINDS)
    crossing = t.rank[src] != t.rank[dst]
    sent, sending = _sent(t, src[crossing], costs.lags[crossing])
    live = crossing | (src > dst) | copies[src]  # other inputs are earlier rows of the rank
    pairs = src[live], dst[live], costs.lags[live]
    clock = Simulator(
        t.starts,
        costs.rows,
        _needs(t, copies, costs.rows, *pairs),
        copies if copies.any() else None,
    )
    if waits := clock.run():
        raise TimelineError("the order never ends: " + describe_deadlock(t, waits))
    return Timing(t, clock.start, clock.end, costs.tick, sent, sending)


def _needs(
    t: Timeline, copies: NDArray[np.bool_], durations: Ticks, src: Rows, dst: Rows, lags: Ticks
) -> Dependencies:
    """Return the dependencies of every row, including those of barriers."""
    if not (t.kind == Kind.BARRIER).any():
        return Dependencies.of(len(t), src, dst, lags)
    (before, waits), (first, others) = barrier_waits(t, copies)
    none = np.zeros(len(before), dtype=lags.dtype)
    return Dependencies.of(
        len(t),
        np.concatenate([src, before, first]),
        np.concatenate([dst, waits, others]),
        np.concatenate([lags, none, -durations[first]]),  # all start with the first one
    )


def _sent(t: Timeline, src: Rows, lags: Ticks) -> tuple[Rows, Ticks]:
    """Return the number of messages that each rank sends, and their time."""
    sending = np.zeros(t.ranks, dtype=lags.dtype)
    np.add.at(sending, t.rank[src], lags)
    evicted = t.rank[t.kind == Kind.EVICT]
    loaders = t.peer[(t.kind == Kind.LOAD) & (t.peer >= 0)]
    return np.bincount(np.concatenate([t.rank[src], evicted, loaders]), minlength=t.ranks), sending


def describe_deadlock(t: Timeline, waits: dict[int, int]) -> str:
    """Describe a circle of rows that wait for each other; keys of `waits` are the stuck rows."""
    stuck = {int(t.rank[row]): row for row in waits}
    rank, visited = next(iter(stuck)), list[int]()
    while rank in stuck and rank not in visited:
        visited.append(rank)
        rank = int(t.rank[waits[stuck[rank]]])
    cycle = visited[visited.index(rank) :] if rank in visited else visited
    pairs = [
        f"{describe_row(t, stuck[r])} waits for {describe_row(t, waits[stuck[r]])}"
        for r in cycle[:6]
    ]
    return "; ".join(pairs + (["and so on"] if len(cycle) > 6 else []))
