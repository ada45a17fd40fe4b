"""Sharded weights along a timeline: gathered where they are used, their gradients reduced."""

from __future__ import annotations

import numpy as np

from schedlang.timeline.needs import describe, latest_before
from schedlang.timeline.table import Kind, Timeline, TimelineError

USERS = (Kind.F, Kind.B, Kind.I, Kind.RECOMPUTE)  # these compute with the weights


def check_shards(t: Timeline) -> None:
    """A stage that is unsharded by rows is so wherever it computes; its gradients are reduced.

    Raises TimelineError for an operation between a RESHARD and the next UNSHARD, and for gradients
    that come after the last REDUCE of a stage that has any.
    """
    if not np.isin(t.kind, (Kind.UNSHARD, Kind.REDUCE)).any():
        return
    key = t.rank.astype(np.int64) * t.stages + t.stage
    gathered = np.flatnonzero(np.isin(t.kind, (Kind.UNSHARD, Kind.RESHARD)))
    users = np.flatnonzero(np.isin(t.kind, USERS) & np.isin(key, key[t.kind == Kind.UNSHARD]))
    latest = latest_before(key, gathered, users)
    wrong = np.flatnonzero((latest < 0) | (t.kind[latest] != Kind.UNSHARD))
    if len(wrong):
        raise TimelineError(f"{describe(t, int(users[wrong[0]]))} waits for an UNSHARD before it")
    reduces = np.flatnonzero(t.kind == Kind.REDUCE)
    rows = np.flatnonzero(np.isin(t.kind, (Kind.B, Kind.W)) & np.isin(key, key[reduces]))
    last = np.full(t.ranks * t.stages, -1, dtype=np.int64)
    np.maximum.at(last, key[reduces], reduces)
    lost = np.flatnonzero(rows > last[key[rows]])
    if len(lost):
        raise TimelineError(f"{describe(t, int(rows[lost[0]]))} has no REDUCE after it")
