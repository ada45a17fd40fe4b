"""Lengths of slices by two papers: of equal work, or by TeraPipe's search; no row asks for them."""

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
    took, cells = _cells(length, 1, time, step)
    bounds = sorted({took(a, b) for b in range(1, cells + 1) for a in range(b)})
    floor = _least_sum(cells, bounds[-1], took)
    best = (floor[0] + (ranks - 1) * _longest(floor[1], took), floor[1]) if floor else None
    assert best is not None and floor is not None, "the whole sequence is a slice too"
    for bound in bounds:
        if floor[0] + (ranks - 1) * bound >= best[0]:
            break
        found = _least_sum(cells, bound, took)
        if found is not None:
            best = min(best, (found[0] + (ranks - 1) * bound, found[1]))
    return tuple(cell * step for cell in best[1])


def equal_lengths(length: int, slices: int, flops: Time, step: int = 1) -> tuple[int, ...]:
    """Slices of work as equal as can be: of the least largest one, and then the largest least one.

    Sun et al., Seq1F1B, 2024 (2406.03488), §3.3: attention makes late tokens dearer, so later
    slices are shorter. `flops(length, context)` is the work of `length` tokens after `context`
    others. Raises OrderError where there are more slices than steps, or `step` does not divide the
    length.
    """
    took, cells = _cells(length, slices, flops, step)
    largest = _split(cells, slices, took, lambda before, one: max(before, one), None)[0]
    _, lengths = _split(cells, slices, took, lambda before, one: max(before, -one), largest)
    return tuple(cell * step for cell in lengths)


def _cells(length: int, slices: int, time: Time, step: int) -> tuple[Time, int]:
    """The time from cell to cell, a cell being `step` tokens, and how many there are."""
    if min(length, slices, step) < 1 or length % step:
        raise OrderError(
            f"{length} tokens do not lie in steps of {step}", f"step={gcd(length, step) or 1}"
        )
    if slices > length // step:
        most = length // step
        raise OrderError(f"{most} steps do not make {slices} slices", f"slices={most}")
    return cache(lambda first, last: time((last - first) * step, first * step)), length // step


def _least_sum(cells: int, bound: Number, took: Time) -> tuple[Number, tuple[int, ...]] | None:
    """The least sum of times of slices that take no longer than `bound`, and their lengths."""
    best: list[tuple[Number, int] | None] = [(0, 0)]
    for last in range(1, cells + 1):
        found: tuple[Number, int] | None = None
        for first in reversed(range(last)):
            before, one = best[first], took(first, last)
            if before is not None and one <= bound:
                new = before[0] + one, first
                found = new if found is None else min(found, new)
        best.append(found)
    end = best[cells]
    return None if end is None else (end[0], _lengths([row and row[1] for row in best]))


def _longest(lengths: tuple[int, ...], took: Time) -> Number:
    ends = list(accumulate(lengths))
    return max(took(end - size, end) for end, size in zip(ends, lengths))


def _lengths(before: list[int | None]) -> tuple[int, ...]:
    """The slices, where `before[cell]` is where the slice that ends there begins."""
    found, last = list[int](), len(before) - 1
    while last:
        first = before[last]
        assert first is not None
        found.append(last - first)
        last = first
    return tuple(reversed(found))


def _split(
    cells: int,
    slices: int,
    took: Time,
    join: Callable[[Number, Number], Number],
    most: Number | None,
) -> tuple[Number, tuple[int, ...]]:
    """The least value of exactly so many slices, none above `most`, and their lengths.

    The value is that of `join` over the slices, which is of the kind of a maximum.
    """
    rows: list[dict[int, tuple[Number, tuple[int, ...]]]] = [{0: (-inf, ())}]
    for _ in range(slices):
        row: dict[int, tuple[Number, tuple[int, ...]]] = {}
        for first, (value, lengths) in rows[-1].items():
            for last in range(first + 1, cells + 1):
                one = took(first, last)
                if most is not None and one > most:
                    continue
                new = join(value, one), (*lengths, last - first)
                row[last] = min(row.get(last, new), new)
        rows.append(row)
    return rows[-1][cells]
