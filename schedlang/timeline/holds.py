"""The rows of partners: where a rank takes in activations of another, and gives them back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from schedlang.timeline.table import COLUMNS, Kind, Timeline
from schedlang.timeline.timing import timing

ANSWER = {Kind.EVICT: Kind.HOLD, Kind.LOAD: Kind.GIVE}


def with_holds(timeline: Timeline) -> Timeline:
    """The same order with HOLD for every EVICT and GIVE for every LOAD, on the partner's rank.

    All rows are put into the order of one possible run, that at unit cost, and each partner's row
    right behind the one that it answers: so no rank waits in a circle. A timeline that has them
    already stays as it is.
    """
    t = timeline
    asked = np.flatnonzero(np.isin(t.kind, list(ANSWER)))
    if not len(asked) or np.isin(t.kind, list(ANSWER.values())).any():
        return t
    bare = t.compute()
    assert len(bare) == len(t), "partners are named before transfers are"
    n = len(t)
    start = timing(t).start.copy()
    for low, high in zip(t.starts[:-1], t.starts[1:]):  # copies may begin before earlier rows do
        start[low:high] = np.maximum.accumulate(start[low:high])
    turn = np.empty(n, dtype=np.int64)
    turn[np.lexsort((np.arange(n), start))] = 2 * np.arange(n)
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        own = getattr(t, name)
        columns[name] = np.concatenate([own, own[asked]])
    columns["kind"][n:] = np.where(t.kind[asked] == Kind.EVICT, Kind.HOLD, Kind.GIVE)
    columns["rank"][n:], columns["peer"][n:] = t.peer[asked], t.rank[asked]
    rows = np.lexsort((np.concatenate([turn, turn[asked] + 1]), columns["rank"]))
    return replace(t, **{name: column[rows] for name, column in columns.items()})
