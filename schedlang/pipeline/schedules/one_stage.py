"""One stage on each rank: GPipe, 1F1B, ZB-H1 and ZB-H2, BPipe and Varuna."""

from __future__ import annotations

from collections import deque
from fractions import Fraction

import numpy as np

from schedlang.pipeline.schedules.lay import laid, merge, weave
from schedlang.pipeline.schedules.registry import Order, Problem, Size, flushed, times
from schedlang.pipeline.timeline import Kind, Op, Timeline, timeline


def _gpipe(size: Size) -> Timeline:
    """All forwards, then all backwards, which run first in, first out."""
    return _one_chunk(size, [size.micro] * size.ranks)


def _one_f_one_b(size: Size) -> Timeline:
    """Backward as soon as possible: on rank r after p - 1 - r forwards."""
    return _one_chunk(size, [min(size.ranks - 1 - r, size.micro) for r in range(size.ranks)])


def _eager(size: Size) -> Timeline:
    """Twice the warm-up of 1F1B, which hides transfers: 2 (p-r) - 1 forwards before a backward."""
    return _one_chunk(size, [min(2 * (size.ranks - 1 - r), size.micro) for r in range(size.ranks)])


def _one_chunk(size: Size, warmup: list[int]) -> Timeline:
    rows = []
    for rank, first in enumerate(warmup):
        units = rank * size.micro + np.arange(size.micro)
        rows.append(merge(units, units, first))
    return laid(rows, size.micro)


FLUSHED = (
    Order(
        "GPipe",
        "Huang et al., GPipe, 2019 (1811.06965)",
        _gpipe,
        aliases=("ScheduleGPipe",),
        bubble=flushed,
        peak=lambda size: Fraction(size.micro),
    ),
    Order(
        "1F1B",
        "PipeDream-flush, Narayanan et al. 2021 (2006.09503); DAPPLE, Fan et al. 2021",
        _one_f_one_b,
        aliases=("Schedule1F1B", "PipeDream-Flush"),
        bubble=flushed,
        peak=lambda size: Fraction(min(size.ranks, size.micro)),
    ),
    Order(
        "Eager1F1B",
        "DAPPLE, Fan et al. 2021, policy PB of early backward",
        _eager,
        aliases=("1F1B-eager", "DAPPLE-PB"),
        bubble=flushed,
        peak=lambda size: Fraction(min(2 * size.ranks - 1, size.micro)),
    ),
)


def _zb_h1(size: Size) -> Timeline:
    """1F1B's forwards and input gradients; rank r runs W of a microbatch after r further I."""
    return _woven(size, 1)


def _zb_h2(size: Size) -> Timeline:
    """Twice the warm-up of 1F1B, so that no rank waits for its first I; W after 2r further I."""
    return _woven(size, 2)


def _woven(size: Size, times: int) -> Timeline:
    rows = []
    for rank in range(size.ranks):
        units = rank * size.micro + np.arange(size.micro)
        warmup = min(times * (size.ranks - 1 - rank), size.micro)
        rows.append(weave(units, units, warmup, times * rank))
    return laid(rows, size.micro)


def _h1_idle(size: Size) -> Fraction:
    """(p-1) (F + I - min(F, W)); fewer than p microbatches leave gaps where W has nothing to do.

    The paper has F + I - W, of times with W < F.
    """
    f, i, w = times(size)
    return (size.ranks - 1) * (f + i) - (min(size.micro, size.ranks) - 1) * min(f, w)


def _h2_idle(size: Size) -> Fraction | None:
    """(p-1) (F + I - 2 min(F, W)), never less than nothing, for 2p - 1 microbatches or more."""
    f, i, w = times(size)
    enough = size.micro >= 2 * size.ranks - 1
    return (size.ranks - 1) * max(f + i - 2 * min(f, w), Fraction(0)) if enough else None


ZERO_BUBBLE = (
    Order(
        "ZB-H1",
        "Qi et al., Zero Bubble, 2023 (2401.10241), §2.2",
        _zb_h1,
        bubble=_h1_idle,
        peak=lambda size: Fraction(min(size.ranks, size.micro)),
    ),
    Order(
        "ZB-H2",
        "Qi et al., Zero Bubble, 2023 (2401.10241), §2.3",
        _zb_h2,
        bubble=_h2_idle,
        peak=lambda size: Fraction(min(2 * size.ranks - 1, size.micro)),
    ),
)


def _bpipe(size: Size) -> Timeline:
    """1F1B; rank r and rank p - 1 - r are partners, and none holds more than the limit.

    From the paper: the pairs, the limit of ceil((p+2)/2) microbatches, and that an early rank sends
    activations away when it would exceed it and has them back before their backward. Our reading:
    what leaves is the microbatch whose backward is farthest, which is the newest; it comes back
    right after the backward before its own, so that both transfers have the time of a forward;
    and the returning one goes first, so that the partner never holds more than what is over.
    """
    limit = _limit(size)
    return timeline([_parked_rank(rank, size, limit) for rank in range(size.ranks)])


def _parked_rank(rank: int, size: Size, limit: int) -> list[Op]:
    partner = size.ranks - 1 - rank
    first = min(size.ranks - 1 - rank, size.micro)
    rows: list[Op] = []
    here: list[int] = []  # microbatches whose activations lie on this rank, oldest first

    def forward(microbatch: int) -> None:
        if len(here) == limit:
            rows.append(Op(Kind.EVICT, rank, here.pop(), peer=partner))
        rows.append(Op(Kind.F, rank, microbatch))
        here.append(microbatch)

    def backward(microbatch: int, made: int) -> None:
        here.remove(microbatch)
        rows.append(Op(Kind.B, rank, microbatch))
        if microbatch + 1 < made and microbatch + 1 not in here:
            rows.append(Op(Kind.LOAD, rank, microbatch + 1, peer=partner))
            here.insert(0, microbatch + 1)

    for microbatch in range(first):
        forward(microbatch)
    for microbatch in range(size.micro - first):
        forward(first + microbatch)
        backward(microbatch, first + microbatch + 1)
    for microbatch in range(size.micro - first, size.micro):
        backward(microbatch, size.micro)
    return rows


def _limit(size: Size) -> int:
    """ceil((p+2)/2), or what `memory` allows."""
    return (size.ranks + 3) // 2 if size.memory is None else int(size.memory)


def _least(size: Size) -> int:
    """The smallest limit: half of what the two ranks of any pair hold together in 1F1B."""
    p, m = size.ranks, size.micro
    pairs = (min(p - rank, m) + min(rank + 1, m) for rank in range(p))
    return max(-(-both // 2) for both in pairs)


def _too_little(size: Size) -> Problem | None:
    least = _least(size)
    if _limit(size) >= least:
        return None
    held = f"{size.ranks} ranks in 1F1B hold {least} microbatches each, parked ones included"
    return f"{held}, and the limit is {_limit(size)}", f"memory={least}"


def _parked_idle(size: Size) -> Fraction:
    """(p-1) (F + I + W), as in 1F1B: transfers of activations go beside the computing."""
    return flushed(size)


def _parked_peak(size: Size) -> Fraction:
    """min(p, m, limit), counting on each rank what it holds for its partner."""
    return Fraction(min(size.ranks, size.micro, _limit(size)))


PARKED = (
    Order(
        "BPipe",
        "Kim et al., BPipe, 2023 (ICML); limit as in Huang et al. 2024 (2401.02088)",
        _bpipe,
        problem=_too_little,
        bubble=_parked_idle,
        peak=_parked_peak,
    ),
)


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


RECOMPUTED = (
    Order(
        "Varuna",
        "Athlur et al., Varuna, 2022 (2111.04007), §3; github.com/microsoft/varuna",
        _varuna,
    ),
)
