"""Lengths of slices, against all cuts of a short sequence."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

import pytest

from schedlang.pipeline.schedules import OrderError
from tests.slice_lengths import Time, equal_lengths, terapipe_lengths

# overhead, linear part and attention; attention only; a device that short slices do not fill;
# length only; an expensive first slice, which leaves several optimal cuts
TIMES: list[Time] = [
    lambda length, context: 5 + 3 * length + length * (context + Fraction(length, 2)),
    lambda length, context: length * (2 * context + length),
    lambda length, context: max(8, length) + length * context // 4,
    lambda length, context: length,
    lambda length, context: length if context else 10 + length,
]


def _all_cuts(length: int, slices: int | None = None) -> Iterator[tuple[int, ...]]:
    for count in range(1, length + 1) if slices is None else (slices,):
        for inner in combinations(range(1, length), count - 1):
            yield tuple(b - a for a, b in pairwise((0, *inner, length)))


def _slice_times(lengths: tuple[int, ...], time: Time) -> list[Fraction | float]:
    return [time(n, end - n) for n, end in zip(lengths, accumulate(lengths))]


def _pipeline_time(lengths: tuple[int, ...], ranks: int, time: Time) -> Fraction | float:
    times = _slice_times(lengths, time)
    return sum(times) + (ranks - 1) * max(times)


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 9])
def test_terapipe(time: Time, ranks: int) -> None:
    """No other cut of the sequence has a shorter pipeline."""
    for length in (1, 2, 7, 12):
        lengths = terapipe_lengths(length, ranks, time)
        assert sum(lengths) == length and min(lengths) > 0
        least_time = min(_pipeline_time(cut, ranks, time) for cut in _all_cuts(length))
        assert _pipeline_time(lengths, ranks, time) == least_time


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("slices", [1, 2, 3, 5])
def test_equal(time: Time, slices: int) -> None:
    """No other cut has a smaller largest slice, or with the same largest a larger smallest one."""
    for length in (5, 8, 12):
        times = _slice_times(equal_lengths(length, slices, time), time)
        times_by_cut = [_slice_times(cut, time) for cut in _all_cuts(length, slices)]
        largest = min(max(times_of_cut) for times_of_cut in times_by_cut)
        assert max(times) == largest and len(times) == slices
        assert min(times) == max(
            min(times_of_cut) for times_of_cut in times_by_cut if max(times_of_cut) == largest
        )


def test_steps() -> None:
    """Cuts fall on multiples of the step, and later slices of causal attention are shorter."""
    for lengths in (terapipe_lengths(96, 4, TIMES[0], 8), equal_lengths(96, 4, TIMES[1], 8)):
        assert sum(lengths) == 96 and all(n % 8 == 0 for n in lengths)
        assert list(lengths) == sorted(lengths, reverse=True) and len(lengths) > 1


def test_impossible_lengths() -> None:
    """Steps that do not divide, and more slices than steps, are refused with what is legal."""
    with pytest.raises(OrderError, match="step=4"):
        equal_lengths(100, 2, TIMES[3], 8)
    equal_lengths(100, 2, TIMES[3], 4)
    with pytest.raises(OrderError, match="slices=5"):
        equal_lengths(10, 6, TIMES[3], 2)
    assert equal_lengths(10, 5, TIMES[3], 2) == (2, 2, 2, 2, 2)
