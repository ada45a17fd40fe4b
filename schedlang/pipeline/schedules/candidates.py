"""What a search of orders compares: known orders, list schedules, and the periods of patterns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from math import gcd

import numpy as np

from schedlang.pipeline.cost import Number
from schedlang.pipeline.schedules.chain import Chain, F, I, W
from schedlang.pipeline.schedules.lay import lay, merge
from schedlang.pipeline.schedules.registry import Order, Size
from schedlang.pipeline.schedules.wave import home
from schedlang.pipeline.timeline import Kind, Timeline
from schedlang.pipeline.timeline.simulation import weights

FINEST = 120  # ticks of the longest rank in a period, where costs do not need fewer


def named(one: Order, size: Size) -> Iterator[Timeline]:
    """A known order at these sizes, as prescribed and under the limit, where it has them."""
    plain = one.replicas == 1 and not one.relaxed and not one.sliced
    fits = one.chunks is None or size.chunks in one.chunks
    fits = fits and not (one.chunks is None and size.chunks < one.default_chunks)
    if not plain or not fits:
        return
    limits = {None, size.memory}
    for limit in sorted(limits, key=lambda limit: limit is not None):
        asked = replace(size, memory=limit)
        if one.problem(asked) is None:
            t = one.make(asked)
            if not _recomputes(t):  # costs time that the limit does not ask for
                yield t


def _recomputes(t: Timeline) -> bool:
    return bool((t.kind == Kind.RECOMPUTE).any())


def chains_of(size: Size) -> Iterator[Chain]:
    """The stages in a loop and in a zig-zag, with split and with whole backwards, in units."""
    stages, cost = size.ranks * size.chunks, size.cost
    placements = {
        tuple(stage % size.ranks for stage in range(stages)),
        tuple(home(stage, size.ranks) for stage in range(stages)),
    }
    one = [Fraction(1, size.chunks)] * stages
    takes = one if cost.shares is None else weights(cost.shares, stages, "stages") / size.chunks
    given = cost.shares if cost.held is None else cost.held
    holds = one if given is None else weights(given, stages, "stages") / size.chunks
    split = (cost.f, cost.i, cost.w), (1, cost.kept - 1, -cost.kept)
    whole = (cost.f, cost.i + cost.w), (1, -1)
    for homes in sorted(placements):
        for times, gains in (split, whole):
            yield Chain(
                size.ranks,
                homes,
                tuple(tuple(time * part for part in takes) for time in times),
                tuple(tuple(gain * part for part in holds) for gain in gains),
                cost.comm,
            )


def warmups(size: Size) -> Iterator[Timeline]:
    """1F1B with as much of one or two warm-ups as there is memory for; for one stage per rank."""
    if size.chunks > 1:
        return
    room = size.micro if size.memory is None else min(size.micro, int(size.memory))
    for times in (1, 2):
        rows = []
        for rank in range(size.ranks if room else 0):
            units = rank * size.micro + np.arange(size.micro)
            rows.append(merge(units, units, min(times * (size.ranks - 1 - rank), room - 1)))
        if rows:
            yield lay([kinds for kinds, _ in rows], [units for _, units in rows], size.micro)


def greedy(chain: Chain, size: Size) -> Iterator[Timeline | None]:
    """List schedules by several urgencies and numbers of microbatches in flight."""
    most = size.micro if size.memory is None else min(size.micro, int(size.memory))
    if size.chunks == 1 and size.memory is not None:
        flights: list[int | None] = [None, most]
    else:
        p = size.ranks
        flights = list(sorted({min(most, n) for n in (p, p + p // 2, 2 * p, most)}))
    for urgency in (oldest(size), _deepest(size), _level(size)):
        for flight in flights:
            if flight is None or flight >= 1:
                yield chain.listed(size.micro, urgency, in_flight=flight, limit=size.memory)


def oldest(size: Size) -> Callable[[int, int, int], Number]:
    """Backwards first, then forwards, weight gradients when nothing else is there; oldest first."""
    turn = {I: 0, F: size.micro, W: 2 * size.micro}
    return lambda kind, stage, microbatch: turn[kind] + microbatch


def _deepest(size: Size) -> Callable[[int, int, int], Number]:
    """The same, but of the forwards the one that has come farthest."""
    stages = size.ranks * size.chunks
    turn = {I: 0, F: size.micro * (stages + 1), W: 2 * size.micro * (stages + 1)}
    return lambda kind, stage, microbatch: (
        turn[kind] + microbatch + size.micro * (stages - stage if kind == F else 0)
    )


def _level(size: Size) -> Callable[[int, int, int], Number]:
    """The oldest microbatch first, whatever there is to do for it."""
    return lambda kind, stage, microbatch: 3 * microbatch + (I, F, W).index(kind)


def in_ticks(chain: Chain) -> tuple[Chain, Fraction]:
    """The chain in whole ticks, and what a tick is: rounded where costs are finer than FINEST."""
    times = [[Fraction(time) for time in row] for row in chain.times]
    longest = max(
        sum(row[s] for row in times for s, home in enumerate(chain.homes) if home == rank)
        for rank in range(chain.ranks)
    )
    whole = 1
    for number in (*(time for row in times for time in row), Fraction(chain.comm)):
        whole = whole * number.denominator // gcd(whole, number.denominator)
    scale = Fraction(whole) if longest * whole <= FINEST else Fraction(FINEST) / longest
    rounded = tuple(tuple(max(round(t * scale), int(t > 0)) for t in row) for row in times)
    comm = -(-Fraction(chain.comm) * scale // 1)
    return replace(chain, times=rounded, comm=int(comm)), 1 / scale


def periods(chain: Chain) -> Iterator[int]:
    """Periods to try: from the work of the busiest rank to one microbatch at a time."""
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


def bound_of(chain: Chain, size: Size) -> Number:
    """No order of this chain is faster: the work of a rank, after the forwards that lead to it."""
    bounds: list[Number] = []
    for rank in set(chain.homes):
        own = [stage for stage, home in enumerate(chain.homes) if home == rank]
        work = size.micro * sum(row[stage] for row in chain.times for stage in own)
        lead: Number = 0
        for stage in range(own[0] if size.barrier else 0):
            lead += chain.times[F][stage] + chain.comm * (
                chain.homes[stage + 1] != chain.homes[stage]
            )
        bounds.append(lead + work)
    return max(bounds)
