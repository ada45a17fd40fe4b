"""Search of an order under a memory limit: the best of all that fit, proven before it is used."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from schedlang.pipeline.cost import Number
from schedlang.pipeline.schedules.candidates import (
    bound_of,
    chains_of,
    greedy,
    in_ticks,
    named,
    oldest,
    periods,
    warmups,
)
from schedlang.pipeline.schedules.chain import Chain
from schedlang.pipeline.schedules.fill import filled
from schedlang.pipeline.schedules.registry import Order, OrderError, Size
from schedlang.pipeline.schedules.repetend import repetends
from schedlang.pipeline.timeline import Kind, Timeline, check, peak, timing

EFFORT = 150_000  # operations that the candidates together may have
OVERHEAD = 300  # that a candidate counts for besides its own
WIDEST = 64  # beam of the search for repetends


class Best:
    """The best timeline so far among those that fit the memory, and what the others needed.

    `bound`: no order is faster, so that the search may stop.
    """

    found: Timeline | None = None
    time: Number | None = None
    least: Number | None = None  # the smallest peak of all candidates

    def __init__(self, size: Size, bound: Number) -> None:
        self.size, self.bound, self.left = size, bound, EFFORT

    @property
    def proven(self) -> bool:
        """Whether nothing is faster."""
        return self.time is not None and self.time <= self.bound

    @property
    def done(self) -> bool:
        """Whether nothing better can or may be found."""
        return self.left < 0 or self.proven

    def offer(self, t: Timeline | None) -> None:
        """Take a candidate if it fits and is faster than what is there."""
        if t is None:
            return
        self.left -= len(t) + OVERHEAD
        held = max(peak(t, self.size.cost))
        self.least = held if self.least is None else min(self.least, held)
        if self.size.memory is not None and held > self.size.memory:
            return
        times = timing(t, self.size.cost)
        time: Number = times.makespan if self.size.barrier else times.rank_span
        if self.time is None or time < self.time:
            self.found, self.time = t, time

    def answer(self) -> Timeline:
        """The best; raises OrderError with the smallest memory that would do."""
        if self.found is None:
            hundredths = -(-Fraction(self.least or 1).limit_denominator(10**6) * 100 // 1)
            raise OrderError(
                f"no order of {self.size.ranks} ranks fits a memory of "
                f"{float(self.size.memory or 0):g} microbatches of a rank's share",
                f"memory={hundredths / 100:g}",
            )
        check(self.found)
        return self.found


class _Search:
    """One search: its chains of stages, and the best order so far."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.chains = list(chains_of(size))
        self.best = Best(size, min(bound_of(chain, size) for chain in self.chains))

    def offer(self, t: Timeline | None) -> None:
        """Offer a candidate as it is, and with its weight gradients put off into its gaps."""
        self.best.offer(t)
        if t is None or (t.kind > Kind.W).any():
            return
        for chain in self.chains:
            if len(chain.times) == 3 and chain.homes == tuple(t.stage_rank.tolist()):
                self._fill(chain, t)

    def _fill(self, chain: Chain, t: Timeline) -> None:
        for whole_gaps in (True, False):
            if not self.best.done:
                self.best.offer(filled(chain, t, self.size.memory, whole_gaps=whole_gaps))

    def simple(self, known: tuple[Order, ...]) -> None:
        """Known orders, and list schedules; one that needs the least memory is always there."""
        for t in warmups(self.size):
            self.offer(t)
        for one in known:
            for t in named(one, self.size) if not self.best.proven else ():
                self.offer(t)
        for chain in self.chains:
            if not self.best.proven:
                self.best.offer(chain.listed(self.size.micro, oldest(self.size), in_flight=1))
        for chain in self.chains:
            for made in greedy(chain, self.size):
                if self.best.done:
                    return
                self.offer(made)

    def patterns(self, chain: Chain, effort: int) -> None:
        """What follows from repetends, of the shortest period first."""
        size, stop = self.size, self.best.left - effort
        small, tick = in_ticks(chain)
        width = min(WIDEST, max(2, 4096 // chain.stages**2))
        limit = None if size.memory is None else float(size.memory)
        seen: set[tuple[tuple[int, ...], ...]] = set()
        for period in periods(small):
            if self.best.time is not None and (size.micro - 1) * period * tick >= self.best.time:
                return
            for pattern in repetends(small, period, limit, width):
                if self.best.done or self.best.left <= stop:
                    return
                rows = pattern.rows(chain, size.micro)
                key = tuple(tuple(row) for row in rows)
                if key not in seen:
                    seen.add(key)
                    self.offer(chain.timeline(rows, size.micro))
                    self.best.offer(chain.listed(size.micro, pattern.start, limit=size.memory))


def searched(size: Size, known: tuple[Order, ...]) -> Timeline:
    """The fastest order that holds no more than `size.memory` activations on any rank.

    Compared are the `known` orders of these sizes, list schedules with whole and with split
    backwards, and repeating patterns after Tessel with warm-ups and cool-downs by list scheduling,
    over stages in a loop and in a zig-zag. By makespan; without `size.barrier` by rank span. Orders
    that park activations on a partner (BPipe) are among them: what is parked counts where it lies,
    and the moves cost what `cost.evict` and `cost.load` say. Left out are orders that keep the
    weights twice, update inside the step, or compute forwards again. The same sizes give the same
    order; the effort is bounded, whatever the sizes. Raises OrderError, with the smallest memory
    that works, if nothing fits.
    """
    search = _Search(size)
    search.simple(known)
    for chain in search.chains:
        search.patterns(chain, search.best.left // 2)
    return search.best.answer()


def search(known: tuple[Order, ...]) -> Order:
    """The order `search`, which compares what it finds with the `known` ones."""

    @lru_cache(maxsize=16)
    def remembered(size: Size) -> Timeline:
        return searched(size, known)

    def make(size: Size) -> Timeline:
        """The best of all orders that fit, of list schedules and of repeating patterns."""
        try:
            hash(size)
        except TypeError:  # costs that are lists
            return searched(size, known)
        return remembered(size)

    return Order(
        "Search",
        "heuristics of Qi et al. 2023 (2401.10241); repetends, Lin et al., Tessel, 2024",
        make,
        chunks=None,
        searched=True,
    )
