"""The sends and receives of a timeline: where they stand, and that they match."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from schedlang.timeline.needs import dependencies
from schedlang.timeline.table import COLUMNS, TRANSFERS, Kind, Rows, Timeline, TimelineError


def with_transfers(timeline: Timeline, lookahead: int = 1) -> Timeline:
    """The same order with a row for each send and for each posting of a receive.

    A send follows the operation that makes its tensors. A receive is posted `lookahead` compute
    operations before the one that uses it, or earlier: per pair of ranks receives stand in the
    order of the sends, because that is how gloo and NCCL match them.
    """
    t = timeline.compute()
    made, used = dependencies(t)
    apart = t.rank[made] != t.rank[used]
    made, used = made[apart], used[apart]
    order = np.lexsort((t.stage[used], made))
    made, used = made[order], used[order]
    back = t.kind[made] != Kind.F
    post = _posting(t, made, used) - lookahead
    post = np.maximum(post, t.starts[t.rank[used]])
    n, k = len(t), len(made)
    own = {name: getattr(t, name) for name in COLUMNS}
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        columns[name] = np.concatenate([own[name], own[name][made], own[name][used]])
    columns["kind"][n : n + k] = np.where(back, Kind.SEND_B, Kind.SEND_F)
    columns["kind"][n + k :] = np.where(back, Kind.RECV_B, Kind.RECV_F)
    columns["peer"][n : n + k], columns["peer"][n + k :] = t.stage[used], t.stage[made]
    place = np.concatenate([np.arange(n), made, post])
    phase = np.repeat([1, 2, 0], [n, k, k])
    turn = np.concatenate([np.zeros(n, np.int64), np.arange(k), np.arange(k)])
    rows = np.lexsort((turn, phase, place))
    return replace(t, **{name: column[rows] for name, column in columns.items()})


def parked(timeline: Timeline) -> Timeline:
    """Without transfers, with the partner's side of what is parked on it."""
    return timeline.pick(~np.isin(timeline.kind, TRANSFERS))


def check_transfers(t: Timeline) -> None:
    """Per pair of ranks and direction, receives stand in the order of the sends."""
    homes = t.homes
    sends = np.isin(t.kind, (Kind.SEND_F, Kind.SEND_B))
    receives = np.isin(t.kind, (Kind.RECV_F, Kind.RECV_B))
    keys = []
    for rows, outgoing in ((np.flatnonzero(sends), True), (np.flatnonzero(receives), False)):
        far = homes[t.replica[rows], t.peer[rows]]
        pair = (t.rank[rows], far) if outgoing else (far, t.rank[rows])
        ends = (t.stage[rows], t.peer[rows]) if outgoing else (t.peer[rows], t.stage[rows])
        back = np.isin(t.kind[rows], (Kind.SEND_B, Kind.RECV_B))
        columns = (*pair, back, *ends, t.replica[rows], t.microbatch[rows], t.slice[rows])
        order = np.lexsort((rows, pair[1], pair[0]))
        keys.append(np.stack([np.asarray(c)[order] for c in columns]))
    sent, received = keys
    if sent.shape != received.shape or not np.array_equal(sent, received):
        short = min(sent.shape[1], received.shape[1])
        differs = (sent[:, :short] != received[:, :short]).any(0)
        at = int(np.argmax(differs)) if differs.any() else short
        text = f"message {at}" if at >= sent.shape[1] else f"ranks {sent[0, at]} to {sent[1, at]}"
        raise TimelineError(f"sends and receives do not match: {text}")


def _posting(t: Timeline, made: Rows, used: Rows) -> Rows:
    """Where each receive must be posted: no later than any later receive of its pair of ranks."""
    pair = t.rank[made].astype(np.int64) * t.ranks + t.rank[used]
    post = used.copy()
    order = np.argsort(pair, kind="stable")  # made is ascending: within a pair, the sending order
    bounds = np.flatnonzero(np.diff(pair[order], prepend=-1, append=-1))
    for low, high in zip(bounds[:-1], bounds[1:]):
        part = order[low:high]
        post[part] = np.minimum.accumulate(used[part][::-1])[::-1]
    return post
