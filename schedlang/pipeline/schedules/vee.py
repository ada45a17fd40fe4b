"""ZB-V and DualPipeV: two stages on each rank in a V, so that the last rank turns around at once.

Rank r runs stage r (chunk 0) and stage 2p - 1 - r (chunk 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from schedlang.pipeline.schedules.lay import Ints, laid
from schedlang.pipeline.schedules.registry import Order, Size, times
from schedlang.pipeline.timeline import Column, Kind, Timeline

F0, F1, I0, I1, W0, W1, B0, B1 = range(8)  # what a rank does next, in which of its two chunks
KINDS = np.repeat(np.array([Kind.F, Kind.I, Kind.W, Kind.B], dtype=np.int32), 2)


def _zb_v(size: Size) -> Timeline:
    """Zero Bubble, §6: without idle time on any rank where F, I and W take equally long.

    Fewer than 2p - 1 microbatches run as the first of that many.
    """
    p, n = size.ranks, max(size.micro, 2 * size.ranks - 1)
    rows = []
    for r in range(p):
        steps = [F0] * (2 * (p - r) - 1) + [F1, F0] * r + [F1, I1, W1] * (p - r)
        steps += [F0, I0, W0, F1, I1, W1] * (n - 2 * p + 1 + r)
        steps += [I0, W0, F1, I1, W1] * (p - 1 - r) + [I0, I1] * r
        steps += [I0, W0] * (p - r) + [W1] * r + [W0] * r
        rows.append(v_row(size, r, steps))
    return laid(rows, size.micro)


def _dualpipe_v(size: Size) -> Timeline:
    """One direction of DualPipe, cut in half and folded; F and B that it overlaps are neighbours.

    Fewer than 2p microbatches run as the first of that many.
    """
    p, n = size.ranks, max(size.micro, 2 * size.ranks)
    rows = []
    for r in range(p):
        after = p - r - 1
        steps = [F0] * (2 * after) + [F0, F1] * (r + 1) + [I1, W1, F1] * after
        steps += [F0, B1, F1, B0] * (n - 2 * p + r + 1) + [B1, F1, B0] * after
        drain = [B1, B0] * (r + 1)
        late = [I1 if step == B1 else I0 for step in drain[r + 1 :]]
        weights = [W1 if step == I1 else W0 for step in late] + [W0] * after
        steps += drain[: r + 1] + late
        steps += [step for pair in zip(weights, [I0] * after) for step in pair]
        rows.append(v_row(size, r, steps + weights[after:]))
    return laid(rows, size.micro)


def v_row(size: Size, rank: int, steps: Sequence[int] | Ints) -> tuple[Column, Ints]:
    """A rank's kinds and units: the n-th F and the n-th backward of a chunk are microbatch n's.

    Weight gradients come in the order of their input gradients.
    """
    step = np.asarray(steps, dtype=np.int64)
    microbatch = np.empty_like(step)
    for c in (0, 1):
        for same in (step == F0 + c, (step == I0 + c) | (step == B0 + c)):
            microbatch[same] = np.arange(np.count_nonzero(same))
        microbatch[step == W0 + c] = microbatch[step == I0 + c]
    real = microbatch < size.micro
    stage = np.where(step % 2 == 0, rank, 2 * size.ranks - 1 - rank)
    return KINDS[step[real]], (stage * size.micro + microbatch)[real]


def _zb_v_idle(size: Size) -> Fraction | None:
    """(p-1) (I - W), so none at equal times; for W <= F <= I and 2p - 1 microbatches."""
    f, i, w = times(size)
    enough = size.micro >= 2 * size.ranks - 1
    return (size.ranks - 1) * (i - w) if w <= f <= i and enough else None


def _dualpipe_v_idle(size: Size) -> Fraction | None:
    """(p-1) (F + I - min(I, W)) / 2 for I <= F <= I + W and 2p microbatches.

    The paper's own form counts F and B that overlap as one: (p-1) (F&B + B - 3W) / 2.
    """
    f, i, w = times(size)
    if not i <= f <= i + w or size.micro < 2 * size.ranks:
        return None
    return (size.ranks - 1) * (f + i - min(i, w)) / 2


ORDERS = (
    Order(
        "ZB-V",
        "Qi et al., Zero Bubble, 2023 (2401.10241), §6",
        _zb_v,
        aliases=("ZBV", "ZBVZeroBubble", "ScheduleZBVZeroBubble"),
        chunks=(2,),
        bubble=_zb_v_idle,
        peak=lambda size: Fraction(min(size.ranks, size.micro)),
    ),
    Order(
        "DualPipeV",
        "DualPipe of DeepSeek-V3, 2024 (2412.19437), cut in half as in PyTorch's ScheduleDualPipeV",
        _dualpipe_v,
        aliases=("ScheduleDualPipeV",),
        chunks=(2,),
        bubble=_dualpipe_v_idle,
        peak=lambda size: Fraction(min(2 * size.ranks + 1, 2 * size.micro), 2),
    ),
)
