"""Proof of a timeline before it runs: complete, in a possible order, its messages matched."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedlang.pipeline.timeline.memory import with_holds
from schedlang.pipeline.timeline.sharded_weights import check_shards
from schedlang.pipeline.timeline.simulation import Dependencies, Simulator, describe_deadlock
from schedlang.pipeline.timeline.table import (
    BACKWARD_KINDS,
    COMPUTE_GROUPS,
    MEMORY_GROUPS,
    PARTNER_KINDS,
    TRANSFER_KINDS,
    Kind,
    RowIndex,
    Rows,
    Timeline,
    TimelineError,
    barrier_waits,
    dependencies,
    describe_row,
)
from schedlang.pipeline.timeline.versions import check_versions

# -- sends and receives ----------------------------------------------------------------------------


# order of rows at one place: receives, the operation itself, its sends
POST, SELF, SENT, PLACE = range(4)


def with_transfers(timeline: Timeline, lookahead: int = 1) -> Timeline:
    """Add a row for each send and for each posting of a receive.

    A send follows the operation that makes its tensors. A receive is posted `lookahead` compute
    operations before the one that uses it, or earlier: per pair of ranks receives are in the order
    of the sends, because gloo and NCCL match them in that order. Partners receive evicted
    activations and send them back (`with_holds`).
    """
    t = timeline.compute()
    src, dst = dependencies(t)
    crossing = t.rank[src] != t.rank[dst]
    src, dst = src[crossing], dst[crossing]
    order = np.argsort(src * max(1, t.stages) + t.stage[dst], kind="stable")
    src, dst = src[order], dst[order]
    is_backward = t.kind[src] != Kind.F
    post = np.maximum(_latest_post(t, src, dst) - lookahead, t.starts[t.rank[dst]])
    sends = {"kind": np.where(is_backward, Kind.SEND_B, Kind.SEND_F), "peer": t.stage[dst]}
    receives = {"kind": np.where(is_backward, Kind.RECV_B, Kind.RECV_F), "peer": t.stage[src]}
    result = t.with_copies(
        np.arange(len(t)) * PLACE + SELF,
        (src, src * PLACE + SENT, sends),  # equal turns: as they were sent
        (dst, post * PLACE + POST, receives),
    )
    return with_holds(result)


def _latest_post(t: Timeline, src: Rows, dst: Rows) -> Rows:
    """Return where each receive must be posted: not after a later receive of its rank pair."""
    pair = t.rank[src].astype(np.int64) * t.ranks + t.rank[dst]
    post = dst.copy()
    order = np.argsort(pair, kind="stable")  # made is ascending: within a pair, the sending order
    bounds = np.flatnonzero(np.diff(pair[order], prepend=-1, append=-1))
    for low, high in zip(bounds[:-1], bounds[1:]):
        part = order[low:high]
        post[part] = np.minimum.accumulate(dst[part][::-1])[::-1]
    return post


# -- each message is sent once, received once, in time and in order --------------------------------


SENDS, RECEIVES = (Kind.SEND_F, Kind.SEND_B), (Kind.RECV_F, Kind.RECV_B)
EVICTION_KINDS = (Kind.EVICT, Kind.HOLD, Kind.GIVE, Kind.LOAD)  # send, receive, send, receive


@dataclass(frozen=True)
class MatchedMessages:
    """Rows of each message: its send, its receive, and the row that waits for it.

    Evicted activations are sent by EVICT and received by HOLD, which waits for them; GIVE sends
    them back to LOAD, and the backward waits for them.
    """

    send: Rows
    receive: Rows
    used: Rows


def match_messages(t: Timeline, src: Rows, dst: Rows) -> MatchedMessages | None:
    """Match the messages of a timeline with transfers; None for one without.

    `src` and `dst`: rows of the timeline that depend on each other, on different ranks. Raises
    TimelineError for a message that is missing, double, useless, too early, too late or out of
    order: per pair of ranks and direction receives are in the order of the sends.
    """
    if not np.isin(t.kind, (*TRANSFER_KINDS, *PARTNER_KINDS)).any():
        return None
    expected = _key(t, src, t.kind[src] != Kind.F, t.stage[src], t.stage[dst])
    order = np.argsort(expected, kind="stable")
    src, dst, expected = src[order], dst[order], expected[order]
    matched = []
    for outgoing in (True, False):
        rows = np.flatnonzero(np.isin(t.kind, SENDS if outgoing else RECEIVES))
        ends = (t.stage[rows], t.peer[rows])
        keys = _key(t, rows, t.kind[rows] >= Kind.SEND_B, *(ends if outgoing else ends[::-1]))
        rows, keys = _sorted_unique(t, rows, keys)
        _check_wanted(t, rows, keys, expected, src if outgoing else dst, outgoing)
        matched.append(rows)
    send, receive = matched
    _check_in_time(t, src, send, receive, dst)
    parts = [(send, receive, dst), *_parked(t)]
    for part in parts:  # evicted activations have channels of their own, in both directions
        _check_message_order(t, *part[:2])
    return MatchedMessages(*(np.concatenate(rows) for rows in zip(*parts)))


def _key(t: Timeline, rows: Rows, is_backward: Any, source: Any, target: Any) -> Rows:
    """Return a number for each message that identifies it."""
    key = is_backward.astype(np.int64) * t.stages + source
    for column, size in (
        (target, t.stages),
        (t.replica[rows], t.replicas),
        (t.microbatch[rows], t.microbatches),
        (t.slice[rows], t.slices),
    ):
        key = key * size + column
    numbers: Rows = key
    return numbers


def _sorted_unique(t: Timeline, rows: Rows, keys: Rows) -> tuple[Rows, Rows]:
    order = np.argsort(keys, kind="stable")
    rows, keys = rows[order], keys[order]
    twice = np.flatnonzero(keys[1:] == keys[:-1])
    if len(twice):
        raise TimelineError(f"{describe_row(t, rows[twice[0] + 1])} is there twice")
    return rows, keys


def _check_wanted(
    t: Timeline, rows: Rows, keys: Rows, expected: Rows, ends: Rows, outgoing: bool
) -> None:
    """Check that each wanted message has exactly one row; raises TimelineError if not."""
    if np.array_equal(keys, expected):
        return
    missing = np.flatnonzero(~np.isin(expected, keys))
    title = "sends and receives do not match"
    if len(missing):
        end = describe_row(t, ends[missing[0]])
        text = f"nothing sends what {end} makes" if outgoing else f"nothing receives for {end}"
        raise TimelineError(f"{title}: {text}")
    extra = rows[np.flatnonzero(~np.isin(keys, expected))[0]]
    raise TimelineError(
        f"{title}: {describe_row(t, extra)} belongs to no operation of another rank"
    )


def _check_in_time(t: Timeline, src: Rows, send: Rows, receive: Rows, dst: Rows) -> None:
    for first, then, reason in ((src, send, "sends what {} makes"), (receive, dst, "waits for {}")):
        misplaced = np.flatnonzero((first > then) | (t.rank[first] != t.rank[then]))
        if len(misplaced):
            a, b = describe_row(t, first[misplaced[0]]), describe_row(t, then[misplaced[0]])
            raise TimelineError(f"{b} {reason.format(a)}, which stands later or on another rank")


def _parked(t: Timeline) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
    """Return the messages of evicted activations, as the fields of `MatchedMessages`: there, and
    back."""
    ends, keys = [], []
    for kind in EVICTION_KINDS:
        rows = np.flatnonzero(t.kind == kind)
        rows, key = _sorted_unique(t, rows, _key(t, rows, rows < 0, t.stage[rows], t.stage[rows]))
        ends.append(rows)
        keys.append(key)
    for k, kind in enumerate(EVICTION_KINDS):
        for rows, side in zip(ends, keys):
            unmatched = np.flatnonzero(~np.isin(side, keys[k]))
            if len(unmatched):
                raise TimelineError(
                    f"{describe_row(t, rows[unmatched[0]])} waits for a {kind.name}"
                )
    evict, hold, give, load = ends
    for side, counterpart in ((evict, hold), (hold, evict), (give, load), (load, give)):
        mismatched = np.flatnonzero(t.peer[side] != t.rank[counterpart])
        if len(mismatched):
            a, b = describe_row(t, side[mismatched[0]]), describe_row(t, counterpart[mismatched[0]])
            raise TimelineError(f"{a} does not name the rank of {b}")
    premature = np.flatnonzero(give < hold)
    if len(premature):
        a, b = describe_row(t, give[premature[0]]), describe_row(t, hold[premature[0]])
        raise TimelineError(f"{a} waits for {b}, which stands later")
    table = RowIndex(t)
    needed = table.rows_of(*BACKWARD_KINDS)[tuple(column[load] for column in table.where)]
    return (evict, hold, hold), (give, load, needed)


def _check_message_order(t: Timeline, send: Rows, receive: Rows) -> None:
    """Check that per pair of ranks receives are in the order of the sends."""
    pair = t.rank[send].astype(np.int64) * t.ranks + t.rank[receive]
    order = np.argsort(pair * (len(t) + 1) + send, kind="stable")
    pair, receive, send = pair[order], receive[order], send[order]
    swapped = np.flatnonzero((pair[1:] == pair[:-1]) & (receive[1:] < receive[:-1]))
    if len(swapped):
        k = int(swapped[0])
        raise TimelineError(
            f"sends and receives do not match: {describe_row(t, send[k])} comes before "
            f"{describe_row(t, send[k + 1])}, {describe_row(t, receive[k])} after its receive"
        )


# -- messages of two ranks do not block each other -------------------------------------------------
# The rule of NCCL and similar libraries: sends and receives of two ranks in one communicator are in
# one queue at each end, in the order in which they are posted, and each runs once both ends have
# reached it.  A receive that is posted early then delays all that its rank posts after it.


Lane = tuple[int, int, int]  # direction (0: between stages, 1: evicted, 2: given back), two ranks


def check_queues(timeline: Timeline, *, one_way: bool = True) -> None:
    """Raise TimelineError unless a timeline with transfers ends under that rule.

    one_way: each direction between two ranks has a queue of its own; else both share one.
    """
    t = timeline
    src, dst = dependencies(t)
    crossing = t.rank[src] != t.rank[dst]
    matched = match_messages(t, src[crossing], dst[crossing])
    if matched is None:
        return
    posts: dict[int, list[tuple[int, Lane]]] = defaultdict(list)
    awaited: dict[int, list[int]] = defaultdict(list)
    for k, (send, receive, user) in enumerate(
        zip(matched.send.tolist(), matched.receive.tolist(), matched.used.tolist())
    ):
        lane = _lane(t, send, receive, one_way)
        posts[send].append((k, lane))
        posts[receive].append((k, lane))
        awaited[user].append(k)
    _Run(t, posts, awaited).end()


def _lane(t: Timeline, send: int, receive: int, one_way: bool) -> Lane:
    kind, ends = int(t.kind[send]), (int(t.rank[send]), int(t.rank[receive]))
    channel = {int(Kind.EVICT): 1, int(Kind.GIVE): 2}.get(kind, 0)
    return (channel, *(ends if one_way else (min(ends), max(ends))))


class _Run:
    """Runs the rows of all ranks as far as possible."""

    def __init__(
        self, t: Timeline, posts: dict[int, list[tuple[int, Lane]]], awaited: dict[int, list[int]]
    ) -> None:
        self.t, self.posts, self.needs = t, posts, awaited
        self.queues: dict[tuple[Lane, int], deque[int]] = defaultdict(deque)
        self.done: set[int] = set()
        self.at = t.starts[:-1].tolist()
        self.posted = [False] * len(self.at)  # whether the current row has posted its messages

    def end(self) -> None:
        """Run to the end of all rows; raises TimelineError with the ranks that wait."""
        advanced = True
        while advanced:
            advanced = False
            for rank, last in enumerate(self.t.starts[1:].tolist()):
                while self.at[rank] < last and self._row(rank, self.at[rank]):
                    self.at[rank] += 1
                    self.posted[rank], advanced = False, True
        for rank, last in enumerate(self.t.starts[1:].tolist()):
            if self.at[rank] < last:
                raise TimelineError(self._stuck(rank))

    def _row(self, rank: int, row: int) -> bool:
        """Run one row; False if it waits for a message."""
        if not self.posted[rank]:
            self.posted[rank] = True
            for message, lane in self.posts.get(row, ()):
                self.queues[lane, rank].append(message)
                self._complete_messages(lane)
        return all(message in self.done for message in self.needs.get(row, ()))

    def _complete_messages(self, lane: Lane) -> None:
        """Complete messages that both ends have reached, and those behind them."""
        own_queue, peer_queue = (self.queues[lane, rank] for rank in lane[1:])
        while own_queue and peer_queue and own_queue[0] == peer_queue[0]:
            self.done.add(own_queue.popleft())
            peer_queue.popleft()

    def _stuck(self, rank: int) -> str:
        row = self.at[rank]
        message = next(k for k in self.needs[row] if k not in self.done)
        ends = {r: lane for r, entries in self.posts.items() for k, lane in entries if k == message}
        text = f"messages block each other: {describe_row(self.t, row)} waits"
        lane = next(iter(ends.values()))
        for end in lane[1:]:
            queue = self.queues[lane, end]
            if queue and queue[0] != message:
                first = next(
                    r
                    for r, entries in self.posts.items()
                    if (queue[0], lane) in entries and self.t.rank[r] == end
                )
                text += (
                    f", and on rank {end} {describe_row(self.t, first)} stands before its message"
                )
        return text


def check_timeline(timeline: Timeline) -> None:
    """Raise TimelineError unless every operation occurs once, in a possible order, and the order
    ends.

    Each microbatch goes through one replica; each (stage, microbatch, slice) has one F and one B or
    one I and one W, all rows of a stage on one rank, F first and I before W, slices forward in
    order and backward in reverse; evicted or offloaded activations come back before their backward.
    A timeline without backwards is an evaluation. Weights are read in versions that a STEP has
    made.  Transfers, if any, are matched in the order in which they were sent.
    """
    t = timeline
    if any(int(c.min(initial=0)) < 0 for c in (t.stage, t.replica, t.microbatch, t.slice)):
        raise TimelineError("stages, replicas, microbatches and slices are counted from 0")
    _check_ranks(t)
    table = RowIndex(t)
    forward, backward, weight = (table.rows_of(*kinds) for kinds in COMPUTE_GROUPS)
    _check_complete(table, forward, backward, weight)
    _check_inputs(table, forward, backward, weight)
    check_versions(t)
    check_shards(t)
    src, dst = dependencies(t)
    crossing = t.rank[src] != t.rank[dst]
    matched = match_messages(t, src[crossing], dst[crossing])
    _check_ends(t, src, dst, crossing, matched)


def _check_ranks(t: Timeline) -> None:
    """Check that all rows of a stage of a replica are on one rank."""
    strays = np.flatnonzero(
        (t.replica_ranks[t.replica, t.stage] != t.rank) & ~np.isin(t.kind, PARTNER_KINDS)
    )
    strays = strays[t.kind[strays] != Kind.BARRIER]
    if len(strays):
        row = int(strays[0])
        rank = int(t.replica_ranks[t.replica[row], t.stage[row]])
        raise TimelineError(
            f"{describe_row(t, row)} is not with the other operations of its stage,"
            " which are on rank "
            f"{rank}: all must be on the same rank"
        )


def _check_complete(table: RowIndex, forward: Rows, backward: Rows, weight: Rows) -> None:
    """Check that every operation occurs once, each microbatch on one replica."""
    through: Any = (forward >= 0).any(axis=(1, 3)) | (backward >= 0).any(axis=(1, 3))
    if (through.sum(axis=0) > 1).any():
        several = int(np.argmax(through.sum(axis=0) > 1))
        replicas = " and ".join(map(str, np.flatnonzero(through[:, several]).tolist()))
        raise TimelineError(
            f"microbatch {several} goes through replicas {replicas}, not through one"
        )
    through[0] |= ~through.any(axis=0)
    required = np.broadcast_to(through[:, None, :, None], forward.shape)
    if (required & (forward < 0)).any():
        raise TimelineError(f"{table.name(np.argmax(required & (forward < 0)))} has no forward")
    trained = bool((backward >= 0).any())
    if trained and ((backward >= 0) != (forward >= 0)).any():
        name = table.name(np.argmax((backward >= 0) != (forward >= 0)))
        raise TimelineError(f"{name} has a forward without a backward, or the reverse")
    split = np.where(backward >= 0, table.t.kind[backward] == Kind.I, False)
    if (split != (weight >= 0)).any():
        name = table.name(np.argmax(split != (weight >= 0)))
        raise TimelineError(f"{name} has an input gradient without a weight gradient, or reverse")


def _check_inputs(table: RowIndex, forward: Rows, backward: Rows, weight: Rows) -> None:
    """Check that a rank's own inputs come before the rows that need them."""
    _check_before(table, forward, backward, "F before B")
    _check_before(table, backward, weight, "I before W")
    _check_before(table, forward[..., :-1], forward[..., 1:], "slices forward in order")
    _check_before(table, backward[..., 1:], backward[..., :-1], "slices backward in reverse order")
    present = set(np.flatnonzero(np.bincount(table.t.kind, minlength=len(Kind))).tolist())
    rows = {
        kind: table.rows_of(kind) for kinds in MEMORY_GROUPS for kind in kinds if kind in present
    }
    for first, then in (kinds for kinds in MEMORY_GROUPS if len(kinds) == 2):
        if first in rows or then in rows:
            evicted, returned = (rows.get(k, np.full(table.shape, -1)) for k in (first, then))
            _check_returns(table, evicted, returned, first, then)
    for kind, kind_rows in rows.items():
        for name, counterpart in (("forward", forward), ("backward", backward)):
            orphaned = (kind_rows >= 0) & (counterpart < 0)
            if orphaned.any():
                row = describe_row(table.t, int(kind_rows[orphaned].ravel()[0]))
                raise TimelineError(f"{row} belongs to a {name} that is not there")
        _check_before(table, forward, kind_rows, f"F before {kind.name}")
        _check_before(table, kind_rows, backward, f"{kind.name} before B")
    if Kind.RECOMPUTE in rows:
        for kind in (Kind.LOAD, Kind.RELOAD):
            if kind in rows:
                _check_before(
                    table, rows[kind], rows[Kind.RECOMPUTE], f"{kind.name} before RECOMPUTE"
                )


def _check_before(table: RowIndex, first: Rows, then: Rows, rule: str) -> None:
    """Check that, where both exist, the first comes before the second."""
    violations = (first >= 0) & (then >= 0) & (first > then)
    if violations.any():
        k = int(np.argmax(violations))
        a, b = describe_row(table.t, int(first.flat[k])), describe_row(table.t, int(then.flat[k]))
        raise TimelineError(f"{b} waits for {a}, which stands later: {rule}, on the same rank")


def _check_returns(table: RowIndex, evicted: Rows, returned: Rows, first: Kind, then: Kind) -> None:
    """Check that evicted or offloaded activations return later, from the same partner."""
    t = table.t
    unpaired = (evicted >= 0) != (returned >= 0)
    if unpaired.any():
        k = int(np.argmax(unpaired))
        row = max(int(evicted.flat[k]), int(returned.flat[k]))
        missing = then if evicted.flat[k] >= 0 else first
        raise TimelineError(f"{describe_row(t, row)} has no {missing.name}")
    _check_before(table, evicted, returned, f"{first.name} before {then.name}")
    if first is not Kind.EVICT:
        return
    evict, load = evicted[evicted >= 0], returned[evicted >= 0]
    for rows in (evict, load):
        bad_peers = (t.peer[rows] < 0) | (t.peer[rows] >= t.ranks) | (t.peer[rows] == t.rank[rows])
        bad_peers |= t.peer[rows] != t.peer[evict]
        if bad_peers.any():
            row = int(rows[np.argmax(bad_peers)])
            raise TimelineError(
                f"{describe_row(t, row)} names no partner, or another one than EVICT"
            )


def _check_ends(
    t: Timeline, src: Rows, dst: Rows, crossing: Rows, matched: MatchedMessages | None
) -> None:
    """Check that every rank reaches its end: no operations wait for each other in a circle."""
    pairs = [(src[~crossing], dst[~crossing])]
    if matched is None:
        pairs.append((src[crossing], dst[crossing]))
    else:
        pairs.append((matched.send, matched.used))
    if (t.kind == Kind.BARRIER).any():
        pairs += barrier_waits(t, np.zeros(len(t), dtype=bool))
    first, then = (np.concatenate(rows) for rows in zip(*pairs))
    live = (t.rank[first] != t.rank[then]) | (first > then)
    first, then = first[live].astype(np.int64), then[live]
    zeros = np.zeros(len(t), dtype=np.int64)
    clock = Simulator(t.starts, zeros, Dependencies.of(len(t), first, then, zeros[: len(first)]))
    if waits_for := clock.run():
        raise TimelineError("the order never ends: " + describe_deadlock(t, waits_for))
