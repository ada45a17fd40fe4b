"""What each operation of a timeline needs: the rows that must have ended before it."""

from __future__ import annotations

from typing import Any

import numpy as np

from schedlang.pipeline.timeline.table import TRANSFERS, Kind, Rows, Timeline, TimelineError

GROUPS = ((Kind.F,), (Kind.B, Kind.I), (Kind.W,))
BACKWARD = GROUPS[1]
WORK = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.RECOMPUTE)
# what must come between a forward and its backward, in this order, where it is there at all
ASIDE = ((Kind.EVICT, Kind.LOAD), (Kind.OFFLOAD, Kind.RELOAD), (Kind.RECOMPUTE,))


class Places:
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


def dependencies(timeline: Timeline) -> tuple[Rows, Rows]:
    """Pairs of compute rows (made, used): the second needs what the first made.

    Between ranks they are the transfers. Slices of one stage and microbatch go forward in order,
    because they carry keys and values, and backward in reverse.
    """
    table = Places(timeline)
    forward, backward, weight = (table.rows_of(*kinds) for kinds in GROUPS)
    source = np.array([s for s, _ in timeline.edges], dtype=np.int64)
    target = np.array([d for _, d in timeline.edges], dtype=np.int64)
    inside = (source < table.shape[1]) & (target < table.shape[1])
    source, target = source[inside], target[inside]
    pairs = [
        (forward[:, source], forward[:, target]),
        (backward[:, target], backward[:, source]),
        (forward, backward),
        (backward, weight),
    ]
    if table.shape[3] > 1:
        pairs += [(forward[..., :-1], forward[..., 1:]), (backward[..., 1:], backward[..., :-1])]
    there = set(np.flatnonzero(np.bincount(timeline.kind, minlength=len(Kind))).tolist())
    for kinds in ASIDE:
        steps = [forward, *(table.rows_of(k) for k in kinds if k in there), backward]
        pairs += list(zip(steps[:-1], steps[1:])) if len(steps) > 2 else []
    found = [_both(a, b) for a, b in pairs]
    if there & {Kind.UNSHARD, Kind.REDUCE}:
        found += [_latest(timeline, (Kind.UNSHARD,), WORK)]
        found += [_latest(timeline, (Kind.REDUCE,), (Kind.STEP,))]
    return np.concatenate([a for a, _ in found]), np.concatenate([b for _, b in found])


def _both(before: Rows, after: Rows) -> tuple[Rows, Rows]:
    there = (before >= 0) & (after >= 0)
    return before[there], after[there]


def _latest(t: Timeline, makers: tuple[Kind, ...], users: tuple[Kind, ...]) -> tuple[Rows, Rows]:
    """For each user the latest maker of its stage that stands before it on its rank."""
    key = t.rank.astype(np.int64) * max(1, t.stages) + t.stage
    made, used = (np.flatnonzero(np.isin(t.kind, kinds)) for kinds in (makers, users))
    latest = latest_before(key, made, used)
    return latest[latest >= 0], used[latest >= 0]


def latest_before(key: Rows, makers: Rows, users: Rows) -> Rows:
    """For each user (row) the latest maker of the same key that stands before it, or -1."""
    if not len(makers):
        return np.full(len(users), -1, dtype=np.int64)
    width = len(key) + 1
    place = np.sort(key[makers] * width + makers)
    at = np.searchsorted(place, key[users] * width + users) - 1
    found = place[at.clip(0)]
    same = (at >= 0) & (found // width == key[users])
    return np.where(same, found % width, -1)


def barriers(t: Timeline, copies: Any) -> tuple[Rows, Rows, Rows]:
    """The waits of barriers: (before, barrier) with the barrier of the first rank, and the others'.

    Barrier k of the first rank waits for the rows before barrier k of every rank; the third array
    are the barriers of the other ranks, which start as the first one's does, given in pairs with
    it. Raises TimelineError where ranks have different numbers of them.
    """
    rows = np.flatnonzero(t.kind == Kind.BARRIER)
    count = np.bincount(t.rank[rows], minlength=t.ranks)
    if count.min() != count.max():
        few, many = int(count.argmin()), int(count.argmax())
        raise TimelineError(
            f"rank {few} has {count[few]} barriers and rank {many} has {count[many]}: "
            f"{describe(t, int(rows[t.rank[rows] == many][count[few]]))} waits for rank {few}"
        )
    table = rows.reshape(t.ranks, -1)
    before, waits = [], []
    for plain in (False, True):
        stream = np.flatnonzero(copies == plain)
        at = np.searchsorted(stream, table) - 1
        there = at >= 0
        last = np.where(there, stream[at], 0) if len(stream) else np.zeros_like(table)
        there &= t.rank[last] == np.arange(t.ranks)[:, None]
        before.append(last[there])
        waits.append(np.broadcast_to(table[0], table.shape)[there])
    return np.concatenate(before), np.concatenate(waits), table


def describe(timeline: Timeline, row: int) -> str:
    """An operation in words, for messages."""
    op = timeline.pick(np.array([row]))
    kind = Kind(int(op.kind[0])).name
    text = f"{kind} of stage {op.stage[0]}, microbatch {op.microbatch[0]}"
    text += f", slice {op.slice[0]}" if timeline.slices > 1 else ""
    text += f", replica {op.replica[0]}" if timeline.replicas > 1 else ""
    if int(op.kind[0]) in TRANSFERS:
        text += f", {'to' if kind.startswith('SEND') else 'from'} stage {op.peer[0]}"
    return f"{text} (rank {op.rank[0]})"
