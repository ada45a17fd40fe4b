"""One way, filled in: its cuts, and the fewest units computed again with which it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from schedlang.ir.limits import Limits
from schedlang.passes.planner.bounds import Clock, span_floor
from schedlang.passes.planner.price import composition, even, peaks, price
from schedlang.passes.planner.space import Floats, Ints, Job
from schedlang.passes.planner.span import homes
from schedlang.passes.planner.values import Chain, Priced, Setting

FAR = 16  # stages apart between which a unit is moved


@dataclass(frozen=True)
class Filled:
    """A setting that was looked at.

    least   seconds that it takes at least
    needs   bytes of its fullest rank
    priced  None where it was not worth a price: it is too slow by its bound, or does not fit
    """

    setting: Setting
    least: float
    needs: float
    priced: Priced | None = None


@dataclass(frozen=True)
class Filler:
    """Ways filled in for one job; times of chains are kept."""

    job: Job
    limits: Limits = Limits()

    def filled(
        self,
        clock: Clock,
        way: Setting,
        worst: float = np.inf,
        beside: float = 0.0,
        after: float = 0.0,
    ) -> Filled:
        """Cut a way, find what must be computed again, and price it if it may beat `worst`.

        Its replicas send at least so many seconds `beside` its pipeline and `after` it.
        """
        chain, memory = clock.chain, self.job.cluster.memory
        times = clock.times(way.pp)[:2].sum(0)
        cut = way if way.cuts else replace(way, cuts=even(chain, way.pp * way.chunks, tuple(times)))
        least = max(span_floor(clock, cut), beside) + after
        if least >= worst:
            return Filled(cut, least, 0.0)
        held = Held(chain, self.job, cut)
        again = held.least(memory, *self._bounds(cut))
        if again is None:
            return Filled(cut, least, held.fullest)
        full = replace(cut, again=tuple(again.tolist()) if again.any() else ())
        least = max(span_floor(clock, full), beside) + after if full.again else least
        if least >= worst:
            return Filled(full, least, held.fullest)
        priced = price(chain, full, self.job.cluster, self.job.recipe)
        return Filled(full, priced.seconds, priced.peak, priced)

    def improved(self, clock: Clock, filled: Filled, moves: int) -> Filled:
        """Move units from stage to stage, so many times, where this makes a step quicker.

        A rank that must compute much again so comes to have fewer units than the others.
        """
        best, moved = filled, True
        while moved:
            moved = False
            for cuts in _moves(best.setting.cuts):
                if not moves:
                    return best
                moves -= 1
                one = self.filled(clock, replace(best.setting, cuts=cuts, again=()), best.least)
                if one.priced is not None and one.least < best.least * (1 - 1e-6):
                    best, moved = one, True
                    break
        return best

    def _bounds(self, cut: Setting) -> tuple[bool, bool, bool]:
        """Whether none, some, all units may be computed again."""
        none, some, every = (self.limits.admits("again", name) for name in ("none", "some", "all"))
        return none, some, every


def _moves(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Cuts with one unit moved from one stage to another, near ones first."""
    stages = range(len(cuts))
    for far in range(1, min(len(cuts), FAR + 1)):
        for one in stages:
            for other in (one - far, one + far):
                if cuts[one] > 1 and other in stages:
                    moved = list(cuts)
                    moved[one] -= 1
                    moved[other] += 1
                    yield tuple(moved)


@dataclass
class Held:
    """Bytes of the ranks of a cut, by how many units each computes again."""

    chain: Chain
    job: Job
    cut: Setting
    fullest: float = field(default=0.0)

    def least(self, memory: float, none: bool, some: bool, every: bool) -> Ints | None:
        """The fewest units of each stage to compute again so that all ranks fit; None: none do.

        A rank holds the less, the more of its units are computed again, but for the first: then a
        unit's activations come back beside what is kept.  So the number of each is halved upon, all
        ranks at once.  Of several stages on a rank the first is filled first, whose activations are
        held for longest.
        """
        cuts, rank = np.array(self.cut.cuts), homes(self.cut.order, self.cut.pp, self.cut.chunks)
        units = np.bincount(rank, cuts, self.cut.pp).astype(np.int64)
        nothing = np.zeros_like(units)
        free = self.bytes(self._spread(nothing, rank, cuts))
        if none and (free <= memory).all():
            return nothing[rank] * 0
        whole = self.bytes(cuts)
        over = np.minimum(free, whole) > memory if some else whole > memory
        self.fullest = float(np.minimum(free, whole).max() if some else whole.max())
        if over.any() or not (some or every):
            return None
        if not some:
            return cuts
        low, high = nothing.copy(), np.where(free <= memory, 0, units)  # high fits, low does not
        while (high - low > 1).any():
            middle = np.where(high - low > 1, (low + high) // 2, high)
            fits = self.bytes(self._spread(middle, rank, cuts)) <= memory
            open_ = high - low > 1
            high, low = np.where(open_ & fits, middle, high), np.where(open_ & ~fits, middle, low)
        found = self._spread(high, rank, cuts)
        return self._kept(found, none, every)

    def _kept(self, found: Ints, none: bool, every: bool) -> Ints | None:
        """What was found, where it may be none and all."""
        if not found.any() and not none:
            found[0] = 1
        if (found == np.array(self.cut.cuts)).all() and not every:
            return None
        return found

    def _spread(self, often: Ints, rank: Ints, cuts: Ints) -> Ints:
        """How many units of each stage, of so many of each rank."""
        found, left = np.zeros_like(cuts), often.copy()
        for stage in range(len(cuts)):
            found[stage] = min(cuts[stage], left[rank[stage]])
            left[rank[stage]] -= found[stage]
        return found

    def bytes(self, again: Ints) -> Floats:
        """Bytes of the rank of each place at its fullest moment."""
        made, more = composition(self.chain, self.cut.cuts, tuple(again.tolist()))
        return np.array(peaks(self.chain, self.cut, self.job.recipe, made, more))
