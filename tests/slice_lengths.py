"""Lengths of slices by two papers: equal work, or TeraPipe's search; no primitive uses them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from math import gcd, inf

from schedlang.pipeline.cost import Number
from schedlang.pipeline.schedules import OrderError

Time = Callable[[int, int], Number]  # of (length, context): a slice after so many tokens


def terapipe_lengths(length: int, ranks: int, time: Time, step: int = 1) -> tuple[int, ...]:
    """The slices with the shortest pipeline: the sum of their times + (p - 1) times the longest.

    The dynamic programme of Li et al., TeraPipe, 2021 (2102.07988), §3.3: for each time that the
    longest slice may have, in ascending order, the least sum of slices that take no longer. It
    stops where the bound, with the least sum of all, is no better. `time(length, context)` is one
    rank's time for `length` tokens after `context` others and grows with both; cuts fall on
    multiples of `step` tokens. Raises OrderError where `step` does not divide the length.
    """
    duration, cells = _cells(length, 1, time, step)
    bounds = sorted({duration(a, b) for b in range(1, cells + 1) for a in range(b)})
    floor = _least_sum(cells, bounds[-1], duration)
    best = (floor[0] + (ranks - 1) * _longest(floor[1], duration), floor[1]) if floor else None
    assert best is not None and floor is not None, "the whole sequence is a slice too"
    for bound in bounds:
        if floor[0] + (ranks - 1) * bound >= best[0]:
            break
        candidate = _least_sum(cells, bound, duration)
        if candidate is not None:
            best = min(best, (candidate[0] + (ranks - 1) * bound, candidate[1]))
    return tuple(cell * step for cell in best[1])


def equal_lengths(length: int, slices: int, flops: Time, step: int = 1) -> tuple[int, ...]:
    """Slices of nearly equal work: minimize the largest, then maximize the smallest.

    Sun et al., Seq1F1B, 2024 (2406.03488), §3.3: with attention, late tokens cost more, so later
    slices are shorter. `flops(length, context)` is the work of `length` tokens after `context`
    others. Raises OrderError where there are more slices than steps, or `step` does not divide the
    length.
    """
    duration, cells = _cells(length, slices, flops, step)
    largest = _split(
        cells, slices, duration, lambda total, slice_work: max(total, slice_work), None
    )[0]
    _, lengths = _split(
        cells, slices, duration, lambda total, slice_work: max(total, -slice_work), largest
    )
    return tuple(cell * step for cell in lengths)


def _cells(length: int, slices: int, time: Time, step: int) -> tuple[Time, int]:
    """The time function between cells of `step` tokens, and the number of cells."""
    if min(length, slices, step) < 1 or length % step:
        raise OrderError(
            f"{length} tokens do not lie in steps of {step}", f"step={gcd(length, step) or 1}"
        )
    if slices > length // step:
        steps = length // step
        raise OrderError(f"{steps} steps do not make {slices} slices", f"slices={steps}")
    return cache(lambda start, stop: time((stop - start) * step, start * step)), length // step


def _least_sum(cells: int, bound: Number, duration: Time) -> tuple[Number, tuple[int, ...]] | None:
    """The least sum of times of slices that take no longer than `bound`, and their lengths."""
    best: list[tuple[Number, int] | None] = [(0, 0)]
    for stop in range(1, cells + 1):
        shortest: tuple[Number, int] | None = None
        for start in reversed(range(stop)):
            previous, slice_time = best[start], duration(start, stop)
            if previous is not None and slice_time <= bound:
                candidate = previous[0] + slice_time, start
                shortest = candidate if shortest is None else min(shortest, candidate)
        best.append(shortest)
    end = best[cells]
    return None if end is None else (end[0], _lengths([row and row[1] for row in best]))


def _longest(lengths: tuple[int, ...], duration: Time) -> Number:
    ends = list(accumulate(lengths))
    return max(duration(end - size, end) for end, size in zip(ends, lengths))


def _lengths(starts: list[int | None]) -> tuple[int, ...]:
    """The slice lengths, from the start of the slice that ends at each cell."""
    lengths, stop = list[int](), len(starts) - 1
    while stop:
        start = starts[stop]
        assert start is not None
        lengths.append(stop - start)
        stop = start
    return tuple(reversed(lengths))


def _split(
    cells: int,
    slices: int,
    duration: Time,
    join: Callable[[Number, Number], Number],
    limit: Number | None,
) -> tuple[Number, tuple[int, ...]]:
    """The least value of exactly this number of slices, none above the limit, and their lengths.

    `join` combines the values of slices, as a maximum does.
    """
    rows: list[dict[int, tuple[Number, tuple[int, ...]]]] = [{0: (-inf, ())}]
    for _ in range(slices):
        row: dict[int, tuple[Number, tuple[int, ...]]] = {}
        for start, (value, lengths) in rows[-1].items():
            for stop in range(start + 1, cells + 1):
                slice_time = duration(start, stop)
                if limit is not None and slice_time > limit:
                    continue
                candidate = join(value, slice_time), (*lengths, stop - start)
                row[stop] = min(row.get(stop, candidate), candidate)
        rows.append(row)
    return rows[-1][cells]
