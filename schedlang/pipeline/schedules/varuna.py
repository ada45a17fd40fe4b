"""Varuna: forwards keep only their inputs, and are run again when their gradient arrives."""

from __future__ import annotations

from collections import deque

from schedlang.pipeline.schedules.registry import Order, Size
from schedlang.pipeline.timeline import Kind, Op, Timeline, timeline

# what a rank takes first: the second half of a backward, a backward, a recomputation, a forward
REST, BACKWARD, AGAIN, FORWARD = range(4)
NAMES = {BACKWARD: Kind.B, AGAIN: Kind.RECOMPUTE, FORWARD: Kind.F}


def _varuna(size: Size) -> Timeline:
    """The static table that Varuna makes before it trains, by playing unit slots.

    The paper (§3) says: activations are recomputed; a backward follows its recomputation at once,
    since two recomputed microbatches would not fit; the last rank needs none, its backward follows
    its forward; what has been forwarded goes back before new forwards begin. Its published
    generator makes this exact, and is what is followed here: forward and recomputation take a
    slot, a backward two; a rank takes the oldest of the most urgent kind in the order above; a
    gradient goes on after the first half of the backward, and starts the recomputation of the rank
    that receives it. While training Varuna departs from its table when a gradient is late
    (opportunistic scheduling); a timeline is fixed, so that part is left out.
    """
    ranks, last = size.ranks, size.ranks - 1
    queues: list[list[deque[int]]] = [[deque() for _ in range(4)] for _ in range(ranks)]
    queues[0][FORWARD].extend(range(size.micro))
    rows: list[list[Op]] = [[] for _ in range(ranks)]
    left = 3 * size.micro * ranks + size.micro * last  # slots of work
    while left:
        taken = [_take(queues[rank]) for rank in range(ranks)]
        for rank, (kind, microbatch) in enumerate(taken):
            if microbatch < 0:
                continue
            left -= 1
            if kind in NAMES:
                rows[rank].append(Op(NAMES[kind], rank, microbatch))
            if kind == FORWARD:
                after = queues[rank][BACKWARD] if rank == last else queues[rank + 1][FORWARD]
                after.append(microbatch)
            elif kind == AGAIN:
                queues[rank][BACKWARD].append(microbatch)
            elif kind == BACKWARD:
                queues[rank][REST].append(microbatch)
                if rank:
                    queues[rank - 1][AGAIN].append(microbatch)
    return timeline(rows)


def _take(queues: list[deque[int]]) -> tuple[int, int]:
    """The kind and the microbatch that a rank takes in this slot; -1: none."""
    for kind, queue in enumerate(queues):
        if queue:
            return kind, queue.popleft()
    return FORWARD, -1


ORDERS = (
    Order(
        "Varuna",
        "Athlur et al., Varuna, 2022 (2111.04007), §3; github.com/microsoft/varuna",
        _varuna,
    ),
)
