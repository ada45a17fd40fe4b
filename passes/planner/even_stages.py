"""Split of a chain into stages so that the slowest stage is as quick as possible."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache

import numpy as np

from schedlang.passes.planner.values import Chain


def split_evenly(chain: Chain, stages: int, times: tuple[float, ...]) -> tuple[int, ...]:
    """Split a chain into `stages` so that the slowest is as quick as possible.

    `times` are seconds of one unit of each run.  Of such splits the one whose stages end closest to
    equal shares, stage by stage.  Raises ValueError for fewer units than stages.
    """
    return _even(tuple(run.count for run in chain.runs), stages, times)


@lru_cache(4096)
def _even(counts: tuple[int, ...], stages: int, times: tuple[float, ...]) -> tuple[int, ...]:
    flat = np.repeat(times, counts)
    count = len(flat)
    if count < stages:
        raise ValueError(f"{count} units are too few for {stages} stages")
    total = np.concatenate([[0.0], np.cumsum(flat)])
    low, sums = float(max(flat.max(), total[-1] / stages)), total.tolist()
    high = low + float(flat.max())  # stages that stop beyond their share reach the end
    while high - low > 1e-6 * low:
        middle = (low + high) / 2
        low, high = (middle, high) if _reached(sums, middle, stages) < count else (low, middle)
    allowed = high * (1 + 1e-9)
    last = _latest(sums, allowed, stages)
    shares = total[-1] * np.arange(1, stages) / stages
    closest = np.abs(total - shares[:, None]).argmin(1).tolist()
    ends = [0]
    for stage in range(1, stages):
        begin = ends[-1]
        reach = bisect_right(sums, sums[begin] + allowed) - 1
        minimum = max(begin + 1, last[stage])
        end = min(max(closest[stage - 1], minimum), max(reach, minimum))
        ends.append(min(end, count - stages + stage))
    ends.append(count)
    return tuple(b - a for a, b in zip(ends, ends[1:]))


def _reached(total: list[float], allowed: float, stages: int) -> int:
    """Count the units that so many stages hold, each as many as `allowed` seconds allow."""
    unit = 0
    for _ in range(stages):
        unit = bisect_right(total, total[unit] + allowed) - 1
    return unit


def _latest(total: list[float], allowed: float, stages: int) -> list[int]:
    """Smallest end of each stage from which the stages behind it can still hold all other units."""
    unit, ends = len(total) - 1, [len(total) - 1]
    for _ in range(stages):
        unit = bisect_left(total, total[unit] - allowed)
        ends.append(unit)
    return ends[::-1]
