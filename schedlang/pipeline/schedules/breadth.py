"""Breadth-first: several stages on each rank, each run for all microbatches before the next."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from schedlang.pipeline.schedules.interleaved import idle
from schedlang.pipeline.schedules.lay import laid, merge
from schedlang.pipeline.schedules.registry import Order, Size
from schedlang.pipeline.timeline import Timeline


def _breadth_first(size: Size) -> Timeline:
    """All forwards, stage by stage; then the same backwards, the last microbatch first."""
    rows = []
    for rank in range(size.ranks):
        stages = np.arange(size.chunks) * size.ranks + rank
        units = (stages[:, None] * size.micro + np.arange(size.micro)).ravel()
        rows.append(merge(units, units[::-1], len(units)))
    return laid(rows, size.micro)


ORDERS = (
    Order(
        "BFS",
        "Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022 (2211.05953)",
        _breadth_first,
        aliases=("LoopedBFS", "ScheduleLoopedBFS", "Breadth-First"),
        chunks=None,
        default_chunks=2,
        bubble=idle,
        peak=lambda size: Fraction(size.micro),
    ),
)
