"""Stages cut for the timeline of an order: best first by a bound, judged by playing each."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from schedlang.passes.partition.programme import PIVOT, ROUNDS, SLOWEST, Way, partition
from schedlang.pipeline.schedules import order
from schedlang.pipeline.timeline.simulation import timing
from schedlang.pipeline.timeline.table import Kind, Timeline

Units = tuple[int, ...]
ROUNDING = 1e-12


@dataclass(frozen=True)
class Played:
    """The cut of the quickest step that was found.

    units  of each stage; `seconds` of a step; `floor` below which no cut is
    tries  cuts that were played
    """

    units: Units
    seconds: float
    floor: float
    tries: int

    @property
    def proven(self) -> bool:
        """Whether no other cut is quicker."""
        return self.seconds <= self.floor * (1 + ROUNDING)


def simulated(
    line: Timeline,
    times: Sequence[tuple[float, float]],
    send: float = 0.0,
    weights: float = 0.5,
    tries: int = 500,
    fits: Callable[[Units], bool] = lambda units: True,
) -> Played | None:
    """The cut of a chain whose step is quickest when the order is played.

    line     operations of every rank, in order
    times    (forward, backward) seconds of each unit, for one microbatch
    send     seconds of a message between ranks
    weights  share of a backward that gradients of weights take, where an order runs it apart
    tries    cuts that are played at most; the result says what is proven then
    fits     whether a cut fits in memory
    Returns None where no cut that was tried fits.  Raises ValueError for fewer units than stages.
    """
    return _Search(line, times, send, weights, tries, fits).run()


@dataclass
class _Search:
    line: Timeline
    times: Sequence[tuple[float, float]]
    send: float
    weights: float
    tries: int
    fits: Callable[[Units], bool]

    def __post_init__(self) -> None:
        forward, backward = zip(*self.times, strict=True)
        self.forward = [0.0, *accumulate(forward)]
        self.backward = [0.0, *accumulate(backward)]
        self.split = bool((self.line.kind == Kind.W).any())
        self.home = self.line.stage_rank.tolist()
        self.micro = self.line.microbatches
        self.known: dict[Units, float] = {}
        self.best: tuple[float, Units] | None = None

    def run(self) -> Played | None:
        """Climb from the cut of each objective, then try all that may be quicker; None: none can be
        played."""
        floor = 0.0
        for objective in (ROUNDS, PIVOT, SLOWEST):
            sends = [self.send] * len(self.times)
            seed = partition(self.times, self.line.stages, self.micro, objective, sends=sends)
            assert seed is not None  # no memory was given
            if objective is ROUNDS and self.line == order("1F1B", self.line.ranks, self.micro):
                floor = self._rounds(seed)  # no cut's ways through 1F1B are all shorter
            if self.best is None or self.best[0] > floor * (1 + ROUNDING):
                self._climb(seed)
        if self.best is None or self.best[0] > floor * (1 + ROUNDING):
            floor = max(floor, self._descend())
        if self.best is None:
            return None
        seconds, units = self.best
        return Played(units, seconds, min(floor, seconds), len(self.known))

    # -- what one cut takes ------------------------------------------------------------------------

    def _play(self, units: Units) -> float:
        if units not in self.known:
            self.known[units] = self._took(units) if self.fits(units) else np.inf
        took = self.known[units]
        if np.isfinite(took) and (self.best is None or took < self.best[0]):
            self.best = took, units
        return took

    def _took(self, units: Units) -> float:
        ends = np.cumsum((0, *units))
        forward = np.diff(np.array(self.forward)[ends])
        backward = np.diff(np.array(self.backward)[ends])
        took = np.zeros((len(Kind), len(units)))
        took[Kind.F] = took[Kind.RECOMPUTE] = forward
        took[Kind.B] = backward
        took[Kind.W] = self.weights * backward
        took[Kind.I] = backward - took[Kind.W]
        rows = took[self.line.kind, self.line.stage]
        return float(timing(self.line, rows, self.send).makespan)

    # -- near what others find ---------------------------------------------------------------------

    def _rounds(self, units: Units) -> float:
        """Seconds of the longest way through 1F1B that `ROUNDS` knows."""
        known, last = ROUNDS.empty, len(self.times)
        for after, size in enumerate(reversed(units)):
            if after:
                known = ROUNDS.link(known, self.send, self.micro)
            first = last - size
            ahead = self.forward[last] - self.forward[first]
            back = self.backward[last] - self.backward[first]
            known, last = ROUNDS.stage(known, Way(ahead, back), self.micro, after), first
        return ROUNDS.total(known, self.micro)

    def _climb(self, units: Units) -> None:
        """Move one unit from a stage to another, as long as that is quicker."""
        took = self._play(units)
        while len(self.known) < self.tries:
            better = min(
                ((self._play(moved), moved) for moved in self._moved(units)), default=(took, units)
            )
            if better[0] >= took:
                return
            took, units = better

    def _moved(self, units: Units) -> Iterator[Units]:
        for source in range(len(units)):
            for target in range(len(units)):
                if source != target and units[source] > 1 and len(self.known) < self.tries:
                    moved = list(units)
                    moved[source] -= 1
                    moved[target] += 1
                    yield tuple(moved)

    # -- best first --------------------------------------------------------------------------------

    def _descend(self) -> float:
        """Play cuts in the order of their bounds until none can be quicker; the bound of the
        rest."""
        heap: list[tuple[float, Units]] = [(self._bound(()), ())]
        opened = 0
        while heap:
            bound, units = heapq.heappop(heap)
            if self.best and bound >= self.best[0] * (1 - ROUNDING):
                return self.best[0]
            if len(self.known) >= self.tries or opened > 20 * self.tries:
                return bound
            opened += 1
            if len(units) == self.line.stages:
                self._play(units)
                continue
            for longer in self._longer(units):
                heapq.heappush(heap, (max(bound, self._bound(longer)), longer))
        return self.best[0] if self.best else np.inf

    def _longer(self, units: Units) -> Iterator[Units]:
        left = self.line.stages - len(units) - 1
        rest = len(self.times) - sum(units)
        for size in range(1, rest - left + 1) if left else (rest,):
            yield (*units, size)

    def _bound(self, units: Units) -> float:
        """Seconds that every order of these stages needs, whatever the cuts of the others.

        A rank waits for the first forward to come down to its first stage, runs all its operations,
        and the last backward goes up from there, unless it ends with gradients of weights.  Work of
        stages that are not cut yet lies on ranks as evenly as can be.
        """
        ranks = self.line.ranks
        work, first = np.zeros(ranks), np.full(ranks, np.inf)
        at, hops = 0, 0
        for stage, size in enumerate(units):
            rank = self.home[stage]
            hops += stage > 0 and self.home[stage - 1] != rank
            if not np.isfinite(first[rank]):
                up = 0.0 if self.split else self.backward[at] + hops * self.send
                first[rank] = self.forward[at] + hops * self.send + up
            end = at + size
            work[rank] += self.forward[end] - self.forward[at]
            work[rank] += self.backward[end] - self.backward[at]
            at = end
        total = self.forward[-1] + self.backward[-1]
        open_ranks = {self.home[stage] for stage in range(len(units), self.line.stages)}
        closed = max(
            (first[r] + self.micro * work[r] for r in range(ranks) if np.isfinite(first[r])),
            default=0.0,
        )
        rest = total - sum(work[r] for r in range(ranks) if r not in open_ranks)
        even = self.micro * rest / len(open_ranks) if open_ranks else 0.0
        return max(closed, even, self._below(at, open_ranks, self.line.stages - len(units), work))

    def _below(self, at: int, ranks: set[int], stages: int, work: NDArray[np.float64]) -> float:
        """A bound of what is not cut: ranks that have nothing yet wait for what lies above."""
        fresh = [r for r in ranks if work[r] == 0]
        if not fresh or len(fresh) < len(ranks):
            return 0.0
        ahead, back = self.forward[at], self.backward[at]
        rest = self.forward[-1] + self.backward[-1] - ahead - back
        count, micro = len(fresh), self.micro
        if self.split or stages > count:
            return float(ahead + micro * rest / count)
        # sum(t[:s]) + micro t[s] for every stage s is least where all of these are alike
        return float(ahead + back + rest / (1 - (1 - 1 / micro) ** count))
