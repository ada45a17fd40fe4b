"""The clock of a timeline: every rank runs its rows in order, each as soon as its needs ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedlang.timeline.table import Rows

Ticks = NDArray[Any]  # float64, int64, or objects where whole numbers are too large for int64

MANY_RANKS = 32  # from here on a round over all ranks is quicker than a step per row
WINDOW, POOR = 256, 12  # rounds watched, and rows per round below which steps are quicker


@dataclass(frozen=True)
class Needs:
    """For each row the rows that must have ended before it, and how long after: by row.

    Those of row r are `made[first[r]:first[r + 1]]`, with `lag` likewise.
    """

    first: Rows
    made: Rows
    lag: Ticks

    @staticmethod
    def of(count: int, made: Rows, used: Rows, lag: Ticks) -> Needs:
        """From pairs of rows in any order."""
        order = np.argsort(used, kind="stable")
        first = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(np.bincount(used, minlength=count), out=first[1:])
        return Needs(first, made[order], lag[order])


class Clock:
    """The state of a run: where each rank stands, when it is free, what has ended.

    `copies` marks rows that run on a rank's copy stream, one after the other, beside its others.
    """

    def __init__(
        self, starts: Rows, duration: Ticks, needs: Needs, copies: NDArray[np.bool_] | None = None
    ) -> None:
        self.duration, self.needs, self.copies = duration, needs, copies
        self.at, self.stop = starts[:-1].copy(), starts[1:].copy()
        zero = np.zeros(len(self.at), dtype=duration.dtype)
        self.free, self.copied, self.ready = zero, zero.copy(), zero.copy()
        self.cursor = needs.first[self.at]
        self.start = np.zeros_like(duration)
        self.end = np.full_like(duration, -1)

    def run(self) -> dict[int, int]:
        """To the end, or until nothing moves: then row -> the row that it waits for."""
        exact = self.duration.dtype == object
        if len(self.at) < MANY_RANKS or exact or not self._rounds():
            self._steps()
        stuck = np.flatnonzero(self.at < self.stop)
        return {int(self.at[r]): int(self.needs.made[self.cursor[r]]) for r in stuck}

    def _rounds(self) -> bool:
        """Every rank whose next row can run runs it; False where too few can for this to pay."""
        active = np.flatnonzero(self.at < self.stop)
        ran, rounds = 0, 0
        while active.size:
            moved = self._round(active)
            if not moved.size:
                break
            ran, rounds = ran + len(moved), rounds + 1
            if (self.at[moved] == self.stop[moved]).any():
                active = active[self.at[active] < self.stop[active]]
            if rounds % WINDOW == 0:
                if ran < WINDOW * POOR:
                    return False
                ran = 0
        return True

    def _round(self, active: Rows) -> Rows:
        """One row of every rank that can run one; those ranks."""
        rows = self.at[active]
        last, cursor = self.needs.first[rows + 1], self.cursor[active]
        ready = self.ready[active]
        open_ = np.flatnonzero(cursor < last)
        while open_.size:
            k = cursor[open_]
            ended = self.end[self.needs.made[k]]
            there = ended >= 0
            open_, k, ended = open_[there], k[there], ended[there]
            ready[open_] = np.maximum(ready[open_], ended + self.needs.lag[k])
            cursor[open_] = k + 1
            open_ = open_[k + 1 < last[open_]]
        self.cursor[active], self.ready[active] = cursor, ready
        go = cursor == last
        ranks, rows, ready = active[go], rows[go], ready[go]
        start = np.maximum(self.free[ranks], ready)
        if self.copies is not None:
            self._beside(ranks, rows, start)
        else:
            self.free[ranks] = start + self.duration[rows]
        self.start[rows] = start
        self.end[rows] = start + self.duration[rows]
        self.at[ranks] += 1
        self.ready[ranks] = 0
        moved: Rows = ranks
        return moved

    def _beside(self, ranks: Rows, rows: Rows, start: Ticks) -> None:
        """Take the time of rows on the stream of each; copies wait for the copies before them."""
        assert self.copies is not None
        copy = self.copies[rows]
        start[copy] = np.maximum(start[copy], self.copied[ranks[copy]])
        end = start + self.duration[rows]
        self.copied[ranks[copy]] = end[copy]
        self.free[ranks[~copy]] = end[~copy]

    def _steps(self) -> None:
        """Event simulation, near-linear: a row is visited once, and once more when it must wait."""
        first, made, lag = (x.tolist() for x in vars(self.needs).values())
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
                while k < stops and (ended := end[made[k]]) >= 0:
                    if ended + lag[k] > ready:
                        ready = ended + lag[k]
                    k += 1
                if k < stops:
                    waiting.setdefault(made[k], []).append(rank)
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
