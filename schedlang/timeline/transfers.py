"""The sends and receives of a timeline: where they stand, those of parked activations too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from schedlang.timeline.clock import Clock, Needs
from schedlang.timeline.needs import Places, dependencies
from schedlang.timeline.table import AWAY, COLUMNS, TRANSFERS, Kind, Rows, Timeline, TimelineError

# where a row stands at its place: receives and HOLD, GIVE, the operation itself, its sends
POST, GIVEN, SELF, SENT = range(4)
PLACE = 8


@dataclass(frozen=True)
class _Parking:
    """What goes to a partner and comes back: its rows, and before which rows it is taken in."""

    evict: Rows
    load: Rows
    hold: Rows
    give: Rows


def with_transfers(timeline: Timeline, lookahead: int = 1) -> Timeline:
    """The same order with a row for each send and for each posting of a receive.

    A send follows the operation that makes its tensors. A receive is posted `lookahead` compute
    operations before the one that uses it, or earlier: per pair of ranks receives stand in the
    order of the sends, because that is how gloo and NCCL match them. A partner posts HOLD before
    what is evicted is sent, and gives it back when it is to be loaded.
    """
    t = timeline.compute()
    made, used = dependencies(t)
    apart = t.rank[made] != t.rank[used]
    made, used = made[apart], used[apart]
    order = np.argsort(made * max(1, t.stages) + t.stage[used], kind="stable")
    made, used = made[order], used[order]
    park = _parking(t)
    post, hold, sent = _posts(t, made, used, park, lookahead)
    back = t.kind[made] != Kind.F
    kinds = (Kind.SEND_F, Kind.RECV_F), (Kind.SEND_B, Kind.RECV_B)
    sends, receives = (np.where(back, b, f) for f, b in zip(*kinds))
    return _inserted(
        t, replace(park, hold=hold), sent[len(made) :][: len(hold)],
        _Added(made, made * PLACE + SENT, sends, t.stage[used], None),
        _Added(used, post * PLACE + POST, receives, t.stage[made], sent[: len(made)]),
    )  # fmt: skip


def parked(timeline: Timeline) -> Timeline:
    """Without sends and receives, with the partner's side of what is parked on it."""
    if np.isin(timeline.kind, AWAY).any() or not (timeline.kind == Kind.EVICT).any():
        added = np.isin(timeline.kind, TRANSFERS)
        return timeline.pick(~added) if added.any() else timeline
    t = timeline.compute()
    park = _parking(t)
    return _inserted(t, park, park.evict)


@dataclass(frozen=True)
class _Added:
    """New rows: like the rows `like`, at `place`, with other columns; `turn` orders equal places."""

    like: Rows
    place: Rows
    kind: Any
    peer: Any
    turn: Rows | None
    rank: Any = None


def _inserted(t: Timeline, park: _Parking, sent: Rows, *added: _Added) -> Timeline:
    """The rows with those that are added, and with the partners' sides of what is parked."""
    if len(park.evict):
        partner = t.peer[park.evict], t.peer[park.load]
        # before the first row of the next rank is after the last of this one
        late = [2 * (at == t.starts[1:][p]) for at, p in zip((park.hold, park.give), partner)]
        hold, give = park.hold * PLACE + POST - late[0], park.give * PLACE + GIVEN - late[1]
        names = t.rank[park.evict], t.rank[park.load]
        added = (
            *added,
            _Added(park.evict, hold, np.full_like(hold, Kind.HOLD), names[0], sent, partner[0]),
            _Added(park.load, give, np.full_like(give, Kind.GIVE), names[1], None, partner[1]),
        )
    place = np.concatenate([np.arange(len(t)) * PLACE + SELF, *(a.place for a in added)])
    if len(park.evict):
        ranks = [t.rank[a.like] if a.rank is None else a.rank for a in added]
        turns = [np.zeros_like(a.place) if a.turn is None else a.turn for a in added]
        turn = np.concatenate([np.zeros(len(t), np.int64), *turns])
        order = np.lexsort((turn, place, np.concatenate([t.rank, *ranks])))
    else:
        order = np.argsort(place, kind="stable")  # made and used ascend within a pair of ranks
    found = {}
    for name in COLUMNS:
        column = getattr(t, name)
        own = [getattr(a, name, None) for a in added]
        parts = [column[a.like] if o is None else o for a, o in zip(added, own)]
        found[name] = np.concatenate([column, *parts], dtype=np.int32, casting="unsafe")[order]
        found[name].setflags(write=False)
    return replace(t, **found)


def _parking(t: Timeline) -> _Parking:
    """Where partners take in what is evicted and give it back: at a possible moment for all."""
    evict = np.flatnonzero((t.kind == Kind.EVICT) & (t.peer >= 0))
    none = np.zeros(0, dtype=np.int64)
    if not len(evict):
        return _Parking(none, none, none, none)
    if t.peer[evict].max() >= t.ranks:
        raise TimelineError(f"there is no rank {t.peer[evict].max()} to park activations on")
    table = Places(t)
    load = table.rows_of(Kind.LOAD)[tuple(column[evict] for column in table.where)]
    load = np.sort(load[load >= 0])
    made, used = dependencies(t)
    # every row takes some time here, so that what depends on another begins strictly later
    took = np.where(np.isin(t.kind, (Kind.F, Kind.I, Kind.W)), 4, np.where(t.kind == Kind.B, 8, 1))
    lag = np.zeros(len(made), dtype=np.int64)
    clock = Clock(t.starts, took.astype(np.int64), Needs.of(len(t), made, used, lag))
    clock.run()
    long = int(clock.end.max()) + 2
    moment = clock.start + t.rank.astype(np.int64) * long
    hold = np.searchsorted(moment, clock.start[evict] + t.peer[evict] * long)
    give = np.searchsorted(moment, clock.start[load] + t.peer[load] * long)
    return _Parking(evict, load, hold, give)


def _posts(
    t: Timeline, made: Rows, used: Rows, park: _Parking, lookahead: int
) -> tuple[Rows, Rows, Rows]:
    """Before which row each receive and each HOLD is posted, and when each message is sent.

    No later than any later receive of its pair of ranks, and after what was loaded before it.
    """
    ends = (made * PLACE + SENT, park.evict * PLACE + SELF, park.give * PLACE + GIVEN)
    sent = np.concatenate(ends)
    needed = np.concatenate([used, park.hold, park.load])
    source = np.concatenate([t.rank[made], t.rank[park.evict], t.peer[park.load]])
    target = np.concatenate([t.rank[used], t.peer[park.evict], t.rank[park.load]])
    pair = source.astype(np.int64) * t.ranks + target
    order = np.lexsort((sent, pair)) if len(park.evict) else np.argsort(pair, kind="stable")
    bounds = np.flatnonzero(np.diff(pair[order], prepend=-1, append=-1))
    n, loads = len(made), len(made) + len(park.evict)
    post = needed.copy()
    for low, high in zip(bounds[:-1], bounds[1:]):
        part = order[low:high]
        latest = np.minimum.accumulate(needed[part][::-1])[::-1]
        early = np.maximum(latest - lookahead, t.starts[target[part[0]]])
        post[part] = np.where(part < n, early, latest) if len(park.evict) else early
        if len(park.evict):
            loaded = np.maximum.accumulate(np.where(part >= loads, needed[part] + 1, 0))
            post[part] = np.maximum.accumulate(np.maximum(post[part], loaded))
    return post[:n], post[n:loads], sent
