"""Python frames in one chunk: at no call depth does each call map memory again."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import pytest

from schedlang.runtime.launch.frames import call_in_one_piece

CALLS = 200


def leaf(a: int, b: int) -> int:
    return a + b


def count_page_faults(depth: int) -> int:
    """Count the pages that the kernel maps for calls at a depth."""
    if depth:
        return count_page_faults(depth - 1)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for k in range(CALLS):
        leaf(k, k)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start


def max_page_faults(within: Callable[..., int]) -> int:
    return max(within(count_page_faults, depth) for depth in range(400))


@pytest.mark.skipif(
    sys.implementation.name != "cpython" or sys.platform != "linux", reason="of CPython's frames"
)
def test_no_depth_of_calls_maps_memory_for_each() -> None:
    """Without the wide frame such a depth exists; with it there is none."""
    assert max_page_faults(lambda call, depth: call(depth)) >= CALLS
    assert max_page_faults(call_in_one_piece) < CALLS / 4


def test_it_is_a_call_and_no_more() -> None:
    """Arguments, results and errors pass through."""
    assert call_in_one_piece(sorted, [2, 3, 1], reverse=True) == [3, 2, 1]
    with pytest.raises(ZeroDivisionError):
        call_in_one_piece(lambda: 1 // 0)
