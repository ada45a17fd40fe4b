"""ZB-H1 and ZB-H2: one stage on each rank, weight gradients put off into what was idle time."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from schedlang.pipeline.schedules.lay import laid, weave
from schedlang.pipeline.schedules.registry import Order, Size, times
from schedlang.pipeline.timeline import Timeline


def _zb_h1(size: Size) -> Timeline:
    """1F1B's forwards and input gradients; rank r runs W of a microbatch after r further I."""
    return _woven(size, 1)


def _zb_h2(size: Size) -> Timeline:
    """Twice the warm-up of 1F1B, so that no rank waits for its first I; W after 2r further I."""
    return _woven(size, 2)


def _woven(size: Size, times: int) -> Timeline:
    rows = []
    for rank in range(size.ranks):
        units = rank * size.micro + np.arange(size.micro)
        warmup = min(times * (size.ranks - 1 - rank), size.micro)
        rows.append(weave(units, units, warmup, times * rank))
    return laid(rows, size.micro)


def _h1_idle(size: Size) -> Fraction:
    """(p-1) (F + I - min(F, W)); fewer than p microbatches leave gaps where W has nothing to do.

    The paper has F + I - W, of times with W < F.
    """
    f, i, w = times(size)
    return (size.ranks - 1) * (f + i) - (min(size.micro, size.ranks) - 1) * min(f, w)


def _h2_idle(size: Size) -> Fraction | None:
    """(p-1) (F + I - 2 min(F, W)), never less than nothing, for 2p - 1 microbatches or more."""
    f, i, w = times(size)
    enough = size.micro >= 2 * size.ranks - 1
    return (size.ranks - 1) * max(f + i - 2 * min(f, w), Fraction(0)) if enough else None


ORDERS = (
    Order(
        "ZB-H1",
        "Qi et al., Zero Bubble, 2023 (2401.10241), §2.2",
        _zb_h1,
        bubble=_h1_idle,
        peak=lambda size: Fraction(min(size.ranks, size.micro)),
    ),
    Order(
        "ZB-H2",
        "Qi et al., Zero Bubble, 2023 (2401.10241), §2.3",
        _zb_h2,
        bubble=_h2_idle,
        peak=lambda size: Fraction(min(2 * size.ranks - 1, size.micro)),
    ),
)
