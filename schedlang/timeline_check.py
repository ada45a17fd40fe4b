"""What must precede what in a timeline: proof that it ends, its times, and its transfers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedlang.timeline import COLUMNS, UNIT, Kind, Rows, Timeline, TimelineError

Floats = NDArray[np.float64]
COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)


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


def check(timeline: Timeline, *, complete: bool = True) -> None:
    """Raise TimelineError unless every operation is there once, in a possible order, and it ends.

    Each (stage, microbatch) has one F and one B or one I and one W, on one rank, F first and I
    before W; a timeline without backwards is an evaluation. Transfers, if any, are matched in the
    order in which they were sent. `complete=False` allows (stage, microbatch) pairs to be missing.
    """
    t = timeline.compute()
    table = _Table(t)
    forward, backward, weight = (table.rows_of(*kinds) for kinds in _GROUPS)
    if complete and (forward < 0).any():
        raise TimelineError(f"{table.name(np.argmax(forward < 0))} has no forward")
    trained = bool((backward >= 0).any())
    if trained and ((backward >= 0) != (forward >= 0)).any():
        which = table.name(np.argmax((backward >= 0) != (forward >= 0)))
        raise TimelineError(f"{which} has a forward without a backward, or the reverse")
    split = np.where(backward >= 0, t.kind[backward] == Kind.I, False) if trained else weight >= 0
    if (split != (weight >= 0)).any():
        which = table.name(np.argmax(split != (weight >= 0)))
        raise TimelineError(f"{which} has an input gradient without a weight gradient, or reverse")
    for first, then, what in ((forward, backward, "F before B"), (backward, weight, "I before W")):
        both = (first >= 0) & (then >= 0)
        wrong = both & ((first > then) | (t.rank[first] != t.rank[then]))
        if wrong.any():
            raise TimelineError(f"{table.name(np.argmax(wrong))}: {what}, on the same rank")
    timing(t)
    if len(t) != len(timeline):
        _check_transfers(timeline)


def peak_live(timeline: Timeline) -> NDArray[np.int64]:
    """The largest number of live activations of each rank, in (stage, microbatch) pairs.

    A forward makes one, the whole backward or the weight gradient frees it.
    """
    step = (timeline.kind == Kind.F).astype(np.int64)
    step -= (timeline.kind == Kind.B) | (timeline.kind == Kind.W)
    total = np.cumsum(step)
    peaks = []
    for low, high in zip(timeline.starts[:-1], timeline.starts[1:]):
        before = int(total[low - 1]) if low else 0
        peaks.append(int(total[low:high].max(initial=before)) - before)
    return np.array(peaks, dtype=np.int64)


def dependencies(timeline: Timeline) -> tuple[Rows, Rows]:
    """Pairs of compute rows (made, used): the second needs what the first made."""
    table = _Table(timeline)
    forward, backward, weight = (table.rows_of(*kinds) for kinds in _GROUPS)
    source = np.array([s for s, _ in timeline.edges], dtype=np.int64)
    target = np.array([d for _, d in timeline.edges], dtype=np.int64)
    inside = (source < table.shape[1]) & (target < table.shape[1])
    source, target = source[inside], target[inside]
    made = (forward[:, source], backward[:, target], forward, backward)
    used = (forward[:, target], backward[:, source], backward, weight)
    before = np.concatenate([x.ravel() for x in made])
    after = np.concatenate([x.ravel() for x in used])
    there = (before >= 0) & (after >= 0)
    return before[there], after[there]


def with_transfers(timeline: Timeline, lookahead: int = 1) -> Timeline:
    """The same order with a row for each send and for each posting of a receive.

    A send follows the operation that makes its tensors. A receive is posted `lookahead` compute
    operations before the one that uses it, or earlier: per pair of ranks receives stand in the
    order of the sends, because that is how gloo and NCCL match them.
    """
    t = timeline.compute()
    made, used = dependencies(t)
    apart = t.rank[made] != t.rank[used]
    made, used = made[apart], used[apart]
    order = np.lexsort((t.stage[used], made))
    made, used = made[order], used[order]
    back = t.kind[made] != Kind.F
    post = _posting(t, made, used) - lookahead
    post = np.maximum(post, t.starts[t.rank[used]])
    n, k = len(t), len(made)
    own = {name: getattr(t, name) for name in COLUMNS}
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        columns[name] = np.concatenate([own[name], own[name][made], own[name][used]])
    columns["kind"][n : n + k] = np.where(back, Kind.SEND_B, Kind.SEND_F)
    columns["kind"][n + k :] = np.where(back, Kind.RECV_B, Kind.RECV_F)
    columns["peer"][n : n + k], columns["peer"][n + k :] = t.stage[used], t.stage[made]
    place = np.concatenate([np.arange(n), made, post])
    phase = np.repeat([1, 2, 0], [n, k, k])
    turn = np.concatenate([np.zeros(n, np.int64), np.arange(k), np.arange(k)])
    rows = np.lexsort((turn, phase, place))
    return replace(t, **{name: column[rows] for name, column in columns.items()})


_GROUPS = ((Kind.F,), (Kind.B, Kind.I), (Kind.W,))


class _Table:
    """Finds the row of an operation: arrays [replica, stage, microbatch, slice] of row numbers."""

    def __init__(self, timeline: Timeline) -> None:
        self.t = timeline
        names = ("replica", "stage", "microbatch", "slice")
        self.where = tuple(getattr(timeline, name) for name in names)
        self.shape = tuple(int(c.max(initial=0)) + 1 for c in self.where)

    def rows_of(self, *kinds: Kind) -> Rows:
        """Row numbers of these kinds, -1 where there is none; two in one place are refused."""
        rows = np.flatnonzero(np.isin(self.t.kind, kinds))
        found = np.full(self.shape, -1, dtype=np.int64)
        place = tuple(column[rows] for column in self.where)
        found[place] = rows
        twice = found[place] != rows
        if twice.any():
            row = int(rows[np.argmax(twice)])
            raise TimelineError(f"{describe(self.t, row)} is there twice")
        return found

    def name(self, flat: Any) -> str:
        """A place of the table in words."""
        replica, stage, microbatch, part = np.unravel_index(int(flat), self.shape)
        text = f"stage {stage}, microbatch {microbatch}"
        text += f", slice {part}" if self.shape[3] > 1 else ""
        return text + (f", replica {replica}" if self.shape[0] > 1 else "")


def describe(timeline: Timeline, row: int) -> str:
    """An operation in words, for messages."""
    op = timeline.pick(np.array([row]))
    kind = Kind(int(op.kind[0])).name
    return f"{kind} of stage {op.stage[0]}, microbatch {op.microbatch[0]} (rank {op.rank[0]})"


def _posting(t: Timeline, made: Rows, used: Rows) -> Rows:
    """Where each receive must be posted: no later than any later receive of its pair of ranks."""
    pair = t.rank[made].astype(np.int64) * t.ranks + t.rank[used]
    post = used.copy()
    order = np.argsort(pair, kind="stable")  # made is ascending: within a pair, the sending order
    bounds = np.flatnonzero(np.diff(pair[order], prepend=-1, append=-1))
    for low, high in zip(bounds[:-1], bounds[1:]):
        part = order[low:high]
        post[part] = np.minimum.accumulate(used[part][::-1])[::-1]
    return post


def _check_transfers(t: Timeline) -> None:
    """Per pair of ranks and direction, receives stand in the order of the sends."""
    ranks = t.stage_rank
    sends = np.isin(t.kind, (Kind.SEND_F, Kind.SEND_B))
    receives = np.isin(t.kind, (Kind.RECV_F, Kind.RECV_B))
    keys = []
    for rows, outgoing in ((np.flatnonzero(sends), True), (np.flatnonzero(receives), False)):
        far = ranks[t.peer[rows]]
        pair = (t.rank[rows], far) if outgoing else (far, t.rank[rows])
        ends = (t.stage[rows], t.peer[rows]) if outgoing else (t.peer[rows], t.stage[rows])
        back = np.isin(t.kind[rows], (Kind.SEND_B, Kind.RECV_B))
        columns = (*pair, back, *ends, t.replica[rows], t.microbatch[rows], t.slice[rows])
        order = np.lexsort((rows, pair[1], pair[0]))
        keys.append(np.stack([np.asarray(c)[order] for c in columns]))
    sent, received = keys
    if sent.shape != received.shape or not np.array_equal(sent, received):
        short = min(sent.shape[1], received.shape[1])
        differs = (sent[:, :short] != received[:, :short]).any(0)
        at = int(np.argmax(differs)) if differs.any() else short
        text = f"message {at}" if at >= sent.shape[1] else f"ranks {sent[0, at]} to {sent[1, at]}"
        raise TimelineError(f"sends and receives do not match: {text}")


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
