"""Interleaved 1F1B: several stages on each rank, in a loop over the ranks, depth first."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from schedlang.orders.lay import lay, merge
from schedlang.orders.registry import Order, Problem, Size
from schedlang.timeline import Timeline


def _interleaved(size: Size) -> Timeline:
    """Microbatches go through a rank's chunks in groups of p.

    Groups are of m // (m // p) where p does not divide m, as in torch.
    """
    rows = [_rank(rank, size) for rank in range(size.ranks)]
    return lay([row[0] for row in rows], [row[1] for row in rows], size.micro)


def _rank(rank: int, size: Size) -> tuple[np.ndarray, np.ndarray]:
    ranks, micro, chunks, group = size.ranks, size.micro, size.chunks, _group(size)
    k = np.arange(micro * chunks)
    chunk = (k // group) % chunks
    microbatch = (k // (group * chunks)) * group + k % group
    forward = (chunk * ranks + rank) * micro + microbatch
    backward = ((chunks - 1 - chunk) * ranks + rank) * micro + microbatch
    warmup = min(2 * (ranks - 1 - rank) + (chunks - 1) * group, micro * chunks)
    return merge(forward, backward, warmup)


def _group(size: Size) -> int:
    return size.micro // max(1, size.micro // size.ranks)


def _problem(size: Size) -> Problem | None:
    rounds = max(1, size.micro // size.ranks)
    if size.micro % rounds == 0:
        return None
    lower = (size.micro // size.ranks) * size.ranks
    return (
        f"{size.micro} microbatches do not split into {rounds} equal groups for {size.ranks} ranks",
        f"micro={lower} or micro={lower + size.ranks}",
    )


def _idle(size: Size) -> Fraction:
    """(p-1) (F + I + W) / v."""
    cost = size.cost
    whole = Fraction(cost.f) + Fraction(cost.i) + Fraction(cost.w)
    return (size.ranks - 1) * whole / size.chunks


def _peak(size: Size) -> Fraction:
    """min(2(p-1) + (v-1) g + 1, v m) stage activations on rank 0, of 1/v each."""
    most = 2 * (size.ranks - 1) + (size.chunks - 1) * _group(size) + 1
    return Fraction(min(most, size.chunks * size.micro), size.chunks)


ORDERS = (
    Order(
        "Interleaved1F1B",
        "Narayanan et al. 2021 (2104.04473), §2.2",
        _interleaved,
        aliases=("ScheduleInterleaved1F1B", "1F1B-I", "Interleaved"),
        problem=_problem,
        chunks=None,
        default_chunks=2,
        bubble=_idle,
        peak=_peak,
    ),
)
