"""Orders that update inside the step: PipeDream, PipeDream-2BW, PipeMare, Pipelined-Backprop.

A step of the program is one run of the timeline, which holds several updates and is drained at its
end. Rows say which version of the stage's weights they read; a STEP row makes the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from schedlang.pipeline.schedules.lay import Ints, merge
from schedlang.pipeline.schedules.registry import Order, Problem, Size, flushed
from schedlang.pipeline.timeline import COLUMNS, Column, Kind, Timeline, chain

STALENESS = frozenset({"staleness"})


@dataclass(frozen=True)
class _Rows:
    """One rank's rows without its updates.

    `at_hand` counts the updates made before each row, `every` the microbatches of an update.
    """

    kind: Column
    microbatch: Ints
    at_hand: Ints
    every: int


Read = Callable[[_Rows], Ints]  # the version that each row reads


def _stashed(rows: _Rows) -> Ints:
    """F reads the weights at hand; B those that its own F has read, which were kept for it."""
    forward = rows.kind == Kind.F
    of = np.zeros(int(rows.microbatch.max()) + 1, dtype=np.int64)
    of[rows.microbatch[forward]] = rows.at_hand[forward]
    return of[rows.microbatch]


def _one_late(rows: _Rows) -> Ints:
    """F and B of an update read the weights of the update before it: w(t+1) = w(t) - g(w(t-1))."""
    late: Ints = np.maximum(rows.microbatch // rows.every - 1, 0)
    return late


def _at_hand(rows: _Rows) -> Ints:
    """F and B both read the weights at hand; nothing is kept."""
    return rows.at_hand


def _near(rank: int, size: Size) -> int:
    """Forwards before the first backward, of 1F1B: F and B take turns."""
    return min(size.ranks - 1 - rank, size.micro)


def _far(rank: int, size: Size) -> int:
    """The same where a stage does an F and a B at a time, of microbatches 2 (p-1-r) apart."""
    return min(2 * (size.ranks - 1 - rank), size.micro)


def _laid(size: Size, warmup: Callable[[int, Size], int], read: Read, every: int) -> Timeline:
    parts = [_rank(rank, size, warmup(rank, size), read, every) for rank in range(size.ranks)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
    return Timeline(**columns, ranks=size.ranks, edges=chain(size.ranks))


def _rank(rank: int, size: Size, warmup: int, read: Read, every: int) -> dict[str, Column]:
    """The columns of a rank; an update stands behind the last backward that it sums."""
    units = np.arange(size.micro)
    kind, microbatch = merge(units, units, warmup)
    back = (kind == Kind.B).astype(np.int64)
    at_hand = (np.cumsum(back) - back) // every
    version = read(_Rows(kind, microbatch, at_hand, every))
    ends = np.flatnonzero((kind == Kind.B) & ((microbatch + 1) % every == 0))
    made = (microbatch[ends] + 1) // every
    kind = np.insert(kind, ends + 1, Kind.STEP)
    none = np.zeros(len(kind), dtype=np.int32)
    return {
        "rank": none + rank,
        "kind": kind.astype(np.int32),
        "stage": none + rank,
        "replica": none,
        "microbatch": np.insert(microbatch, ends + 1, microbatch[ends]).astype(np.int32),
        "slice": none,
        "version": np.insert(version, ends + 1, made).astype(np.int32),
        "peer": none - 1,
    }


def _together(size: Size) -> int:
    """Return the microbatches of an update: the fewest from p on that divide m, or all."""
    if size.every is not None:
        return size.every
    return next(
        n for n in range(min(size.ranks, size.micro), size.micro + 1) if size.micro % n == 0
    )


def _pipedream(size: Size) -> Timeline:
    """1F1B without a flush between updates: on rank r weights are p - 1 - r updates old."""
    return _laid(size, _near, _stashed, size.every or 1)


def _double_buffered(size: Size) -> Timeline:
    """1F1B; every update reads the weights one update old, so that two versions suffice."""
    return _laid(size, _near, _one_late, _together(size))


def _too_few(size: Size) -> Problem | None:
    """Two versions suffice where an update sums p - 1 microbatches or more; the paper says p."""
    every = _together(size)
    if every >= min(size.ranks, size.micro):
        return None
    return (
        f"an update of {every} microbatches is too small for {size.ranks} stages: there would be"
        " more than two versions of the weights",
        f'every={size.ranks} or more, or order="PipeDream"',
    )


def _pipemare(size: Size) -> Timeline:
    """Microbatches 2 (p-1-r) apart on rank r; F and B read the weights as they come."""
    return _laid(size, _far, _at_hand, _together(size))


def _pipelined(size: Size) -> Timeline:
    """As PipeMare with an update after every microbatch: F on rank r is 2 (p-1-r) updates old."""
    return _laid(size, _far, _at_hand, size.every or 1)


def _idle(size: Size) -> Fraction:
    """(p-1) (F + I + W): filled and drained once a step, however many updates it holds."""
    return flushed(size)


ORDERS = (
    Order(
        "PipeDream",
        "Harlap et al. 2018 (1806.03377); Narayanan et al., SOSP 2019, §3.3: weight stashing",
        _pipedream,
        bubble=_idle,
        peak=lambda size: Fraction(min(size.ranks, size.micro)),
        relaxed=STALENESS,
    ),
    Order(
        "PipeDream-2BW",
        "Narayanan et al. 2021 (2006.09503), §3.1: double-buffered weight updates",
        _double_buffered,
        aliases=("2BW",),
        problem=_too_few,
        bubble=_idle,
        peak=lambda size: Fraction(min(size.ranks, size.micro)),
        relaxed=STALENESS,
    ),
    Order(
        "PipeMare",
        "Yang et al. 2021 (1910.05124), §2; without its T1 and T2",
        _pipemare,
        bubble=_idle,
        peak=lambda size: Fraction(min(2 * size.ranks - 1, size.micro)),
        relaxed=STALENESS,
    ),
    Order(
        "Pipelined-Backprop",
        "Kosson et al. 2021 (2003.11666), without spike compensation and weight prediction",
        _pipelined,
        aliases=("PB", "PipelinedBackprop"),
        bubble=_idle,
        peak=lambda size: Fraction(min(2 * size.ranks - 1, size.micro)),
        relaxed=STALENESS,
    ),
)
