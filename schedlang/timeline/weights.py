"""Weights along a timeline: the versions that STEP makes, and their shards gathered and freed."""

from __future__ import annotations

import numpy as np

from schedlang.timeline.needs import describe, latest_before
from schedlang.timeline.table import Kind, Rows, Timeline, TimelineError

READERS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.RECOMPUTE)
USERS = (Kind.F, Kind.B, Kind.I, Kind.RECOMPUTE)  # these compute with the weights


def check_versions(t: Timeline, kept: int | None) -> None:
    """Versions are made one after the other, and read only where they are there.

    A version below zero is one of earlier steps. `kept`: how many a rank keeps, the newest
    included; None: as many as are read. Raises TimelineError.
    """
    steps = np.flatnonzero(t.kind == Kind.STEP)
    reads = np.flatnonzero(np.isin(t.kind, READERS))
    if not len(steps) and int(t.version[reads].max(initial=0)) <= 0 and kept is None:
        return
    key = _weights(t)
    order = np.argsort(key[steps], kind="stable")
    steps = steps[order]
    first = np.searchsorted(key[steps], key[steps])
    count = np.arange(len(steps)) - first + 1
    wrong = np.flatnonzero(t.version[steps] != count)
    if len(wrong):
        row, want = int(steps[wrong[0]]), int(count[wrong[0]])
        raise TimelineError(
            f"{describe(t, row)} makes version {t.version[row]}, and its stage waits for version "
            f"{want}"
        )
    newest = _before(t, key, steps, reads)
    late = np.flatnonzero(t.version[reads] > newest)
    if len(late):
        row = int(reads[late[0]])
        raise TimelineError(
            f"{describe(t, row)} waits for version {t.version[row]} of its weights, and no STEP "
            f"before it makes that: the newest is {newest[late[0]]}"
        )
    if kept is not None:
        gone = np.flatnonzero(t.version[reads] <= newest - kept)
        if len(gone):
            row = int(reads[gone[0]])
            raise TimelineError(
                f"{describe(t, row)} reads version {t.version[row]} of its weights when version "
                f"{newest[gone[0]]} is the newest and {kept} are kept"
            )


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
    makers = np.isin(t.kind, (Kind.B, Kind.W)) & np.isin(key, key[reduces])
    rows = np.flatnonzero(makers)
    last = np.full(t.ranks * t.stages, -1, dtype=np.int64)
    np.maximum.at(last, key[reduces], reduces)
    lost = np.flatnonzero(rows > last[key[rows]])
    if len(lost):
        raise TimelineError(f"{describe(t, int(rows[lost[0]]))} has no REDUCE after it")


def _weights(t: Timeline) -> Rows:
    return t.replica.astype(np.int64) * max(1, t.stages) + t.stage


def _before(t: Timeline, key: Rows, steps: Rows, reads: Rows) -> Rows:
    """The newest version when each row reads: that of the latest STEP before it, else 0."""
    latest = latest_before(key, steps, reads)
    if not len(steps):
        return np.zeros(len(reads), dtype=np.int64)
    return np.where(latest >= 0, t.version[latest], 0)
