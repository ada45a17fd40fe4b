"""Search of an order under a memory limit: the best candidate that fits, proven before it is
used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from schedlang.pipeline.cost import Number
from schedlang.pipeline.schedules.list_scheduling import F, I, StageChain, W, fill_gaps
from schedlang.pipeline.schedules.looped import zigzag_rank
from schedlang.pipeline.schedules.registry import Order, OrderError, Size, one_f_one_b
from schedlang.pipeline.timeline.memory import peak_activations
from schedlang.pipeline.timeline.proof import check_timeline
from schedlang.pipeline.timeline.simulation import relative_weights, simulate_timeline
from schedlang.pipeline.timeline.table import Kind, Timeline

# -- repeating patterns ----------------------------------------------------------------------------


MAX_STARTS = 4  # starts that are tried for each operation


@dataclass(frozen=True)
class Repetend:
    """Starts [kind][stage] of one microbatch's operations, and the period, in ticks.

    A repetend (Lin et al., Tessel, 2024) is the part of an order that repeats in the steady state.
    It is found here as a modulo schedule: every operation of one microbatch gets a start, such that
    on each rank no two of them overlap modulo the period; microbatch n starts n periods later.
    Warm-up and cool-down are its remainders at both ends.
    """

    period: int
    starts: tuple[tuple[int, ...], ...]

    def start(self, kind: int, stage: int, microbatch: int) -> int:
        """Return the start of an operation, if every microbatch follows one period later."""
        return self.starts[kind][stage] + microbatch * self.period

    def rows(self, chain: StageChain, micro: int) -> list[list[int]]:
        """Return the jobs of every rank, in the order of their starts."""
        rows: list[list[tuple[int, int]]] = [[] for _ in range(chain.ranks)]
        for kind in range(len(self.starts)):
            for stage, rank in enumerate(chain.homes):
                first = (kind * chain.stages + stage) * micro
                for microbatch in range(micro):
                    when = self.start(kind, stage, microbatch)
                    rows[rank].append((when, first + microbatch))
        return [[job for _, job in sorted(row)] for row in rows]


class _Draft(NamedTuple):
    """Some operations placed: per rank (phase, length) of each, and the starts, in placing order.

    `end` is when the last one's result arrives; `held` the activations times the time for which
    each rank holds them, per period.
    """

    end: int
    held: tuple[float, ...]
    starts: tuple[tuple[int, int, int], ...]  # (kind, stage, start)
    taken: tuple[tuple[tuple[int, int], ...], ...]


def find_repetends(
    chain: StageChain, period: int, limit: float | None, width: int
) -> list[Repetend]:
    """Find patterns with this period, the shortest microbatch first, by beam search of this
    `width`.

    Times are whole numbers. Patterns that on average hold more than `limit` are left out.
    """
    operations = [(F, stage) for stage in range(chain.stages)]
    operations += [(I, stage) for stage in reversed(range(chain.stages))]
    empty: tuple[tuple[int, int], ...] = ()
    beam = [_Draft(0, (0.0,) * chain.ranks, (), (empty,) * chain.ranks)]
    for kind, stage in operations:
        grown = [new for draft in beam for new in _place(chain, period, draft, kind, stage)]
        if limit is not None:
            grown = [new for new in grown if max(new.held) <= limit * period]
        grown.sort(key=lambda draft: (draft.end, max(draft.held), draft.starts))
        beam = grown[:width]
    return [_finished(chain, period, draft) for draft in beam]


def _place(
    chain: StageChain, period: int, draft: _Draft, kind: int, stage: int
) -> Iterator[_Draft]:
    """Yield the draft with one operation more, and with the W of its rank where that was the
    last."""
    rank = chain.homes[stage]
    ready = draft.end
    before = stage - 1 if kind == F else stage + 1
    if 0 <= before < chain.stages and chain.homes[before] != rank:
        ready += int(chain.comm)
    length = int(chain.times[kind][stage])
    for start in _gaps(draft.taken[rank], ready, length, period)[:MAX_STARTS]:
        taken = list(draft.taken)
        taken[rank] = (*taken[rank], (start % period, length))
        starts = (*draft.starts, (kind, stage, start))
        end = start + length
        held = list(draft.held)
        if kind == I:
            first = next(begun for k, s, begun in draft.starts if (k, s) == (F, stage))
            held[rank] += float(chain.gains[F][stage]) * (start - first)
        new = _Draft(end, tuple(held), starts, tuple(taken))
        if kind == I and len(chain.times) == 3 and stage == chain.homes.index(rank):
            late = _weights(chain, period, new, rank)
            if late is not None:
                yield late
        else:
            yield new


def _weights(chain: StageChain, period: int, draft: _Draft, rank: int) -> _Draft | None:
    """Add the weight gradients of a rank, each as early as it fits; None: one does not."""
    starts, held, taken = list(draft.starts), list(draft.held), list(draft.taken)
    for kind, stage, start in draft.starts:
        if kind != I or chain.homes[stage] != rank:
            continue
        length = int(chain.times[W][stage])
        ready = start + int(chain.times[I][stage])
        gaps = _gaps(taken[rank], ready, length, period)
        if not gaps:
            return None
        starts.append((W, stage, gaps[0]))
        taken[rank] = (*taken[rank], (gaps[0] % period, length))
        held[rank] -= float(chain.gains[W][stage]) * (gaps[0] - start)
    return _Draft(draft.end, tuple(held), tuple(starts), tuple(taken))


def _gaps(taken: tuple[tuple[int, int], ...], ready: int, length: int, period: int) -> list[int]:
    """List starts from `ready` on, within a period, at which an operation of this length fits.

    Candidates are `ready` itself, right after another operation, and right before one.
    """
    starts = {ready}
    for phase, other_length in taken:
        starts.add(ready + (phase + other_length - ready) % period)
        starts.add(ready + (phase - length - ready) % period)
    return sorted(
        start
        for start in starts
        if length <= period
        and all(
            (start - phase) % period >= other_length and (phase - start) % period >= length
            for phase, other_length in taken
            if other_length and length
        )
    )


def _finished(chain: StageChain, period: int, draft: _Draft) -> Repetend:
    starts = [[0] * chain.stages for _ in chain.times]
    for kind, stage, start in draft.starts:
        starts[kind][stage] = start
    return Repetend(period, tuple(tuple(row) for row in starts))


MAX_TICKS = 120  # maximal ticks of the longest rank in a period: finer costs are rounded


def known_timelines(order: Order, size: Size) -> Iterator[Timeline]:
    """Yield a known order at these sizes, as prescribed and under the limit, where it has them."""
    is_plain = order.replicas == 1 and not order.relaxed and not order.sliced
    allowed = order.chunks is None or size.chunks in order.chunks
    allowed = allowed and not (order.chunks is None and size.chunks < order.default_chunks)
    if not is_plain or not allowed:
        return
    limits = {None, size.memory}
    for limit in sorted(limits, key=lambda limit: limit is not None):
        limited = replace(size, memory=limit)
        if order.problem(limited) is None:
            t = order.make(limited)
            if not (t.kind == Kind.RECOMPUTE).any():  # recomputes whatever the limit
                yield t


def stage_chains(size: Size) -> Iterator[StageChain]:
    """Yield the stages in a loop and in a zig-zag, with split and with full backwards, in units."""
    stages, cost = size.ranks * size.chunks, size.cost
    placements = {
        tuple(stage % size.ranks for stage in range(stages)),
        tuple(zigzag_rank(stage, size.ranks) for stage in range(stages)),
    }
    equal = [Fraction(1, size.chunks)] * stages
    parts = (
        equal
        if cost.shares is None
        else relative_weights(cost.shares, stages, "stages") / size.chunks
    )
    shares = cost.shares if cost.held is None else cost.held
    kept = equal if shares is None else relative_weights(shares, stages, "stages") / size.chunks
    split = (cost.f, cost.i, cost.w), (1, cost.kept - 1, -cost.kept)
    full = (cost.f, cost.i + cost.w), (1, -1)
    for homes in sorted(placements):
        for times, gains in (split, full):
            yield StageChain(
                size.ranks,
                homes,
                tuple(tuple(time * part for part in parts) for time in times),
                tuple(tuple(gain * part for part in kept) for gain in gains),
                cost.comm,
            )


def warmup_timelines(size: Size) -> Iterator[Timeline]:
    """Yield 1F1B with as much of one or two warm-ups as memory allows; for one stage per rank."""
    if size.chunks > 1:
        return
    room = size.micro if size.memory is None else min(size.micro, int(size.memory))
    for times in (1, 2) if room else ():
        warmups = [min(times * (size.ranks - 1 - rank), room - 1) for rank in range(size.ranks)]
        yield one_f_one_b(size, warmups.__getitem__)


def list_schedules(chain: StageChain, size: Size) -> Iterator[Timeline | None]:
    """Yield list schedules by several urgencies and numbers of microbatches in flight."""
    max_flight = size.micro if size.memory is None else min(size.micro, int(size.memory))
    if size.chunks == 1 and size.memory is not None:
        flights: list[int | None] = [None, max_flight]
    else:
        p = size.ranks
        flights = list(sorted({min(max_flight, n) for n in (p, p + p // 2, 2 * p, max_flight)}))
    for urgency in (oldest_first(size), _deepest(size), _level(size)):
        for flight in flights:
            if flight is None or flight >= 1:
                yield chain.list_schedule(size.micro, urgency, in_flight=flight, limit=size.memory)


def oldest_first(size: Size) -> Callable[[int, int, int], Number]:
    """Backwards first, then forwards, weight gradients when nothing else is ready; oldest first."""
    priority = {I: 0, F: size.micro, W: 2 * size.micro}
    return lambda kind, stage, microbatch: priority[kind] + microbatch


def _deepest(size: Size) -> Callable[[int, int, int], Number]:
    """Order as in `oldest_first`, but of the forwards the one that has come farthest."""
    stages = size.ranks * size.chunks
    priority = {I: 0, F: size.micro * (stages + 1), W: 2 * size.micro * (stages + 1)}
    return lambda kind, stage, microbatch: (
        priority[kind] + microbatch + size.micro * (stages - stage if kind == F else 0)
    )


def _level(size: Size) -> Callable[[int, int, int], Number]:
    """The oldest microbatch first, whatever its operation."""
    return lambda kind, stage, microbatch: 3 * microbatch + (I, F, W).index(kind)


def chain_in_ticks(chain: StageChain) -> tuple[StageChain, Fraction]:
    """Return the chain in whole ticks, and the length of a tick; finer costs than FINEST are
    rounded."""
    times = [[Fraction(time) for time in row] for row in chain.times]
    longest = max(
        sum(row[s] for row in times for s, owner in enumerate(chain.homes) if owner == rank)
        for rank in range(chain.ranks)
    )
    lcm = 1
    for number in (*(time for row in times for time in row), Fraction(chain.comm)):
        lcm = lcm * number.denominator // gcd(lcm, number.denominator)
    scale = Fraction(lcm) if longest * lcm <= MAX_TICKS else Fraction(MAX_TICKS) / longest
    rounded = tuple(tuple(max(round(t * scale), int(t > 0)) for t in row) for row in times)
    comm = -(-Fraction(chain.comm) * scale // 1)
    return replace(chain, times=rounded, comm=int(comm)), 1 / scale


def candidate_periods(chain: StageChain) -> Iterator[int]:
    """Yield periods to try: from the work of the busiest rank to one microbatch at a time."""
    work = [0] * chain.ranks
    for row in chain.times:
        for time, rank in zip(row, chain.homes):
            work[rank] += int(time)
    period, step = max(work), max(1, max(work) // 12)
    longest = sum(int(time) for row in chain.times for time in row)
    longest += 2 * chain.stages * int(chain.comm)
    while period < longest:
        yield period
        period += max(step, period // 8 if period >= 2 * max(work) else 0)
    yield longest


def lower_bound(chain: StageChain, size: Size) -> Number:
    """Return a lower bound for all orders of this chain: a rank's work after the forwards before
    it."""
    bounds: list[Number] = []
    for rank in set(chain.homes):
        own_stages = [stage for stage, owner in enumerate(chain.homes) if owner == rank]
        work = size.micro * sum(row[stage] for row in chain.times for stage in own_stages)
        lead: Number = 0
        for stage in range(own_stages[0] if size.barrier else 0):
            lead += chain.times[F][stage] + chain.comm * (
                chain.homes[stage + 1] != chain.homes[stage]
            )
        bounds.append(lead + work)
    return max(bounds)


MAX_OPERATIONS = 150_000  # maximal operations of all candidates together
CANDIDATE_OVERHEAD = 300  # operations that each candidate counts additionally
MAX_BEAM = 64  # maximal beam of the search for repetends


class BestTimeline:
    """The best timeline so far among candidates that fit the memory, and the smallest peak of all.

    `bound`: no order is faster, so that the search may stop there.
    """

    found: Timeline | None = None
    time: Number | None = None
    least: Number | None = None  # the smallest peak of all candidates

    def __init__(self, size: Size, bound: Number) -> None:
        self.size, self.bound, self.left = size, bound, MAX_OPERATIONS

    @property
    def proven(self) -> bool:
        """Whether no order is faster."""
        return self.time is not None and self.time <= self.bound

    @property
    def done(self) -> bool:
        """Whether the search ends: nothing is faster, or its effort is spent."""
        return self.left < 0 or self.proven

    def offer(self, t: Timeline | None) -> None:
        """Accept a candidate if it fits and is faster than the best."""
        if t is None:
            return
        self.left -= len(t) + CANDIDATE_OVERHEAD
        peak = max(peak_activations(t, self.size.cost))
        self.least = peak if self.least is None else min(self.least, peak)
        if self.size.memory is not None and peak > self.size.memory:
            return
        times = simulate_timeline(t, self.size.cost)
        time: Number = times.makespan if self.size.barrier else times.rank_span
        if self.time is None or time < self.time:
            self.found, self.time = t, time

    def answer(self) -> Timeline:
        """Return the best; raises OrderError with the smallest memory that would be enough."""
        if self.found is None:
            hundredths = -(-Fraction(self.least or 1).limit_denominator(10**6) * 100 // 1)
            raise OrderError(
                f"no order of {self.size.ranks} ranks fits a memory of "
                f"{float(self.size.memory or 0):g} microbatches of a rank's share",
                f"memory={hundredths / 100:g}",
            )
        check_timeline(self.found)
        return self.found


class _Search:
    """One search: its chains of stages, and the best order so far."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.chains = list(stage_chains(size))
        self.best = BestTimeline(size, min(lower_bound(chain, size) for chain in self.chains))

    def offer(self, t: Timeline | None) -> None:
        """Offer a candidate as it is, and with its weight gradients moved into its gaps."""
        self.best.offer(t)
        if t is None or (t.kind > Kind.W).any():
            return
        for chain in self.chains:
            if len(chain.times) == 3 and chain.homes == tuple(t.stage_rank.tolist()):
                self._fill(chain, t)

    def _fill(self, chain: StageChain, t: Timeline) -> None:
        for whole_gaps in (True, False):
            if not self.best.done:
                self.best.offer(fill_gaps(chain, t, self.size.memory, whole_gaps=whole_gaps))

    def simple(self, orders: tuple[Order, ...]) -> None:
        """Offer known orders, and list schedules; one with the smallest memory is always among
        them."""
        for t in warmup_timelines(self.size):
            self.offer(t)
        for order in orders:
            for t in known_timelines(order, self.size) if not self.best.proven else ():
                self.offer(t)
        for chain in self.chains:
            if not self.best.proven:
                self.best.offer(
                    chain.list_schedule(self.size.micro, oldest_first(self.size), in_flight=1)
                )
        for chain in self.chains:
            for timeline in list_schedules(chain, self.size):
                if self.best.done:
                    return
                self.offer(timeline)

    def patterns(self, chain: StageChain, effort: int) -> None:
        """Offer orders made of repetends, the shortest period first."""
        size, stop = self.size, self.best.left - effort
        small, tick = chain_in_ticks(chain)
        width = min(MAX_BEAM, max(2, 4096 // chain.stages**2))
        limit = None if size.memory is None else float(size.memory)
        seen: set[tuple[tuple[int, ...], ...]] = set()
        for period in candidate_periods(small):
            if self.best.time is not None and (size.micro - 1) * period * tick >= self.best.time:
                return
            for pattern in find_repetends(small, period, limit, width):
                if self.best.done or self.best.left <= stop:
                    return
                rows = pattern.rows(chain, size.micro)
                key = tuple(tuple(row) for row in rows)
                if key not in seen:
                    seen.add(key)
                    self.offer(chain.timeline(rows, size.micro))
                    self.best.offer(
                        chain.list_schedule(size.micro, pattern.start, limit=size.memory)
                    )


def search_order(size: Size, orders: tuple[Order, ...]) -> Timeline:
    """Find the fastest order that holds at most `size.memory` activations on any rank.

    Candidates are the given `orders` at these sizes, list schedules with full and with split
    backwards, and repeating patterns after Tessel with warm-ups and cool-downs by list scheduling,
    over stages in a loop and in a zig-zag. The criterion is the makespan; without `size.barrier`
    the rank span. Orders that move activations to a partner (BPipe) are candidates: activations
    count on the rank that holds them, and moves cost `cost.evict` and `cost.load`. Left out are
    orders that keep the weights twice, update inside the step, or recompute forwards. The same
    sizes give the same order; the effort is bounded for all sizes. Raises OrderError, with the
    smallest memory that works, if nothing fits.
    """
    search = _Search(size)
    search.simple(orders)
    for chain in search.chains:
        search.patterns(chain, search.best.left // 2)
    return search.best.answer()


def search_as_order(orders: tuple[Order, ...]) -> Order:
    """Return the order `search`, which compares its candidates with the given `orders`."""

    @lru_cache(maxsize=16)
    def remembered(size: Size) -> Timeline:
        return search_order(size, orders)

    def make(size: Size) -> Timeline:
        """The best of all orders, list schedules and repeating patterns that fit in memory."""
        try:
            hash(size)
        except TypeError:  # costs that are lists
            return search_order(size, orders)
        return remembered(size)

    return Order(
        "Search",
        "heuristics of Qi et al. 2023 (2401.10241); repetends, Lin et al., Tessel, 2024",
        make,
        chunks=None,
        searched=True,
    )
