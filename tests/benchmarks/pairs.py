"""Interleaved pairs: two ways to do the same, in turn in the same processes, and their ratio."""

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


def interleaved(
    ours: Callable[[], object], theirs: Callable[[], object], pairs: int, warm: int = 3
) -> tuple[Ratio, Ratio]:
    """Do both in turn, all ranks together, from barrier to barrier: ratios of wall and of CPU time.

    CPU time is that of this process; it changes little with what else the machine does.
    """
    for _ in range(warm):
        ours()
        theirs()
    times: list[tuple[Times, Times]] = []
    for number in range(pairs):
        if number % 2:
            mine, other = _timed(ours), _timed(theirs)
        else:
            other, mine = _timed(theirs), _timed(ours)
        times.append((mine, other))
    wall, cpu = ([(a[k], b[k]) for a, b in times] for k in range(2))
    return ratio_of(wall), ratio_of(cpu)


def in_turn(works: Sequence[Callable[[], object]], rounds: int, warm: int = 2) -> list[list[Times]]:
    """The times of each of some works, round by round, each round from another one on."""
    for _ in range(warm):
        for work in works:
            work()
    found = []
    for number in range(rounds):
        first = number % len(works)
        order = [*range(first, len(works)), *range(first)]
        times = {place: _timed(works[place]) for place in order}
        found.append([times[place] for place in range(len(works))])
    return found


def ratio_of(times: list[tuple[float, float]]) -> Ratio:
    """The ratio from (ours, theirs) pairs of seconds."""
    ratios = sorted(a / b for a, b in times)
    low, high = order_statistics(len(ratios))
    medians = [statistics.median(side) for side in zip(*times)]
    return Ratio(statistics.median(ratios), ratios[low], ratios[high], *medians, len(times))


def order_statistics(count: int) -> tuple[int, int]:
    """Indices of the sorted values between which the median lies in at least 95 of 100 cases."""
    below, k = 0.0, 0  # of values under the median, binomial with a half
    while k < count // 2:
        below += math.comb(count, k) / 2**count
        if below > 0.025:
            break
        k += 1
    return max(k - 1, 0), count - max(k, 1)


def _timed(work: Callable[[], object]) -> Times:
    _together()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    cpu = time.process_time() - cpu
    _together()
    return time.perf_counter() - wall, cpu


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()
