"""List scheduling of a chain of stages: the most urgent operation first; W delayed into gaps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from schedlang.pipeline.cost import Number
from schedlang.pipeline.schedules.registry import timeline_of_units
from schedlang.pipeline.timeline.table import Kind, Timeline


@dataclass(frozen=True)
class Jobs:
    """Operations, numbered from 0.

    rank      of each
    time      duration
    urgency   the smallest runs first, of equal ones the job with the lower number
    needs     operations that must have ended before
    gain      activations that it makes (negative: frees)
    comm      delay of an input from another rank
    """

    rank: Sequence[int]
    time: Sequence[Number]
    urgency: Sequence[Number]
    needs: Sequence[Sequence[int]]
    gain: Sequence[Number]
    comm: Number = 0


def list_schedule(
    jobs: Jobs, ranks: int, limit: Sequence[Number] | None = None
) -> list[list[int]] | None:
    """Return the operations of every rank in order; None if they get stuck.

    `limit`: the most activations that each rank may hold, in the units of `gain`.
    """
    return _Run(jobs, ranks, limit).all()


class _Run:
    """State of one run: ready jobs, when each rank is free, what it holds."""

    def __init__(self, jobs: Jobs, ranks: int, limit: Sequence[Number] | None) -> None:
        self.jobs, self.limit = jobs, limit
        self.open = [len(sources) for sources in jobs.needs]
        self.users: list[list[int]] = [[] for _ in jobs.rank]
        for job, sources in enumerate(jobs.needs):
            for source in sources:
                self.users[source].append(job)
        self.arrival: list[Number] = [0] * len(jobs.rank)
        # per rank: ready jobs that free or keep memory, and those that need more
        self.keep: list[list[tuple[Number, int]]] = [[] for _ in range(ranks)]
        self.grow: list[list[tuple[Number, int]]] = [[] for _ in range(ranks)]
        self.free: list[Number] = [0] * ranks
        self.held: list[Number] = [0] * ranks
        self.rows: list[list[int]] = [[] for _ in range(ranks)]
        # (time, job whose inputs have arrived, or ~rank that is free)
        self.events: list[tuple[Number, int]] = [(0, ~rank) for rank in range(ranks)]
        self.events += [(0, job) for job, count in enumerate(self.open) if not count]
        heapify(self.events)

    def all(self) -> list[list[int]] | None:
        """Run until all jobs are done, or none can start."""
        left, rank_of = len(self.jobs.rank), self.jobs.rank
        while self.events:
            now = self.events[0][0]
            awake = set()
            while self.events and self.events[0][0] <= now:
                event = heappop(self.events)[1]
                if event >= 0:
                    self._offer(event)
                awake.add(rank_of[event] if event >= 0 else ~event)
            for rank in awake:
                if self.free[rank] <= now and (job := self._take(rank)) is not None:
                    left -= 1
                    self._start(job, rank, now)
        return None if left else self.rows

    def _offer(self, job: int) -> None:
        heap = self.grow if self.jobs.gain[job] > 0 else self.keep
        heappush(heap[self.jobs.rank[job]], (self.jobs.urgency[job], job))

    def _take(self, rank: int) -> int | None:
        keep, grow = self.keep[rank], self.grow[rank]
        fits = bool(grow) and (
            self.limit is None or self.held[rank] + self.jobs.gain[grow[0][1]] <= self.limit[rank]
        )
        if fits and (not keep or grow[0] < keep[0]):
            return heappop(grow)[1]
        return heappop(keep)[1] if keep else None

    def _start(self, job: int, rank: int, now: Number) -> None:
        jobs = self.jobs
        end = now + jobs.time[job]
        self.free[rank] = end
        self.held[rank] += jobs.gain[job]
        self.rows[rank].append(job)
        heappush(self.events, (end, ~rank))
        for user in self.users[job]:
            lag = jobs.comm if jobs.rank[user] != rank else 0
            self.arrival[user] = max(self.arrival[user], end + lag)
            self.open[user] -= 1
            if not self.open[user]:
                heappush(self.events, (self.arrival[user], user))


F, I, W = range(3)  # noqa: E741  (the literature's letter for the input gradient)
Urgency = Callable[[int, int, int], Number]  # of (kind, stage, microbatch); the smallest first


@dataclass(frozen=True)
class StageChain:
    """Stages and their ranks, with durations and activations of their operations.

    homes   the rank of every stage
    times   [kind][stage]; kinds are F and B, or F, I and W
    gains   [kind][stage]: activations made, in microbatches of one rank's share; freed: negative
    comm    delay from one rank to another
    """

    ranks: int
    homes: tuple[int, ...]
    times: tuple[tuple[Number, ...], ...]
    gains: tuple[tuple[Number, ...], ...]
    comm: Number = 0

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.homes)

    def list_schedule(
        self,
        micro: int,
        urgency: Urgency,
        *,
        in_flight: int | None = None,
        limit: Number | None = None,
    ) -> Timeline | None:
        """Return the order of list scheduling; None if it gets stuck under the limit.

        in_flight   how many microbatches may be between their first F and the end of their last
                    backward at once
        limit       the most activations that a rank may hold
        """
        operations = [
            (kind, stage, microbatch)
            for kind in range(len(self.times))
            for stage in range(self.stages)
            for microbatch in range(micro)
        ]
        jobs = Jobs(
            [self.homes[s] for _, s, _ in operations],
            [self.times[k][s] for k, s, _ in operations],
            [urgency(*operation) for operation in operations],
            [self._needs(micro, in_flight, *operation) for operation in operations],
            [self.gains[k][s] for k, s, _ in operations],
            self.comm,
        )
        rows = list_schedule(jobs, self.ranks, None if limit is None else [limit] * self.ranks)
        return None if rows is None else self.timeline(rows, micro)

    def timeline(self, rows: Sequence[Sequence[int]], micro: int) -> Timeline:
        """Build the timeline of rows of jobs (kind * stages + stage) * micro + microbatch."""
        split = len(self.times) == 3
        names = np.array([Kind.F, Kind.I, Kind.W] if split else [Kind.F, Kind.B], np.int32)
        parts = (np.divmod(np.array(row, np.int64), self.stages * micro) for row in rows)
        return timeline_of_units(((names[kind], unit) for kind, unit in parts), micro)

    def _needs(
        self, micro: int, in_flight: int | None, kind: int, stage: int, microbatch: int
    ) -> list[int]:
        def number(kind: int, stage: int, microbatch: int) -> int:
            return (kind * self.stages + stage) * micro + microbatch

        if kind == W:
            return [number(I, stage, microbatch)]
        needed = [number(F, stage, microbatch)] if kind == I else []
        before = stage - 1 if kind == F else stage + 1
        if 0 <= before < self.stages:
            needed.append(number(kind, before, microbatch))
        if kind == F and stage == 0 and in_flight is not None and microbatch >= in_flight:
            needed.append(number(I, 0, microbatch - in_flight))
        return needed


StageOperation = tuple[int, int, int]  # (kind, stage, microbatch)


def fill_gaps(
    chain: StageChain, order: Timeline, limit: Number | None, *, whole_gaps: bool
) -> Timeline | None:
    """Put W into the forwards and input gradients of an order, where a rank would wait.

    W runs in gaps that are long enough (`whole_gaps`) or in any gap, before a forward that needs
    its memory, and at the end. None if memory is too small even so, or the order never ends.
    """
    return _Filling(chain, order, limit, whole_gaps).all()


class _Filling:
    """State of one filling; every rank runs until an input is missing."""

    def __init__(
        self, chain: StageChain, order: Timeline, limit: Number | None, whole_gaps: bool
    ) -> None:
        self.chain, self.limit, self.whole = chain, limit, whole_gaps
        self.micro = order.microbatches
        self.queues = [_units(order, rank) for rank in range(chain.ranks)]
        self.late: list[deque[StageOperation]] = [deque() for _ in range(chain.ranks)]
        self.free: list[Number] = [0] * chain.ranks
        self.held: list[Number] = [0] * chain.ranks
        self.end: dict[StageOperation, Number] = {}
        self.rows: list[list[int]] = [[] for _ in range(chain.ranks)]

    def all(self) -> Timeline | None:
        """Run rounds over all ranks as long as any rank advances."""
        advanced = True
        while advanced:
            advanced = False
            for rank in range(self.chain.ranks):
                while (queue := self.queues[rank]) and (ready := self._ready(rank, queue[0])) >= 0:
                    if not self._step(rank, queue.popleft(), ready):
                        return None
                    advanced = True
        if any(self.queues):
            return None
        for rank, late in enumerate(self.late):
            while late:
                self._run(rank, late.popleft(), self.free[rank])
        return self.chain.timeline(self.rows, self.micro)

    def _ready(self, rank: int, unit: StageOperation) -> Number:
        """Return the arrival time of an operation's input; -1: unknown yet."""
        kind, stage, microbatch = unit
        before = stage - 1 if kind == F else stage + 1
        if not 0 <= before < self.chain.stages:
            return 0
        end = self.end.get((kind, before, microbatch))
        if end is None:
            return -1
        return end + (self.chain.comm if self.chain.homes[before] != rank else 0)

    def _step(self, rank: int, unit: StageOperation, ready: Number) -> bool:
        """Run weight gradients that fit, then the operation; False: memory is too small."""
        kind, stage, _ = unit
        late, gain = self.late[rank], self.chain.gains[kind][stage]
        while late and self.free[rank] < ready:
            if self.whole and ready - self.free[rank] < self.chain.times[W][late[0][1]]:
                break
            self._run(rank, late.popleft(), self.free[rank])
        while self.limit is not None and gain > 0 and self.held[rank] + gain > self.limit:
            if not late:
                return False
            self._run(rank, late.popleft(), self.free[rank])
        self._run(rank, unit, ready)
        if kind == I:
            late.append((W, *unit[1:]))
        return True

    def _run(self, rank: int, unit: StageOperation, ready: Number) -> None:
        kind, stage, microbatch = unit
        end = max(self.free[rank], ready) + self.chain.times[kind][stage]
        self.free[rank] = self.end[unit] = end
        self.held[rank] += self.chain.gains[kind][stage]
        self.rows[rank].append((kind * self.chain.stages + stage) * self.micro + microbatch)


def _units(order: Timeline, rank: int) -> deque[StageOperation]:
    roles: dict[int, int] = {Kind.F: F, Kind.I: I, Kind.B: I}
    part = slice(int(order.starts[rank]), int(order.starts[rank + 1]))
    columns: Sequence[list[int]] = [
        column[part].tolist() for column in (order.kind, order.stage, order.microbatch)
    ]
    return deque((roles[k], s, m) for k, s, m in zip(*columns) if k in roles)
