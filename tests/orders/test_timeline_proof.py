"""The check of timelines against a naive simulator: it accepts exactly what can run."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedlang.pipeline.timeline.proof import check_timeline, with_transfers
from schedlang.pipeline.timeline.table import Kind, Op, Timeline, TimelineError, timeline_from_rows
from tests.timelines import B, F, I, Shape, W, random_order, shapes

Rows = list[list[Op]]
SENDS = (Kind.SEND_F, Kind.SEND_B, Kind.EVICT, Kind.GIVE)
RECEIVES = (Kind.RECV_F, Kind.RECV_B, Kind.HOLD, Kind.LOAD)
BOUNDS = ((Kind.RECOMPUTE,), (Kind.OFFLOAD, Kind.RELOAD), (Kind.EVICT, Kind.LOAD))


def rows_of(t: Timeline) -> Rows:
    return [list(t.rows(rank)) for rank in range(t.ranks)]


@dataclass
class Channels:
    """Messages between ranks: first sent, first received.

    Evicted activations and their return have channels of their own.
    """

    sent: dict[object, deque[object]] = field(default_factory=lambda: defaultdict(deque))
    posted: dict[object, deque[object]] = field(default_factory=lambda: defaultdict(deque))
    arrived: set[object] = field(default_factory=set)

    def meet(self, channel: object, key: object, sending: bool) -> bool:
        """Add a message or a receive; return False if it does not match its counterpart."""
        own_queue, other_queue = (self.sent, self.posted) if sending else (self.posted, self.sent)
        if not other_queue[channel]:
            own_queue[channel].append(key)
            return True
        self.arrived.add(key)
        return other_queue[channel].popleft() == key


def rows_run(rows: Rows, shape: Shape) -> bool:
    """Whether ranks can run these rows to the end, with exactly the operations of `shape`."""
    dependencies = shape.needs()
    homes = {op: shape.homes[op.replica][op.stage] for op in dependencies}
    computations = [
        op for ops in rows for op in ops if op.kind not in SENDS + RECEIVES or op in dependencies
    ]
    if Counter(computations) != Counter(dependencies.keys()):
        return False
    if any(homes[op] != rank for rank, ops in enumerate(rows) for op in ops if op in dependencies):
        return False
    channels, finished, next_row = Channels(), set[tuple[int, Op]](), [0] * len(rows)
    progressed = True
    while progressed:
        progressed = False
        for rank, ops in enumerate(rows):
            while next_row[rank] < len(ops):
                op = ops[next_row[rank]]
                ready = op not in dependencies or inputs_ready(
                    op, rank, dependencies, homes, channels, finished
                )
                if ready:
                    ready = op.kind not in SENDS + RECEIVES or exchange(
                        op, rank, shape, channels, finished
                    )
                if ready is None:
                    return False
                if not ready:
                    break
                finished.add((rank, op))
                next_row[rank] += 1
                progressed = True
    channels_empty = not any(channels.sent.values()) and not any(channels.posted.values())
    return channels_empty and all(row_number == len(ops) for row_number, ops in zip(next_row, rows))


def inputs_ready(
    op: Op,
    rank: int,
    dependencies: dict[Op, set[Op]],
    homes: dict[Op, int],
    channels: Channels,
    finished: set[tuple[int, Op]],
) -> bool | None:
    """Whether all dependencies of an operation are ready; None if they never will be."""
    for dependency in dependencies[op]:
        if homes[dependency] == rank and (rank, dependency) not in finished:
            return None  # a rank runs its rows in order
        if (
            homes[dependency] != rank
            and (result_key(dependency, op.stage), rank) not in channels.arrived
        ):
            return False
        loaded = (("give", *op_key(op)), rank) in channels.arrived
        if dependency.kind is Kind.LOAD and op.kind in (B, I) and not loaded:
            return False
    return True


def exchange(
    op: Op, rank: int, shape: Shape, channels: Channels, finished: set[tuple[int, Op]]
) -> bool | None:
    """Send or receive; None if that is never possible."""
    peer = other_rank(op, shape)
    if peer is None or peer == rank:
        return None
    key, sending = message_key(op), op.kind in SENDS
    target = peer if sending else rank
    if op.kind in (Kind.SEND_F, Kind.SEND_B) and not any(
        (rank, x) in finished for x in producers(op)
    ):
        return None
    if op.kind is Kind.GIVE and (("evict", *op_key(op)), rank) not in channels.arrived:
        return None
    channel = (rank, peer) if sending else (peer, rank), key[0] in ("evict", "give") and key[0]
    if op.kind is Kind.HOLD and not channels.sent[channel]:
        return False  # it waits; other receives are only posted
    return channels.meet(channel, (key, target), sending) or None


def op_key(op: Op) -> tuple[int, int, int, int]:
    return op.stage, op.microbatch, op.replica, op.slice


def result_key(producer: Op, target_stage: int) -> tuple[object, ...]:
    return producer.kind is not F, producer.stage, target_stage, *op_key(producer)[1:]


def producers(op: Op) -> list[Op]:
    kinds = (F,) if op.kind is Kind.SEND_F else (B, I)
    return [Op(kind, op.stage, op.microbatch, op.replica, op.slice) for kind in kinds]


def message_key(op: Op) -> tuple[object, ...]:
    """The key of a message, equal at both of its ends."""
    if op.kind in (Kind.EVICT, Kind.HOLD):
        return ("evict", *op_key(op))
    if op.kind in (Kind.GIVE, Kind.LOAD):
        return ("give", *op_key(op))
    ends = (op.stage, op.peer) if op.kind in SENDS else (op.peer, op.stage)
    return op.kind in (Kind.SEND_B, Kind.RECV_B), *ends, *op_key(op)[1:]


def other_rank(op: Op, shape: Shape) -> int | None:
    """The rank at the other end."""
    if op.kind in (Kind.EVICT, Kind.GIVE, Kind.HOLD, Kind.LOAD):
        return op.peer if 0 <= op.peer < shape.ranks else None
    exists = op.replica < len(shape.homes) and 0 <= op.peer < len(shape.homes[0])
    return shape.homes[op.replica][op.peer] if exists else None


def is_accepted(rows: Rows, shape: Shape) -> bool:
    try:
        check_timeline(timeline_from_rows(rows, shape.edges))
    except TimelineError:
        return False
    return True


@given(shapes(aside=BOUNDS), st.integers(0, 2**16), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_valid_timelines_pass(shape: Shape, seed: int, lookahead: int) -> None:
    """Any possible order passes, also with transfers, and the naive simulator runs it."""
    t = random_order(shape, seed)
    check_timeline(t)
    full = with_transfers(t, lookahead)
    check_timeline(full)
    assert full.compute() == t
    assert rows_run(rows_of(full), shape)


def corrupt(rows: Rows, chance: random.Random) -> Rows:
    """Rows with one change: swapped, dropped, doubled, moved or renamed operations."""
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


# no RECOMPUTE here: a timeline without it is valid, too
@given(shapes(ranks=3, stages=4, micro=3, aside=BOUNDS[1:]), st.integers(0, 2**16))
@settings(max_examples=150, deadline=None)
def test_corruptions_are_refused(shape: Shape, seed: int) -> None:
    """A timeline with one change is accepted exactly if the naive simulator still runs it."""
    chance = random.Random(seed)
    rows = corrupt(rows_of(with_transfers(random_order(shape, seed))), chance)
    assume(any(op.kind in (B, I) for ops in rows for op in ops))  # otherwise it is an evaluation
    assert is_accepted(rows, shape) == rows_run(rows, shape)
