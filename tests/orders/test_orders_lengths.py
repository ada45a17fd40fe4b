"""Lengths of slices, against all ways to cut a short sequence."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

import pytest

from schedlang.pipeline.schedules import OrderError
from tests.slice_lengths import Time, equal_lengths, terapipe_lengths

# an overhead, a linear part and attention; attention alone; a device that short slices leave idle;
# length alone; a dear first slice, which leaves the others a choice
TIMES: list[Time] = [
    lambda length, context: 5 + 3 * length + length * (context + Fraction(length, 2)),
    lambda length, context: length * (2 * context + length),
    lambda length, context: max(8, length) + length * context // 4,
    lambda length, context: length,
    lambda length, context: length if context else 10 + length,
]


def _cuts(length: int, slices: int | None = None) -> Iterator[tuple[int, ...]]:
    for count in range(1, length + 1) if slices is None else (slices,):
        for inner in combinations(range(1, length), count - 1):
            yield tuple(b - a for a, b in pairwise((0, *inner, length)))


def _each(lengths: tuple[int, ...], time: Time) -> list[Fraction | float]:
    return [time(n, end - n) for n, end in zip(lengths, accumulate(lengths))]


def _pipeline(lengths: tuple[int, ...], ranks: int, time: Time) -> Fraction | float:
    each = _each(lengths, time)
    return sum(each) + (ranks - 1) * max(each)


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 9])
def test_terapipe(time: Time, ranks: int) -> None:
    """No way to cut the sequence makes a shorter pipeline."""
    for length in (1, 2, 7, 12):
        found = terapipe_lengths(length, ranks, time)
        assert sum(found) == length and min(found) > 0
        least = min(_pipeline(cut, ranks, time) for cut in _cuts(length))
        assert _pipeline(found, ranks, time) == least


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("slices", [1, 2, 3, 5])
def test_equal(time: Time, slices: int) -> None:
    """No way to cut has a smaller largest slice, and of those none a larger least one."""
    for length in (5, 8, 12):
        found = _each(equal_lengths(length, slices, time), time)
        each = [_each(cut, time) for cut in _cuts(length, slices)]
        largest = min(max(one) for one in each)
        assert max(found) == largest and len(found) == slices
        assert min(found) == max(min(one) for one in each if max(one) == largest)


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
