"""The messages of a timeline: each is sent once, received once, in time and in one order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from schedlang.timeline.needs import BACKWARD, Places, describe
from schedlang.timeline.table import AWAY, TRANSFERS, Kind, Rows, Timeline, TimelineError

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
