"""Frames in one piece: no depth of calls at which each one more maps memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import pytest

from schedlang.runtime.launch.frames import call_in_one_piece

_CALLS = 200


def _leaf(a: int, b: int) -> int:
    return a + b


def _faults(depth: int) -> int:
    """Pages that the kernel maps for calls at a depth."""
    if depth:
        return _faults(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for k in range(_CALLS):
        _leaf(k, k)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _most(within: Callable[..., int]) -> int:
    return max(within(_faults, depth) for depth in range(400))


@pytest.mark.skipif(
    sys.implementation.name != "cpython" or sys.platform != "linux", reason="of CPython's frames"
)
def test_no_depth_of_calls_maps_memory_for_each() -> None:
    """There is such a depth without the wide frame, so it is why there is none with it."""
    assert _most(lambda call, depth: call(depth)) >= _CALLS
    assert _most(call_in_one_piece) < _CALLS / 4


def test_it_is_a_call_and_no_more() -> None:
    """Arguments, results and errors pass."""
    assert call_in_one_piece(sorted, [2, 3, 1], reverse=True) == [3, 2, 1]
    with pytest.raises(ZeroDivisionError):
        call_in_one_piece(lambda: 1 // 0)
