"""Interleaved timing of functions in the same processes, and the ratio of their times."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

Times = tuple[float, float]  # seconds on the wall, and of CPU


@dataclass(frozen=True)
class Ratio:
    """The median of ours / theirs over pairs, and its 95 % interval by order statistics."""

    median: float
    low: float
    high: float
    ours: float  # seconds of the median step
    theirs: float
    pairs: int

    def met(self, limit: float) -> bool:
        """Whether the limit is not below the interval."""
        return limit >= self.low

    def __str__(self) -> str:
        return f"{self.median:.3f}  [{self.low:.3f}, {self.high:.3f}]"


def interleaved_ratios(
    ours: Callable[[], object], theirs: Callable[[], object], pairs: int, warm: int = 3
) -> tuple[Ratio, Ratio]:
    """Run both alternately between barriers; return the ratios of wall and of CPU time.

    CPU time is that of this process; it hardly depends on the machine's load.
    """
    for _ in range(warm):
        ours()
        theirs()
    times: list[tuple[Times, Times]] = []
    for number in range(pairs):
        if number % 2:
            first_time, second_time = _timed(ours), _timed(theirs)
        else:
            second_time, first_time = _timed(theirs), _timed(ours)
        times.append((first_time, second_time))
    wall, cpu = ([(a[k], b[k]) for a, b in times] for k in range(2))
    return ratio_of(wall), ratio_of(cpu)


def timed_rounds(
    works: Sequence[Callable[[], object]], rounds: int, warm: int = 2
) -> list[list[Times]]:
    """Return the times of each function by round; each round starts with another function."""
    for _ in range(warm):
        for work in works:
            work()
    rounds_times = []
    for number in range(rounds):
        start = number % len(works)
        order = [*range(start, len(works)), *range(start)]
        times = {k: _timed(works[k]) for k in order}
        rounds_times.append([times[k] for k in range(len(works))])
    return rounds_times


def ratio_of(times: list[tuple[float, float]]) -> Ratio:
    """Return the ratio from (ours, theirs) pairs of seconds."""
    ratios = sorted(a / b for a, b in times)
    low, high = order_statistics(len(ratios))
    medians = [statistics.median(side) for side in zip(*times)]
    return Ratio(statistics.median(ratios), ratios[low], ratios[high], *medians, len(times))


def order_statistics(count: int) -> tuple[int, int]:
    """Return indices of the sorted values that bound the median with 95 % confidence."""
    probability, k = 0.0, 0  # binomial probability of so many values below the median
    while k < count // 2:
        probability += math.comb(count, k) / 2**count
        if probability > 0.025:
            break
        k += 1
    return max(k - 1, 0), count - max(k, 1)


def _timed(action: Callable[[], object]) -> Times:
    _barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    cpu = time.process_time() - cpu
    _barrier()
    return time.perf_counter() - wall, cpu


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
