"""The proof of a timeline against a naive simulator: what it accepts runs, what it refuses not."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedlang.pipeline.timeline.proof import check_timeline, with_transfers
from schedlang.pipeline.timeline.table import Kind, Op, Timeline, TimelineError, timeline_from_rows
from tests.timelines import B, F, I, Shape, W, scheduled, shapes

Rows = list[list[Op]]
SENDS = (Kind.SEND_F, Kind.SEND_B, Kind.EVICT, Kind.GIVE)
RECEIVES = (Kind.RECV_F, Kind.RECV_B, Kind.HOLD, Kind.LOAD)
BOUNDS = ((Kind.RECOMPUTE,), (Kind.OFFLOAD, Kind.RELOAD), (Kind.EVICT, Kind.LOAD))


def rows_of(t: Timeline) -> Rows:
    return [list(t.rows(rank)) for rank in range(t.ranks)]


@dataclass
class Channels:
    """Messages between ranks: the first that is sent is the first that is received.

    What is evicted and what is given back go through channels of their own.
    """

    sent: dict[object, deque[object]] = field(default_factory=lambda: defaultdict(deque))
    posted: dict[object, deque[object]] = field(default_factory=lambda: defaultdict(deque))
    arrived: set[object] = field(default_factory=set)

    def meet(self, channel: object, key: object, sending: bool) -> bool:
        """Put in a message or a receive; False where the two that meet do not match."""
        mine, others = (self.sent, self.posted) if sending else (self.posted, self.sent)
        if not others[channel]:
            mine[channel].append(key)
            return True
        self.arrived.add(key)
        return others[channel].popleft() == key


def runs(rows: Rows, shape: Shape) -> bool:
    """Whether ranks that run these rows come to an end and have done just what `shape` asks."""
    needs = shape.needs()
    homes = {op: shape.homes[op.replica][op.stage] for op in needs}
    plain = [op for ops in rows for op in ops if op.kind not in SENDS + RECEIVES or op in needs]
    if Counter(plain) != Counter(needs.keys()):
        return False
    if any(homes[op] != rank for rank, ops in enumerate(rows) for op in ops if op in needs):
        return False
    channels, done, at = Channels(), set[tuple[int, Op]](), [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(rows):
            while at[rank] < len(ops):
                op = ops[at[rank]]
                ready = op not in needs or needed(op, rank, needs, homes, channels, done)
                if ready:
                    ready = op.kind not in SENDS + RECEIVES or mail(op, rank, shape, channels, done)
                if ready is None:
                    return False
                if not ready:
                    break
                done.add((rank, op))
                at[rank] += 1
                moved = True
    over = not any(channels.sent.values()) and not any(channels.posted.values())
    return over and all(here == len(ops) for here, ops in zip(at, rows))


def needed(
    op: Op,
    rank: int,
    needs: dict[Op, set[Op]],
    homes: dict[Op, int],
    channels: Channels,
    done: set[tuple[int, Op]],
) -> bool | None:
    """Whether all that an operation needs is there; None where it never will be."""
    for before in needs[op]:
        if homes[before] == rank and (rank, before) not in done:
            return None  # a rank runs its rows in order
        if homes[before] != rank and (letter(before, op.stage), rank) not in channels.arrived:
            return False
        loaded = (("give", *place(op)), rank) in channels.arrived
        if before.kind is Kind.LOAD and op.kind in (B, I) and not loaded:
            return False
    return True


def mail(
    op: Op, rank: int, shape: Shape, channels: Channels, done: set[tuple[int, Op]]
) -> bool | None:
    """Send, post or take; None where that never can be."""
    other = partner(op, shape)
    if other is None or other == rank:
        return None
    key, sending = name(op), op.kind in SENDS
    target = other if sending else rank
    if op.kind in (Kind.SEND_F, Kind.SEND_B) and not any((rank, x) in done for x in makers(op)):
        return None
    if op.kind is Kind.GIVE and (("evict", *place(op)), rank) not in channels.arrived:
        return None
    channel = (rank, other) if sending else (other, rank), key[0] in ("evict", "give") and key[0]
    if op.kind is Kind.HOLD and not channels.sent[channel]:
        return False  # it waits; the others are only posted
    return channels.meet(channel, (key, target), sending) or None


def place(op: Op) -> tuple[int, int, int, int]:
    return op.stage, op.microbatch, op.replica, op.slice


def letter(made: Op, to: int) -> tuple[object, ...]:
    return made.kind is not F, made.stage, to, *place(made)[1:]


def makers(op: Op) -> list[Op]:
    kinds = (F,) if op.kind is Kind.SEND_F else (B, I)
    return [Op(kind, op.stage, op.microbatch, op.replica, op.slice) for kind in kinds]


def name(op: Op) -> tuple[object, ...]:
    """What a message is called, at both its ends."""
    if op.kind in (Kind.EVICT, Kind.HOLD):
        return ("evict", *place(op))
    if op.kind in (Kind.GIVE, Kind.LOAD):
        return ("give", *place(op))
    ends = (op.stage, op.peer) if op.kind in SENDS else (op.peer, op.stage)
    return op.kind in (Kind.SEND_B, Kind.RECV_B), *ends, *place(op)[1:]


def partner(op: Op, shape: Shape) -> int | None:
    """The rank at the other end."""
    if op.kind in (Kind.EVICT, Kind.GIVE, Kind.HOLD, Kind.LOAD):
        return op.peer if 0 <= op.peer < shape.ranks else None
    there = op.replica < len(shape.homes) and 0 <= op.peer < len(shape.homes[0])
    return shape.homes[op.replica][op.peer] if there else None


def accepts(rows: Rows, shape: Shape) -> bool:
    try:
        check_timeline(timeline_from_rows(rows, shape.edges))
    except TimelineError:
        return False
    return True


@given(shapes(aside=BOUNDS), st.integers(0, 2**16), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_valid_timelines_pass(shape: Shape, seed: int, lookahead: int) -> None:
    """Any possible order passes, with its transfers too, and the naive simulator runs it."""
    t = scheduled(shape, seed)
    check_timeline(t)
    full = with_transfers(t, lookahead)
    check_timeline(full)
    assert full.compute() == t
    assert runs(rows_of(full), shape)


def corrupted(rows: Rows, chance: random.Random) -> Rows:
    """One thing changed: swapped, dropped, doubled, moved, renamed."""
    rows = [list(ops) for ops in rows]
    rank = chance.choice([r for r, ops in enumerate(rows) if ops])
    ops = rows[rank]
    a, b = chance.randrange(len(ops)), chance.randrange(len(ops))
    match chance.randrange(9):
        case 0:
            ops[a], ops[b] = ops[b], ops[a]
        case 1:
            ops.insert(b, ops.pop(a))
        case 2:
            del ops[a]
        case 3:
            ops.insert(b, ops[a])
        case 4:
            other = rows[chance.randrange(len(rows))]
            other.insert(chance.randrange(len(other) + 1), ops.pop(a))
        case 5:
            ops[a] = ops[a]._replace(replica=chance.choice([0, 1, 2]))
        case 6:
            ops[a] = ops[a]._replace(slice=chance.choice([0, 1, 2]))
        case 7:
            ops[a] = ops[a]._replace(microbatch=max(0, ops[a].microbatch + chance.choice([-1, 1])))
        case _ if ops[a].peer >= 0:
            ops[a] = ops[a]._replace(peer=max(0, ops[a].peer + chance.choice([-1, 1])))
        case _:
            ops[a] = ops[a]._replace(kind=chance.choice([F, B, I, W]))
    return rows


# whether to recompute is a choice: without its RECOMPUTE a timeline is another one, and valid
@given(shapes(ranks=3, stages=4, micro=3, aside=BOUNDS[1:]), st.integers(0, 2**16))
@settings(max_examples=150, deadline=None)
def test_corruptions_are_refused(shape: Shape, seed: int) -> None:
    """A timeline with one change is accepted exactly if the naive simulator still runs it."""
    chance = random.Random(seed)
    rows = corrupted(rows_of(with_transfers(scheduled(shape, seed))), chance)
    assume(any(op.kind in (B, I) for ops in rows for op in ops))  # else it is an evaluation
    assert accepts(rows, shape) == runs(rows, shape)
