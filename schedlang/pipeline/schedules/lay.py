"""Timelines from the rows of every rank, or from operations with a time each, as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from schedlang.pipeline.timeline import COLUMNS, Column, Kind, Timeline, chain

Ints = NDArray[np.int64]
Row = tuple[Column, Ints]  # kinds of one rank's operations, and their units


def laid(rows: Sequence[Row], micro: int) -> Timeline:
    """A timeline from each rank's kinds and units (stage * micro + microbatch), in order."""
    rank = np.repeat(np.arange(len(rows)), [len(kind) for kind, _ in rows])
    stage, microbatch = np.divmod(np.concatenate([unit for _, unit in rows]), micro)
    return _timeline(len(rows), rank, np.concatenate([k for k, _ in rows]), stage, microbatch)


def by_slot(
    ranks: int,
    slot: ArrayLike,
    rank: ArrayLike,
    kind: ArrayLike,
    stage: ArrayLike,
    microbatch: ArrayLike,
    replica: ArrayLike = 0,
    part: ArrayLike = 0,
) -> Timeline:
    """A timeline whose ranks run their operations in the order of `slot`; `part` is the slice.

    The columns are broadcast against each other and may have any shape.
    """
    given = np.broadcast_arrays(slot, rank, kind, stage, microbatch, replica, part)
    when, *columns = (column.ravel() for column in given)
    order = np.lexsort((when, columns[0]))
    return _timeline(ranks, *(column[order] for column in columns))


def _timeline(
    ranks: int,
    rank: NDArray[np.integer],
    kind: NDArray[np.integer],
    stage: NDArray[np.integer],
    microbatch: NDArray[np.integer],
    replica: NDArray[np.integer] | int = 0,
    part: NDArray[np.integer] | int = 0,
) -> Timeline:
    """A chain of stages, of operations in the order in which each rank runs them."""
    none = np.zeros(len(rank), np.int32)
    given = np.broadcast_arrays(rank, kind, stage, replica, microbatch, part, none, none - 1)
    edges = chain(int(stage.max(initial=-1)) + 1)
    return Timeline(**dict(zip(COLUMNS, given)), ranks=ranks, edges=edges)


def merge(forward: Ints, backward: Ints, warmup: int) -> Row:
    """`warmup` forwards, then one forward and one backward in turn, then the other backwards."""
    total = len(forward)
    k = np.arange(total)
    place_f = np.where(k < warmup, k, 2 * k - warmup)
    place_b = np.where(k < total - warmup, warmup + 2 * k + 1, total + k)
    kind, unit = np.empty(2 * total, np.int32), np.empty(2 * total, np.int64)
    kind[place_f], unit[place_f] = Kind.F, forward
    kind[place_b], unit[place_b] = Kind.B, backward
    return kind, unit


def weave(forward: Ints, backward: Ints, warmup: int, lag: int) -> Row:
    """`warmup` forwards, then one F and one I in turn; W stands right after the `lag`-th I later.

    What has no partner left runs on alone; the weight gradients left over come last.
    """
    k = np.arange(len(forward))
    turn = np.concatenate([3 * (k - warmup), 3 * k + 1, 3 * (k + lag) + 2])
    order = np.argsort(turn, kind="stable")
    kind = np.repeat(np.array([Kind.F, Kind.I, Kind.W], dtype=np.int32), len(k))
    return kind[order], np.concatenate([forward, backward, backward])[order]
