"""The checksum of stored boxes: the same however bytes are cut, another for other bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlang.runtime.saving.checksum import Checksum, checksum

DATA = random.Random(0).randbytes(5000)


@given(st.lists(st.integers(0, len(DATA))), st.integers(0, len(DATA)))
def test_however_it_is_cut(cuts: list[int], size: int) -> None:
    """In one piece or in many, also in pieces of nothing."""
    data, made = DATA[:size], Checksum()
    ends = [0, *sorted(min(cut, size) for cut in cuts), size]
    for low, high in zip(ends, ends[1:]):
        made.add(memoryview(data)[low:high])
    assert made.value == checksum(data)


@given(st.integers(0, 8 * len(DATA) - 1))
def test_each_flipped_bit(at: int) -> None:
    """Wherever it is."""
    data = bytearray(DATA)
    data[at // 8] ^= 1 << at % 8
    assert checksum(bytes(data)) != checksum(DATA)


@pytest.mark.parametrize("low, high", [(0, 512), (512, 1024), (4608, 5000), (100, 612)])
def test_what_is_zeroed_moved_or_cut_off(low: int, high: int) -> None:
    """Of a sector, of the end, and across two."""
    others = [
        DATA[:low] + bytes(high - low) + DATA[high:], DATA[:low] + DATA[high:],
        DATA[low:high] + DATA[:low] + DATA[high:], DATA[:low],
    ]  # fmt: skip
    for other in others:
        assert other == DATA or checksum(other) != checksum(DATA)
