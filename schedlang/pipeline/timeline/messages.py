"""The messages of a timeline: sent once, received once, in one order, without deadlock."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from schedlang.pipeline.timeline.memory import with_holds
from schedlang.pipeline.timeline.needs import BACKWARD, Places, dependencies, describe
from schedlang.pipeline.timeline.table import (
    AWAY,
    COLUMNS,
    TRANSFERS,
    Kind,
    Rows,
    Timeline,
    TimelineError,
)

# -- where sends and receives stand ----------------------------------------------------------------


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
    """Return where each receive must be posted: not after a later receive of its rank pair."""
    pair = t.rank[made].astype(np.int64) * t.ranks + t.rank[used]
    post = used.copy()
    order = np.argsort(pair, kind="stable")  # made is ascending: within a pair, the sending order
    bounds = np.flatnonzero(np.diff(pair[order], prepend=-1, append=-1))
    for low, high in zip(bounds[:-1], bounds[1:]):
        part = order[low:high]
        post[part] = np.minimum.accumulate(used[part][::-1])[::-1]
    return post


# -- each message is sent once, received once, in time and in order --------------------------------


SENDS, RECEIVES = (Kind.SEND_F, Kind.SEND_B), (Kind.RECV_F, Kind.RECV_B)
PARKED = (Kind.EVICT, Kind.HOLD, Kind.GIVE, Kind.LOAD)  # sent and received, sent and received


@dataclass(frozen=True)
class Messages:
    """Rows of each message: its send and its receive, and what waits for it.

    What is parked is sent by EVICT and received by HOLD, which waits for it; GIVE sends it back to
    LOAD, and the backward waits for it.
    """

    send: Rows
    receive: Rows
    used: Rows

    def waits(self, rendezvous: bool) -> list[tuple[Rows, Rows]]:
        """Pairs of rows of which the second waits for the first.

        With `rendezvous` a send waits for its receive to be posted, too: for the row before a HOLD,
        because that does not end before the send.
        """
        found = [(self.send, self.used)]
        if rendezvous:
            itself = self.receive == self.used
            found += [((self.receive - itself)[self.receive > 0], self.send[self.receive > 0])]
        return found


def messages(t: Timeline, made: Rows, used: Rows) -> Messages | None:
    """The messages of a timeline with transfers, None for one without.

    `made` and `used`: rows of the timeline that depend on each other, on different ranks. Raises
    TimelineError for a message that is missing, double, useless, too early, too late or out of
    turn: per pair of ranks and direction receives stand in the order of the sends.
    """
    if not np.isin(t.kind, (*TRANSFERS, *AWAY)).any():
        return None
    wanted = _key(t, made, t.kind[made] != Kind.F, t.stage[made], t.stage[used])
    order = np.argsort(wanted, kind="stable")
    made, used, wanted = made[order], used[order], wanted[order]
    found = []
    for outgoing in (True, False):
        rows = np.flatnonzero(np.isin(t.kind, SENDS if outgoing else RECEIVES))
        ends = (t.stage[rows], t.peer[rows])
        keys = _key(t, rows, t.kind[rows] >= Kind.SEND_B, *(ends if outgoing else ends[::-1]))
        rows, keys = _sorted(t, rows, keys)
        _same(t, rows, keys, wanted, made if outgoing else used, outgoing)
        found.append(rows)
    send, receive = found
    _in_time(t, made, send, receive, used)
    parts = [(send, receive, used), *_parked(t)]
    for part in parts:  # what is parked goes through channels of its own, there and back
        _in_turn(t, *part[:2])
    return Messages(*(np.concatenate(rows) for rows in zip(*parts)))


def _key(t: Timeline, rows: Rows, back: Any, source: Any, target: Any) -> Rows:
    """A number for each message that names it."""
    key = back.astype(np.int64) * t.stages + source
    for column, size in (
        (target, t.stages),
        (t.replica[rows], t.replicas),
        (t.microbatch[rows], t.microbatches),
        (t.slice[rows], t.slices),
    ):
        key = key * size + column
    found: Rows = key
    return found


def _sorted(t: Timeline, rows: Rows, keys: Rows) -> tuple[Rows, Rows]:
    order = np.argsort(keys, kind="stable")
    rows, keys = rows[order], keys[order]
    twice = np.flatnonzero(keys[1:] == keys[:-1])
    if len(twice):
        raise TimelineError(f"{describe(t, rows[twice[0] + 1])} is there twice")
    return rows, keys


def _same(t: Timeline, rows: Rows, keys: Rows, wanted: Rows, ends: Rows, outgoing: bool) -> None:
    """There is a row for each message that is wanted, and no other."""
    if np.array_equal(keys, wanted):
        return
    missing = np.flatnonzero(~np.isin(wanted, keys))
    title = "sends and receives do not match"
    if len(missing):
        end = describe(t, ends[missing[0]])
        text = f"nothing sends what {end} makes" if outgoing else f"nothing receives for {end}"
        raise TimelineError(f"{title}: {text}")
    more = rows[np.flatnonzero(~np.isin(keys, wanted))[0]]
    raise TimelineError(f"{title}: {describe(t, more)} belongs to no operation of another rank")


def _in_time(t: Timeline, made: Rows, send: Rows, receive: Rows, used: Rows) -> None:
    for first, then, why in ((made, send, "sends what {} makes"), (receive, used, "waits for {}")):
        wrong = np.flatnonzero((first > then) | (t.rank[first] != t.rank[then]))
        if len(wrong):
            a, b = describe(t, first[wrong[0]]), describe(t, then[wrong[0]])
            raise TimelineError(f"{b} {why.format(a)}, which stands later or on another rank")


def _parked(t: Timeline) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
    """The messages of parked activations, as the fields of `Messages`: there, and back."""
    ends, keys = [], []
    for kind in PARKED:
        rows = np.flatnonzero(t.kind == kind)
        rows, key = _sorted(t, rows, _key(t, rows, rows < 0, t.stage[rows], t.stage[rows]))
        ends.append(rows)
        keys.append(key)
    for k, kind in enumerate(PARKED):
        for rows, mine in zip(ends, keys):
            alone = np.flatnonzero(~np.isin(mine, keys[k]))
            if len(alone):
                raise TimelineError(f"{describe(t, rows[alone[0]])} waits for a {kind.name}")
    evict, hold, give, load = ends
    for mine, other in ((evict, hold), (hold, evict), (give, load), (load, give)):
        wrong = np.flatnonzero(t.peer[mine] != t.rank[other])
        if len(wrong):
            a, b = describe(t, mine[wrong[0]]), describe(t, other[wrong[0]])
            raise TimelineError(f"{a} does not name the rank of {b}")
    early = np.flatnonzero(give < hold)
    if len(early):
        a, b = describe(t, give[early[0]]), describe(t, hold[early[0]])
        raise TimelineError(f"{a} waits for {b}, which stands later")
    table = Places(t)
    needed = table.rows_of(*BACKWARD)[tuple(column[load] for column in table.where)]
    return (evict, hold, hold), (give, load, needed)


def _in_turn(t: Timeline, send: Rows, receive: Rows) -> None:
    """Per pair of ranks, receives stand in the order of the sends."""
    pair = t.rank[send].astype(np.int64) * t.ranks + t.rank[receive]
    order = np.argsort(pair * (len(t) + 1) + send, kind="stable")
    pair, receive, send = pair[order], receive[order], send[order]
    wrong = np.flatnonzero((pair[1:] == pair[:-1]) & (receive[1:] < receive[:-1]))
    if len(wrong):
        k = int(wrong[0])
        raise TimelineError(
            f"sends and receives do not match: {describe(t, send[k])} comes before "
            f"{describe(t, send[k + 1])}, {describe(t, receive[k])} after its receive"
        )


# -- messages of two ranks do not block each other -------------------------------------------------
# So it is with NCCL and its kin: sends and receives of two ranks in one communicator stand in one
# queue at each end, in the order in which they are posted, and each runs until both ends have come
# to it.  A receive that is posted early then holds up all that its rank posts after it.


Lane = tuple[int, int, int]  # which way (between stages, out or home), and two ranks


def check_queues(timeline: Timeline, *, one_way: bool = True) -> None:
    """Raise TimelineError unless a timeline with transfers ends under that rule.

    one_way: each direction between two ranks has a queue of its own; else both share one.
    """
    t = timeline
    made, used = dependencies(t)
    apart = t.rank[made] != t.rank[used]
    mail = messages(t, made[apart], used[apart])
    if mail is None:
        return
    posts: dict[int, list[tuple[int, Lane]]] = defaultdict(list)
    needs: dict[int, list[int]] = defaultdict(list)
    for k, (send, receive, use) in enumerate(
        zip(mail.send.tolist(), mail.receive.tolist(), mail.used.tolist())
    ):
        lane = _lane(t, send, receive, one_way)
        posts[send].append((k, lane))
        posts[receive].append((k, lane))
        needs[use].append(k)
    _Run(t, posts, needs).end()


def _lane(t: Timeline, send: int, receive: int, one_way: bool) -> Lane:
    kind, ends = int(t.kind[send]), (int(t.rank[send]), int(t.rank[receive]))
    way = {int(Kind.EVICT): 1, int(Kind.GIVE): 2}.get(kind, 0)
    return (way, *(ends if one_way else (min(ends), max(ends))))


class _Run:
    """All ranks run their rows as far as they come."""

    def __init__(
        self, t: Timeline, posts: dict[int, list[tuple[int, Lane]]], needs: dict[int, list[int]]
    ) -> None:
        self.t, self.posts, self.needs = t, posts, needs
        self.queues: dict[tuple[Lane, int], deque[int]] = defaultdict(deque)
        self.done: set[int] = set()
        self.at = t.starts[:-1].tolist()
        self.posted = [False] * len(self.at)  # whether what the present row posts is posted

    def end(self) -> None:
        """Come to the end of all rows, or say who waits for whom."""
        moved = True
        while moved:
            moved = False
            for rank, last in enumerate(self.t.starts[1:].tolist()):
                while self.at[rank] < last and self._row(rank, self.at[rank]):
                    self.at[rank] += 1
                    self.posted[rank], moved = False, True
        for rank, last in enumerate(self.t.starts[1:].tolist()):
            if self.at[rank] < last:
                raise TimelineError(self._stuck(rank))

    def _row(self, rank: int, row: int) -> bool:
        """Run one row; False if it waits for a message."""
        if not self.posted[rank]:
            self.posted[rank] = True
            for message, lane in self.posts.get(row, ()):
                self.queues[lane, rank].append(message)
                self._settle(lane)
        return all(message in self.done for message in self.needs.get(row, ()))

    def _settle(self, lane: Lane) -> None:
        """Messages that both ends have come to run, and let those behind them."""
        here, there = (self.queues[lane, rank] for rank in lane[1:])
        while here and there and here[0] == there[0]:
            self.done.add(here.popleft())
            there.popleft()

    def _stuck(self, rank: int) -> str:
        row = self.at[rank]
        message = next(k for k in self.needs[row] if k not in self.done)
        ends = {r: lane for r, some in self.posts.items() for k, lane in some if k == message}
        text = f"messages block each other: {describe(self.t, row)} waits"
        lane = next(iter(ends.values()))
        for end in lane[1:]:
            queue = self.queues[lane, end]
            if queue and queue[0] != message:
                first = next(
                    r
                    for r, some in self.posts.items()
                    if (queue[0], lane) in some and self.t.rank[r] == end
                )
                text += f", and on rank {end} {describe(self.t, first)} stands before its message"
        return text
