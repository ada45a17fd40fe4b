"""Seq1F1B and TeraPipe: microbatches split along the sequence, each slice a unit of the pipeline.

Slices of a microbatch go forward in order, because later ones read the keys and values of earlier
ones, and back in reverse.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from schedlang.pipeline.schedules.registry import (
    Ints,
    Order,
    Size,
    flush_bubble,
    merge_backwards,
    timeline_by_slot,
)
from schedlang.pipeline.timeline.table import Timeline


def _seq1f1b(size: Size) -> Timeline:
    """Rank r runs p - r - 2 + k forwards of slices, then one forward and one backward in turn.

    The first backward is that of the last slice of its microbatch, so k - 1 more slices are in
    flight than in 1F1B.
    """
    warmup = [size.ranks - rank - 2 + size.slices for rank in range(size.ranks)]
    micro, part = np.divmod(np.arange(size.micro * size.slices), size.slices)
    backward = micro * size.slices + (size.slices - 1 - part)
    return _sliced(size, backward, warmup)


def _terapipe(size: Size) -> Timeline:
    """All forwards, then all backwards in exactly the reverse order."""
    units = size.micro * size.slices
    return _sliced(size, np.arange(units)[::-1], [units] * size.ranks)


def _sliced(size: Size, backward: Ints, warmup: list[int]) -> Timeline:
    """Build rows of units (microbatch * slices + slice) that are equal on all ranks but for the
    warm-up."""
    forward = np.arange(len(backward))
    rows = [merge_backwards(forward, backward, first) for first in warmup]
    kind = np.stack([kinds for kinds, _ in rows])
    microbatch, part = np.divmod(np.stack([units for _, units in rows]), size.slices)
    rank = np.arange(size.ranks)[:, None]
    slots = np.arange(kind.shape[1])
    return timeline_by_slot(size.ranks, slots, rank, kind, rank, microbatch, part=part)


def _idle(size: Size) -> Fraction:
    """(p-1) (F + B) / k with B = I + W, for slices of equal cost."""
    return flush_bubble(size) / size.slices


def _seq_peak(size: Size) -> Fraction:
    """min(p - 1 + k, m k) slices on rank 0, each 1/k of a microbatch."""
    count = min(size.ranks - 1 + size.slices, size.micro * size.slices)
    return Fraction(count, size.slices)


ORDERS = (
    Order(
        "Seq1F1B",
        "Sun et al., Seq1F1B, 2024 (2406.03488), §3",
        _seq1f1b,
        bubble=_idle,
        peak=_seq_peak,
        sliced=True,
    ),
    Order(
        "TeraPipe",
        "Li et al., TeraPipe, 2021 (2102.07988), §3",
        _terapipe,
        bubble=_idle,
        peak=lambda size: Fraction(size.micro),
        sliced=True,
    ),
)
