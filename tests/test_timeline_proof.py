"""The proof of a timeline against a naive simulator: what it accepts runs, what it refuses not."""

from __future__ import annotations

import random
from collections import Counter, deque

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedlang.timeline import Kind, Op, Timeline, TimelineError, check, timeline, with_transfers
from tests.timelines import B, F, I, Shape, W, scheduled, shapes

Rows = list[list[Op]]
SENDS = (Kind.SEND_F, Kind.SEND_B, Kind.EVICT, Kind.GIVE)
RECEIVES = (Kind.RECV_F, Kind.RECV_B, Kind.HOLD, Kind.LOAD)
BOUNDS = ((Kind.RECOMPUTE,), (Kind.OFFLOAD, Kind.RELOAD), (Kind.EVICT, Kind.LOAD))


def rows_of(t: Timeline) -> Rows:
    return [list(t.rows(rank)) for rank in range(t.ranks)]


def runs(rows: Rows, shape: Shape) -> bool:
    """Whether ranks that run these rows come to an end and have done just what `shape` asks.

    Messages between two ranks go through a queue: the first that is sent is the first received.
    """
    needs = shape.needs()
    homes = {op: shape.homes[op.replica][op.stage] for op in needs}
    plain = [op for ops in rows for op in ops if op.kind not in SENDS + RECEIVES or op in needs]
    if Counter(plain) != Counter(needs.keys()):
        return False
    if any(homes[op] != rank for rank, ops in enumerate(rows) for op in ops if op in needs):
        return False
    queues: dict[tuple[int, int], deque[object]] = {}
    posted: dict[tuple[int, int], deque[object]] = {}
    arrived: list[set[object]] = [set() for _ in rows]
    done: set[tuple[int, Op]] = set()
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(rows):
            while at[rank] < len(ops):
                op = ops[at[rank]]
                answer = step(op, rank, shape, needs, homes, queues, posted, arrived, done)
                if answer is None:
                    return False
                if not answer:
                    break
                done.add((rank, op))
                at[rank] += 1
                moved = True
    over = not any(queues.values()) and not any(posted.values())
    return over and all(here == len(ops) for here, ops in zip(at, rows))


def step(  # noqa: PLR0911, PLR0913
    op: Op, rank: int, shape: Shape, needs: dict[Op, set[Op]], homes: dict[Op, int],
    queues: dict[tuple[int, int], deque[object]], posted: dict[tuple[int, int], deque[object]],
    arrived: list[set[object]], done: set[tuple[int, Op]],
) -> bool | None:  # fmt: skip
    """Run an operation: whether it could run now, None where it never may."""
    if op in needs:
        for before in needs[op]:
            if homes[before] == rank:
                if (rank, before) not in done:
                    return None  # a rank runs its rows in order
            elif letter(before, op.stage) not in arrived[rank]:
                return False
    source, target = ends(op, rank, shape)
    if op.kind in (Kind.SEND_F, Kind.SEND_B):
        if not any((rank, made) in done for made in makers(op)):
            return None
    if op.kind is Kind.GIVE and ("evict", *place(op)) not in arrived[rank]:
        return False
    if op.kind in SENDS:
        if target is None or target == rank:
            return None
        return meet(queues, posted, (rank, target), name_sent(op), arrived, True)
    if op.kind in RECEIVES:
        if source is None or source == rank:
            return None
        if op.kind is Kind.LOAD:
            key = ("give", *place(op))
            if key in arrived[rank]:
                return True
            if key not in posted.get((source, rank), ()):
                if meet(queues, posted, (source, rank), key, arrived, False) is None:
                    return None
            return key in arrived[rank]
        return meet(queues, posted, (source, rank), name_received(op), arrived, False)
    return True


def place(op: Op) -> tuple[int, int, int, int]:
    return op.stage, op.microbatch, op.replica, op.slice


def letter(made: Op, to: int) -> tuple[object, ...]:
    return made.kind is not F, made.stage, to, *place(made)[1:]


def makers(op: Op) -> list[Op]:
    kinds = (F,) if op.kind is Kind.SEND_F else (B, I)
    return [Op(kind, op.stage, op.microbatch, op.replica, op.slice) for kind in kinds]


def name_sent(op: Op) -> tuple[object, ...]:
    if op.kind in (Kind.EVICT, Kind.GIVE):
        return (op.kind.name.lower(), *place(op))
    return op.kind is Kind.SEND_B, op.stage, op.peer, *place(op)[1:]


def name_received(op: Op) -> tuple[object, ...]:
    if op.kind is Kind.HOLD:
        return ("evict", *place(op))
    return op.kind is Kind.RECV_B, op.peer, op.stage, *place(op)[1:]


def ends(op: Op, rank: int, shape: Shape) -> tuple[int | None, int | None]:
    """The rank from which a message comes, and to which it goes."""
    if op.kind in (Kind.EVICT, Kind.GIVE, Kind.HOLD, Kind.LOAD):
        other = op.peer if 0 <= op.peer < shape.ranks else None
    elif op.replica < len(shape.homes) and 0 <= op.peer < len(shape.homes[0]):
        other = shape.homes[op.replica][op.peer]
    else:
        other = None
    return other, other


def meet(
    queues: dict[tuple[int, int], deque[object]], posted: dict[tuple[int, int], deque[object]],
    pair: tuple[int, int], key: object, arrived: list[set[object]], sending: bool,
) -> bool | None:  # fmt: skip
    """Put a message or a receive into its channel; None where the two that meet do not match."""
    mine, others = (queues, posted) if sending else (posted, queues)
    waiting = others.setdefault(pair, deque())
    if not waiting:
        mine.setdefault(pair, deque()).append(key)
        return True
    if waiting.popleft() != key:
        return None
    arrived[pair[1]].add(key)
    return True


def accepts(rows: Rows, shape: Shape) -> bool:
    try:
        check(timeline(rows, shape.edges))
    except TimelineError:
        return False
    return True


@given(shapes(aside=BOUNDS), st.integers(0, 2**16), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_valid_timelines_pass(shape: Shape, seed: int, lookahead: int) -> None:
    """Any possible order passes, with its transfers too, and the naive simulator runs it."""
    t = scheduled(shape, seed)
    check(t)
    full = with_transfers(t, lookahead)
    check(full)
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
