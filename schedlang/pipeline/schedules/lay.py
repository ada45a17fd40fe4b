"""From the rows of every rank to a timeline, without a Python object per operation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from schedlang.pipeline.timeline import Column, Edge, Kind, Timeline, chain

Ints = NDArray[np.int64]


def lay(
    kinds: Sequence[Column | Ints],
    units: Sequence[Ints],
    micro: int,
    edges: Sequence[Edge] | None = None,
) -> Timeline:
    """A timeline from one array of kinds and one of units (stage * micro + microbatch) per rank."""
    rank = np.repeat(np.arange(len(kinds), dtype=np.int32), [len(kind) for kind in kinds])
    stage, microbatch = np.divmod(np.concatenate(units), micro)
    none = np.zeros_like(rank)
    stages = int(stage.max(initial=-1)) + 1
    return Timeline(
        rank,
        np.concatenate(kinds),
        stage,
        none,
        microbatch,
        none,
        none,
        none - 1,
        ranks=len(kinds),
        edges=chain(stages) if edges is None else tuple(sorted(set(edges))),
    )


def merge(forward: Ints, backward: Ints, warmup: int) -> tuple[Column, Ints]:
    """`warmup` forwards, then one forward and one backward in turn, then the other backwards."""
    total = len(forward)
    k = np.arange(total)
    place_f = np.where(k < warmup, k, 2 * k - warmup)
    place_b = np.where(k < total - warmup, warmup + 2 * k + 1, total + k)
    kind, unit = np.empty(2 * total, np.int32), np.empty(2 * total, np.int64)
    kind[place_f], unit[place_f] = Kind.F, forward
    kind[place_b], unit[place_b] = Kind.B, backward
    return kind, unit


def weave(forward: Ints, backward: Ints, warmup: int, lag: int) -> tuple[Column, Ints]:
    """`warmup` forwards, then one F and one I in turn; W stands right after the `lag`-th I later.

    What has no partner left runs on alone; the weight gradients left over come last.
    """
    k = np.arange(len(forward))
    turn = np.concatenate([3 * (k - warmup), 3 * k + 1, 3 * (k + lag) + 2])
    order = np.argsort(turn, kind="stable")
    kind = np.repeat(np.array([Kind.F, Kind.I, Kind.W], dtype=np.int32), len(k))
    return kind[order], np.concatenate([forward, backward, backward])[order]


def laid(rows: Sequence[tuple[Column, Ints]], micro: int) -> Timeline:
    """A timeline from one pair of kinds and units per rank."""
    return lay([row[0] for row in rows], [row[1] for row in rows], micro)
