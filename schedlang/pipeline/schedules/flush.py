"""GPipe and 1F1B: one stage on each rank, whole backwards, a flush at the end of the step."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from schedlang.pipeline.schedules.lay import lay, merge
from schedlang.pipeline.schedules.registry import Order, Size, times
from schedlang.pipeline.timeline import Timeline


def _gpipe(size: Size) -> Timeline:
    """All forwards, then all backwards, which run first in, first out."""
    return _one_chunk(size, [size.micro] * size.ranks)


def _one_f_one_b(size: Size) -> Timeline:
    """Backward as soon as possible: on rank r after p - 1 - r forwards."""
    return _one_chunk(size, [min(size.ranks - 1 - r, size.micro) for r in range(size.ranks)])


def _eager(size: Size) -> Timeline:
    """Twice the warm-up of 1F1B, which hides transfers: 2 (p-r) - 1 forwards before a backward."""
    return _one_chunk(size, [min(2 * (size.ranks - 1 - r), size.micro) for r in range(size.ranks)])


def _one_chunk(size: Size, warmup: list[int]) -> Timeline:
    rows = []
    for rank, first in enumerate(warmup):
        units = rank * size.micro + np.arange(size.micro)
        rows.append(merge(units, units, first))
    return lay([row[0] for row in rows], [row[1] for row in rows], size.micro)


def _idle(size: Size) -> Fraction:
    """(p-1) (F + I + W)."""
    return (size.ranks - 1) * sum(times(size), Fraction(0))


ORDERS = (
    Order(
        "GPipe",
        "Huang et al., GPipe, 2019 (1811.06965)",
        _gpipe,
        aliases=("ScheduleGPipe",),
        bubble=_idle,
        peak=lambda size: Fraction(size.micro),
    ),
    Order(
        "1F1B",
        "PipeDream-flush, Narayanan et al. 2021 (2006.09503); DAPPLE, Fan et al. 2021",
        _one_f_one_b,
        aliases=("Schedule1F1B", "PipeDream-Flush"),
        bubble=_idle,
        peak=lambda size: Fraction(min(size.ranks, size.micro)),
    ),
    Order(
        "Eager1F1B",
        "DAPPLE, Fan et al. 2021, policy PB of early backward",
        _eager,
        aliases=("1F1B-eager", "DAPPLE-PB"),
        bubble=_idle,
        peak=lambda size: Fraction(min(2 * size.ranks - 1, size.micro)),
    ),
)
