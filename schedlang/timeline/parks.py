"""An order in which some stages park on a partner what their forwards save, and call it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from schedlang.timeline.needs import Places
from schedlang.timeline.table import COLUMNS, Kind, Rows, Timeline


def with_parks(timeline: Timeline, ahead: Mapping[int, int]) -> Timeline:
    """The same order with EVICT after forwards of some stages, and LOAD before their backwards.

    `ahead`: stage -> before how many operations of its rank its activations are called back. The
    partner is the next rank of a ring. Of a microbatch that would be called back at once nothing
    leaves. HOLD and GIVE of the partners come with the transfers (`with_holds`).
    """
    gone, back = _pairs(timeline, ahead)
    if not len(gone):
        return timeline
    t = timeline
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        own = getattr(t, name)
        columns[name] = np.concatenate([own, own[gone], own[gone]])
    n, many = len(t), len(gone)
    columns["kind"][n : n + many], columns["kind"][n + many :] = Kind.EVICT, Kind.LOAD
    columns["peer"][n:] = (columns["rank"][n:] + 1) % t.ranks
    turns = np.concatenate([4 * np.arange(n) + 1, 4 * gone + 2, 4 * back])
    rows = np.argsort(turns, kind="stable")
    for name, column in columns.items():
        columns[name] = column[rows]
        columns[name].setflags(write=False)
    return replace(t, **columns)


def _pairs(t: Timeline, ahead: Mapping[int, int]) -> tuple[Rows, Rows]:
    """The forwards whose activations leave, and the rows before which they are called back."""
    table = Places(t)
    forward, backward = table.rows_of(Kind.F), table.rows_of(Kind.B, Kind.I)
    there = (forward >= 0) & (backward >= 0)
    gone, used = forward[there], backward[there]
    order = np.argsort(used, kind="stable")
    gone, used = gone[order], used[order]
    early = np.array([ahead.get(stage, -1) for stage in range(t.stages)], dtype=np.int64)
    mine = early[t.stage[gone]]
    leaves = (mine >= 0) & (used - mine > gone + 1)
    return gone[leaves], (used - mine)[leaves]
