"""What each operation of a timeline needs: the rows that must have ended before it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedlang.timeline.table import Kind, Rows, Timeline, TimelineError

GROUPS = ((Kind.F,), (Kind.B, Kind.I), (Kind.W,))


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

    def used(self) -> NDArray[np.bool_]:
        """Places of microbatches that go through a replica: it has a row of them on some stage."""
        found = np.zeros(self.shape, dtype=bool)
        found[self.where] = True
        return np.broadcast_to(found.any(axis=(1, 3), keepdims=True), self.shape)

    def name(self, flat: Any) -> str:
        """A place of the table in words."""
        replica, stage, microbatch, part = np.unravel_index(int(flat), self.shape)
        text = f"stage {stage}, microbatch {microbatch}"
        text += f", slice {part}" if self.shape[3] > 1 else ""
        return text + (f", replica {replica}" if self.shape[0] > 1 else "")


def dependencies(timeline: Timeline) -> tuple[Rows, Rows]:
    """Pairs of compute rows (made, used): the second needs what the first made."""
    table = Places(timeline)
    forward, backward, weight = (table.rows_of(*kinds) for kinds in GROUPS)
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


def describe(timeline: Timeline, row: int) -> str:
    """An operation in words, for messages."""
    op = timeline.pick(np.array([row]))
    kind = Kind(int(op.kind[0])).name
    return f"{kind} of stage {op.stage[0]}, microbatch {op.microbatch[0]} (rank {op.rank[0]})"
