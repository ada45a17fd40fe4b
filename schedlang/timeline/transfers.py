"""The sends and receives of a timeline: where they stand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from schedlang.timeline.holds import with_holds
from schedlang.timeline.needs import dependencies
from schedlang.timeline.table import COLUMNS, Kind, Rows, Timeline

# where a row stands at its place: receives, the operation itself, its sends
POST, SELF, SENT, PLACE = range(4)


def with_transfers(timeline: Timeline, lookahead: int = 1) -> Timeline:
    """The same order with a row for each send and for each posting of a receive.

    A send follows the operation that makes its tensors. A receive is posted `lookahead` compute
    operations before the one that uses it, or earlier: per pair of ranks receives stand in the
    order of the sends, because that is how gloo and NCCL match them. Partners take in what is
    evicted and give it back (`with_holds`).
    """
    t = timeline.compute()
    made, used = dependencies(t)
    apart = t.rank[made] != t.rank[used]
    made, used = made[apart], used[apart]
    order = np.argsort(made * max(1, t.stages) + t.stage[used], kind="stable")
    made, used = made[order], used[order]
    back = t.kind[made] != Kind.F
    post = np.maximum(_latest_post(t, made, used) - lookahead, t.starts[t.rank[used]])
    place = (np.arange(len(t)) * PLACE + SELF, made * PLACE + SENT, post * PLACE + POST)
    order = np.argsort(np.concatenate(place), kind="stable")  # equal places: as they were sent
    del place, post
    sends = np.where(back, Kind.SEND_B, Kind.SEND_F)
    receives = np.where(back, Kind.RECV_B, Kind.RECV_F)
    other = {"kind": (sends, receives), "peer": (t.stage[used], t.stage[made])}
    found: dict[str, Any] = {}
    for name in COLUMNS:
        own = getattr(t, name)
        more = other.get(name) or (own[made], own[used])
        found[name] = np.concatenate([own, *more], dtype=np.int32, casting="unsafe")[order]
        found[name].setflags(write=False)
    return with_holds(replace(t, **found))


def _latest_post(t: Timeline, made: Rows, used: Rows) -> Rows:
    """Where each receive must be posted: no later than any later receive of its pair of ranks."""
    pair = t.rank[made].astype(np.int64) * t.ranks + t.rank[used]
    post = used.copy()
    order = np.argsort(pair, kind="stable")  # made is ascending: within a pair, the sending order
    bounds = np.flatnonzero(np.diff(pair[order], prepend=-1, append=-1))
    for low, high in zip(bounds[:-1], bounds[1:]):
        part = order[low:high]
        post[part] = np.minimum.accumulate(used[part][::-1])[::-1]
    return post
