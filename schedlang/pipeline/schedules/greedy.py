"""List scheduling: each rank, when free, takes the most urgent operation that is ready and fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from schedlang.pipeline.cost import Number


@dataclass(frozen=True)
class Jobs:
    """Operations, numbered from 0.

    rank      where each runs
    time      how long it takes
    urgency   the smallest is taken first, of equal ones the job with the lower number
    needs     the operations that must have ended before
    gain      the activations that it makes (frees: negative)
    comm      delay of what one rank needs of another
    """

    rank: Sequence[int]
    time: Sequence[Number]
    urgency: Sequence[Number]
    needs: Sequence[Sequence[int]]
    gain: Sequence[Number]
    comm: Number = 0


def listed(jobs: Jobs, ranks: int, limit: Sequence[Number] | None = None) -> list[list[int]] | None:
    """The operations of every rank in order; None if they get stuck.

    `limit`: the most activations that each rank may hold, in the units of `gain`.
    """
    return _Run(jobs, ranks, limit).all()


class _Run:
    """The state of one run: what is ready, when each rank is free, what it holds."""

    def __init__(self, jobs: Jobs, ranks: int, limit: Sequence[Number] | None) -> None:
        self.jobs, self.limit = jobs, limit
        self.open = [len(needs) for needs in jobs.needs]
        self.users: list[list[int]] = [[] for _ in jobs.rank]
        for job, needs in enumerate(jobs.needs):
            for need in needs:
                self.users[need].append(job)
        self.arrival: list[Number] = [0] * len(jobs.rank)
        # per rank: ready jobs that free or keep memory, and those that need more
        self.keep: list[list[tuple[Number, int]]] = [[] for _ in range(ranks)]
        self.grow: list[list[tuple[Number, int]]] = [[] for _ in range(ranks)]
        self.free: list[Number] = [0] * ranks
        self.held: list[Number] = [0] * ranks
        self.rows: list[list[int]] = [[] for _ in range(ranks)]
        # (time, job that has arrived or ~rank that is free)
        self.events: list[tuple[Number, int]] = [(0, ~rank) for rank in range(ranks)]
        self.events += [(0, job) for job, count in enumerate(self.open) if not count]
        heapify(self.events)

    def all(self) -> list[list[int]] | None:
        """Run until nothing is left, or nothing can go on."""
        left, rank_of = len(self.jobs.rank), self.jobs.rank
        while self.events:
            now = self.events[0][0]
            awake = set()
            while self.events and self.events[0][0] <= now:
                what = heappop(self.events)[1]
                if what >= 0:
                    self._offer(what)
                awake.add(rank_of[what] if what >= 0 else ~what)
            for rank in awake:
                if self.free[rank] <= now and (job := self._take(rank)) is not None:
                    left -= 1
                    self._start(job, rank, now)
        return None if left else self.rows

    def _offer(self, job: int) -> None:
        heaps = self.grow if self.jobs.gain[job] > 0 else self.keep
        heappush(heaps[self.jobs.rank[job]], (self.jobs.urgency[job], job))

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
