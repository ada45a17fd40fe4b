"""Interleaved 1F1B: several stages on each rank, in a loop over the ranks, depth first."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from schedlang.pipeline.cost import Number
from schedlang.pipeline.schedules.lay import Ints, laid, merge
from schedlang.pipeline.schedules.registry import Order, Size, times
from schedlang.pipeline.timeline import Timeline


def _interleaved(size: Size) -> Timeline:
    """Microbatches go through a rank's chunks in rounds of p, as in torch; see `rounds`."""
    sizes, rows = rounds(size.micro, size.ranks), []
    for rank in range(size.ranks):
        forward, backward = depth_first(rank, size, sizes)
        warmup = 2 * (size.ranks - 1 - rank) + (size.chunks - 1) * sizes[0]
        rows.append(merge(forward, backward, min(warmup, len(forward))))
    return laid(rows, size.micro)


def rounds(micro: int, group: int) -> list[int]:
    """Microbatches in rounds of at least `group`, as equal as can be, the larger ones first.

    With smaller rounds first or last, ranks would wait for each other for ever.
    """
    count = max(1, micro // group)
    least, more = divmod(micro, count)
    return [least + 1] * more + [least] * (count - more)


def depth_first(rank: int, size: Size, sizes: list[int]) -> tuple[Ints, Ints]:
    """Units of a rank's forwards and backwards: each round through one chunk after the other."""
    turn = np.repeat(np.arange(len(sizes)), sizes) * size.chunks
    order = np.argsort((turn + np.arange(size.chunks)[:, None]).ravel(), kind="stable")
    chunk, microbatch = np.divmod(order, size.micro)
    stages = chunk * size.ranks + rank, (size.chunks - 1 - chunk) * size.ranks + rank
    return stages[0] * size.micro + microbatch, stages[1] * size.micro + microbatch


def idle(size: Size) -> Fraction:
    """(p-1) (F + I + W) / v; with m < p a rank waits p - m more turns for each further chunk."""
    turns = size.ranks - 1 + (size.chunks - 1) * max(0, size.ranks - size.micro)
    return turns * sum(times(size), Fraction(0)) / size.chunks


def accounted(span: Number, size: Size) -> Number:
    """The cost of 1F1B-I as Zero Bubble's Table 5 accounts for it: p transfers less.

    `span` is the simulated rank span.
    """
    return span - size.ranks * size.cost.comm


def _peak(size: Size) -> Fraction:
    """min(2(p-1) + (v-1) g + 1, v m) stage activations on rank 0, 1/v each; g the first round."""
    most = 2 * (size.ranks - 1) + (size.chunks - 1) * rounds(size.micro, size.ranks)[0] + 1
    return Fraction(min(most, size.chunks * size.micro), size.chunks)


ORDERS = (
    Order(
        "Interleaved1F1B",
        "Narayanan et al. 2021 (2104.04473), §2.2",
        _interleaved,
        aliases=("ScheduleInterleaved1F1B", "1F1B-I", "Interleaved"),
        chunks=None,
        default_chunks=2,
        bubble=idle,
        peak=_peak,
    ),
)
