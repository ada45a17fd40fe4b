"""Sharded weights along a timeline: gathers before they are used, reductions of their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedlang.pipeline.timeline.table import (
    Kind,
    Rows,
    Timeline,
    TimelineError,
    describe_row,
    latest_before,
)

# -- gathers ---------------------------------------------------------------------------------------
# Lamy-Poirier, Breadth-First Pipeline Parallelism (2022, 2211.05953): a rank that runs all
# microbatches of a stage one after the other gathers its weights once for all of them.


WEIGHT_KINDS = (Kind.F, Kind.B, Kind.I, Kind.RECOMPUTE)  # kinds that read the weights

# order of rows at one place: UNSHARD before the first row of a run, REDUCE and RESHARD after it
BEFORE, SELF, REDUCED, AFTER, PLACE = range(5)


@dataclass(frozen=True)
class StageRuns:
    """Runs of forwards, or of backwards, of one stage on its rank: first and last row of each."""

    first: Rows
    last: Rows
    backward: Rows


def find_runs(t: Timeline) -> StageRuns:
    """Find the runs of stages whose weights stay gathered from the first row of a run to its last.

    These are stages of ranks with several stages, if every run of the stage has at least two
    operations. A stage that is alone on its rank is excluded: all weights of the rank would be
    gathered through the step, which sharded weights should avoid. Runs of one operation save
    nothing.  Separate weight gradients (W) come after the run: their stages are excluded.
    """
    rows = np.flatnonzero(np.isin(t.kind, WEIGHT_KINDS))
    stage = t.rank[rows].astype(np.int64) * t.stages + t.stage[rows]
    is_backward = (t.kind[rows] != Kind.F).astype(np.int64)
    starts = np.flatnonzero(np.diff(stage * 2 + is_backward, prepend=-1))
    if not len(starts):
        return StageRuns(starts, starts, starts)
    ends = np.append(starts[1:], len(rows)) - 1
    several = np.add.reduceat((t.kind[rows] != Kind.RECOMPUTE).astype(np.int64), starts) > 1
    halves = t.rank.astype(np.int64) * t.stages + t.stage
    stages = np.unique(stage)
    shared = stages[np.bincount(stages // t.stages)[stages // t.stages] > 1]
    out = np.union1d(stage[starts[~several]], halves[t.kind == Kind.W])
    gathered = np.isin(stage[starts], np.setdiff1d(shared, out))
    return StageRuns(rows[starts[gathered]], rows[ends[gathered]], is_backward[starts[gathered]])


def with_gathers(t: Timeline) -> Timeline:
    """Add UNSHARD before each run of such a stage, RESHARD and REDUCE after it.

    Gradients are reduced once a run of backwards. Other stages get no rows.
    """
    runs = find_runs(t)
    if not len(runs.first):
        return t
    added = (
        (BEFORE, Kind.UNSHARD, runs.first),
        (REDUCED, Kind.REDUCE, runs.last[runs.backward == 1]),
        (AFTER, Kind.RESHARD, runs.last),
    )
    return t.with_copies(
        np.arange(len(t)) * PLACE + SELF,
        *((rows, rows * PLACE + turn, {"kind": kind, "peer": -1}) for turn, kind, rows in added),
    )


def with_early_gathers(t: Timeline) -> Timeline:
    """Add UNSHARD of every stage before all rows of its rank, in the order in which stages run.

    For weights that stay gathered through a step (ZeRO stages 1 and 2).  All ranks gather at once,
    while microbatches are on their way to them; else each stage would gather after it got its first
    microbatch, and the later stages would wait for the gathers of all earlier ones.
    """
    rows = np.flatnonzero(np.isin(t.kind, WEIGHT_KINDS))
    _, first = np.unique(
        t.rank[rows].astype(np.int64) * t.stages + t.stage[rows], return_index=True
    )
    first = rows[np.sort(first)]
    turns = t.starts[:-1][t.rank[first]] * PLACE + BEFORE
    changes = {"kind": Kind.UNSHARD, "peer": -1}
    return t.with_copies(np.arange(len(t)) * PLACE + SELF, (first, turns, changes))


# -- checks ----------------------------------------------------------------------------------------


def check_shards(t: Timeline) -> None:
    """Check that a stage with UNSHARD rows is gathered wherever it computes, and its gradients
    reduced.

    Raises TimelineError for an operation between a RESHARD and the next UNSHARD, and for gradients
    after the last REDUCE of a stage that has any.
    """
    if not np.isin(t.kind, (Kind.UNSHARD, Kind.REDUCE)).any():
        return
    key = t.rank.astype(np.int64) * t.stages + t.stage
    gathered = np.flatnonzero(np.isin(t.kind, (Kind.UNSHARD, Kind.RESHARD)))
    users = np.flatnonzero(
        np.isin(t.kind, WEIGHT_KINDS) & np.isin(key, key[t.kind == Kind.UNSHARD])
    )
    latest = latest_before(key, gathered, users)
    violations = np.flatnonzero((latest < 0) | (t.kind[latest] != Kind.UNSHARD))
    if len(violations):
        raise TimelineError(
            f"{describe_row(t, int(users[violations[0]]))} waits for an UNSHARD before it"
        )
    reduces = np.flatnonzero(t.kind == Kind.REDUCE)
    rows = np.flatnonzero(np.isin(t.kind, (Kind.B, Kind.W)) & np.isin(key, key[reduces]))
    last = np.full(t.ranks * t.stages, -1, dtype=np.int64)
    np.maximum.at(last, key[reduces], reduces)
    unreduced = np.flatnonzero(rows > last[key[rows]])
    if len(unreduced):
        raise TimelineError(f"{describe_row(t, int(rows[unreduced[0]]))} has no REDUCE after it")
