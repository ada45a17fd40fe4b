"""The rows of partners: where a rank takes in activations of another, and gives them back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from schedlang.timeline.table import COLUMNS, TRANSFERS, Kind, Rows, Timeline
from schedlang.timeline.timing import timing

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
