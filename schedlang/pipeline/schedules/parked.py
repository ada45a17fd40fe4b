"""BPipe: 1F1B in which early ranks park activations on late ones, which hold fewer."""

from __future__ import annotations

from fractions import Fraction

from schedlang.pipeline.schedules.registry import Order, Problem, Size
from schedlang.pipeline.timeline import Kind, Op, Timeline, timeline


def _bpipe(size: Size) -> Timeline:
    """1F1B; rank r and rank p - 1 - r are partners, and none holds more than the limit.

    From the paper: the pairs, the limit of ceil((p+2)/2) microbatches, and that an early rank sends
    activations away when it would exceed it and has them back before their backward. Our reading:
    what leaves is the microbatch whose backward is farthest, which is the newest; it comes back
    right after the backward before its own, so that both transfers have the time of a forward;
    and the returning one goes first, so that the partner never holds more than what is over.
    """
    limit = _limit(size)
    return timeline([_rank(rank, size, limit) for rank in range(size.ranks)])


def _rank(rank: int, size: Size, limit: int) -> list[Op]:
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


def _problem(size: Size) -> Problem | None:
    least = _least(size)
    if _limit(size) >= least:
        return None
    held = f"{size.ranks} ranks in 1F1B hold {least} microbatches each, parked ones included"
    return f"{held}, and the limit is {_limit(size)}", f"memory={least}"


def _idle(size: Size) -> Fraction:
    """(p-1) (F + I + W), as in 1F1B: transfers of activations go beside the computing."""
    cost = size.cost
    return (size.ranks - 1) * (Fraction(cost.f) + Fraction(cost.i) + Fraction(cost.w))


def _peak(size: Size) -> Fraction:
    """min(p, m, limit), counting on each rank what it holds for its partner."""
    return Fraction(min(size.ranks, size.micro, _limit(size)))


ORDERS = (
    Order(
        "BPipe",
        "Kim et al., BPipe, 2023 (ICML); limit as in Huang et al. 2024 (2401.02088)",
        _bpipe,
        problem=_problem,
        bubble=_idle,
        peak=_peak,
    ),
)
