"""Activations of a timeline that a partner holds: where it takes them in, and gives them back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from schedlang.pipeline.timeline.needs import Places
from schedlang.pipeline.timeline.simulation import timing
from schedlang.pipeline.timeline.table import COLUMNS, TRANSFERS, Kind, Rows, Timeline

# ---- The rows of partners: where a rank takes in activations of another, and gives them back.


ANSWER = {Kind.EVICT: Kind.HOLD, Kind.LOAD: Kind.GIVE}


def with_holds(timeline: Timeline) -> Timeline:
    """The same order with HOLD for every EVICT and GIVE for every LOAD, on the partner's rank.

    All rows are put into the order of one possible run, that at unit cost, and each partner's row
    right behind the one that it answers: so no rank waits in a circle, although HOLD waits. A
    timeline that has them already stays as it is.
    """
    t = timeline
    asked = np.flatnonzero(np.isin(t.kind, list(ANSWER)))
    if not len(asked) or np.isin(t.kind, list(ANSWER.values())).any():
        return t
    turn = _turns(t)
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        own = getattr(t, name)
        columns[name] = np.concatenate([own, own[asked]])
    n = len(t)
    columns["kind"][n:] = np.where(t.kind[asked] == Kind.EVICT, Kind.HOLD, Kind.GIVE)
    columns["rank"][n:], columns["peer"][n:] = t.peer[asked], t.rank[asked]
    turns = np.concatenate([turn, turn[asked] + 2])
    rows = np.lexsort((np.arange(len(turns)), turns, columns["rank"]))
    return replace(t, **{name: column[rows] for name, column in columns.items()})


def _turns(t: Timeline) -> Rows:
    """The place of each row in one order of all rows, four apart; transfers with the row before."""
    own = np.flatnonzero(~np.isin(t.kind, TRANSFERS))
    bare = t.pick(own)
    start = timing(bare).start.copy()
    for low, high in zip(bare.starts[:-1], bare.starts[1:]):
        # copies may begin before earlier rows do
        start[low:high] = np.maximum.accumulate(start[low:high])
    place = np.empty(len(own), dtype=np.int64)
    place[np.lexsort((np.arange(len(own)), start))] = 4 * np.arange(len(own))
    before = np.searchsorted(own, np.arange(len(t)), side="right") - 1
    there = (before >= 0) & (t.rank[own[np.maximum(before, 0)]] == t.rank)
    found: Rows = np.where(there, place[np.maximum(before, 0)] + 1, -1)
    found[own] = place
    return found


# ---- An order in which some stages park on a partner what their forwards save, and call it back.


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
