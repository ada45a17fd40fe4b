"""From operations with a time or a turn each to a timeline, every rank's rows in that order."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from schedlang.pipeline.timeline import Timeline, chain


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
    rows = [column[order].astype(np.int32) for column in columns]
    none = np.zeros(len(order), np.int32)
    stages = int(rows[2].max(initial=-1)) + 1
    where, what, stage_, microbatch_, replica_, slice_ = rows
    return Timeline(
        where,
        what,
        stage_,
        replica_,
        microbatch_,
        slice_,
        none,
        none - 1,
        ranks=ranks,
        edges=chain(stages),
    )
