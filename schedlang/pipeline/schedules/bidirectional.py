"""Orders with two replicas of the stages in opposite directions: Chimera, GEMS and DualPipe.

Replica 0 has stage s on rank s, replica 1 has it on rank p - 1 - s; even microbatches go through
replica 0, odd ones through replica 1.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from schedlang.pipeline.schedules.registry import Ints, Order, Size, SizeProblem, timeline_by_slot
from schedlang.pipeline.schedules.v_shaped import dualpipe_steps, number_steps
from schedlang.pipeline.timeline.table import Kind, Timeline


def _chimera(size: Size) -> Timeline:
    """Each replica runs 1F1B in slots that the other leaves free, in units of p microbatches.

    Count in slots of one operation. In a unit, stage s runs microbatch i of a replica forward in
    slot s + 2i and backward in slot 2p - 1 - s + 2i. The two stages of a rank differ by an odd
    number, so one replica has the even slots and the other has the odd slots. A unit takes 2p slots
    in a row on each rank, so the next unit starts 2p slots later (direct concatenation).
    """
    p = size.ranks
    microbatch, stage = np.meshgrid(np.arange(size.micro), np.arange(p), indexing="ij")
    unit, slot = np.divmod(microbatch // 2, p // 2)
    forward = 2 * p * unit + 2 * slot + stage
    backward = 2 * p * unit + 2 * slot + 2 * p - 1 - stage
    return _alternating(p, forward, backward, stage, microbatch)


def _gems(size: Size) -> Timeline:
    """One microbatch at a time, forward and backward; they start from the two ends in turn."""
    p = size.ranks
    microbatch, stage = np.meshgrid(np.arange(size.micro), np.arange(p), indexing="ij")
    return _alternating(p, 2 * microbatch, 2 * microbatch + 1, stage, microbatch)


def _alternating(
    ranks: int, forward: Ints, backward: Ints, stage: Ints, microbatch: Ints
) -> Timeline:
    """Put F and B of [microbatch, stage] at their slots; even and odd microbatches on two
    replicas."""
    replica, slot = microbatch % 2, np.stack([forward, backward], -1)
    columns = (stage, microbatch, replica)
    return timeline_by_slot(
        ranks,
        slot,
        _rank(ranks, stage, replica)[..., None],
        np.array([Kind.F, Kind.B]),
        *(column[..., None] for column in columns),
    )


def _rank(ranks: int, stage: Ints, replica: Ints) -> Ints:
    """Return the rank of a stage of a replica; likewise the stage of a rank."""
    return np.where(replica == 0, stage, ranks - 1 - stage)


def check_two_directions(size: Size, minimum: Callable[[int], int]) -> SizeProblem | None:
    """Return why two directions cannot share ranks and microbatches equally, and which sizes can.

    `minimum`: the fewest microbatches for a number of ranks.
    """
    p, m = size.ranks, size.micro
    if p % 2:
        legal = [(q, _near(m, minimum(q))) for q in (p - 1, p + 1) if q > 1]
        sizes = [
            f"{q} ranks" + (f" with micro={nearest[0]}" * (nearest[0] != m)) for q, nearest in legal
        ]
        return f"two directions meet between two ranks: not on {p}", " or ".join(sizes)
    nearest = _near(m, minimum(p))
    if m in nearest:
        return None
    at_least = f", at least {minimum(p)}" if minimum(p) > 2 else ""
    reason = f"two directions share an even number of microbatches{at_least}, not {m}"
    return reason, " or ".join(f"micro={n}" for n in nearest)


def _near(micro: int, minimum: int) -> list[int]:
    """Return the even numbers from `minimum` on that are nearest to `micro`."""
    if micro < minimum:
        return [minimum]
    return [micro - 1, micro + 1] if micro % 2 and micro > minimum else [micro + micro % 2]


def _shared(size: Size) -> SizeProblem | None:
    return check_two_directions(size, lambda ranks: 2)


def _pair(size: Size) -> SizeProblem | None:
    micro = "micro=2" * (size.micro < 2)
    if size.ranks < 2:
        return "two directions need several ranks", "2 ranks" + f" with {micro}" * bool(micro)
    return ("two directions need a microbatch each, not one", micro) if micro else None


def _chimera_idle(size: Size) -> Fraction:
    """(p-2) (max(F, B) + (n-1) |F - B|) for n full units of p microbatches, with B = I + W.

    With equal F and B this is the rate (p-2) / (2m + p-2), with B = 2F and one unit the rate
    (p-2) / (3m/2 + p-2), both of §3.2 of the paper. A last unit of 2q < p microbatches leaves
    (p - 2q) min(F, B) more, of which it may fill a part in the unit before.
    """
    p, f = size.ranks, Fraction(size.cost.f)
    b = Fraction(size.cost.i) + Fraction(size.cost.w)
    units = -(-size.micro // p)
    missing = p // 2 - (size.micro - (units - 1) * p) // 2
    filled = min(f, missing * (b - f)) if units > 1 and b > f else 0
    return (p - 2) * (max(f, b) + (units - 1) * abs(f - b)) + 2 * missing * min(f, b) - filled


def _gems_idle(size: Size) -> Fraction:
    """p (F + B) + (m-1) (p max(F, B) + min(F, B)) - m (F + B), within the makespan.

    With B = 2F the rate tends to (p-1) / (p + 1/2).
    """
    p, m, f = size.ranks, size.micro, Fraction(size.cost.f)
    b = Fraction(size.cost.i) + Fraction(size.cost.w)
    first = p * (f + b)
    return first + (m - 1) * (p * max(f, b) + min(f, b)) - m * (f + b)


ALTERNATING_ORDERS = (
    Order(
        "Chimera",
        "Li and Hoefler 2021 (2107.06925), §3; direct concatenation where m > p",
        _chimera,
        problem=_shared,
        bubble=_chimera_idle,
        peak=lambda size: Fraction(min(size.ranks, size.micro)),
        replicas=2,
    ),
    Order(
        "GEMS",
        "Jain et al., GEMS, 2020; as compared in Li and Hoefler 2021 (2107.06925), Table 2",
        _gems,
        problem=_pair,
        bubble=_gems_idle,
        peak=lambda size: Fraction(1),
        replicas=2,
    ),
)


def _dualpipe(size: Size) -> Timeline:
    """Every rank runs the eight phases of the paper.

    The i-th microbatch of direction d is 2i + d. Stage s is on rank s in direction 0 and on rank
    p - 1 - s in direction 1. If the paper's system overlaps a forward with a backward, the forward
    comes right before this backward.
    """
    p, rows = size.ranks, []
    for rank in range(p):
        steps = dualpipe_steps(p // 2, min(rank, p - 1 - rank), size.micro // 2)
        kind, chunk, nth = number_steps(steps)
        replica = chunk ^ int(rank >= p // 2)
        stage = _rank(p, np.array(rank), replica)
        columns = (np.arange(len(kind)), rank, kind, stage, 2 * nth + replica, replica)
        rows.append(np.stack(np.broadcast_arrays(*columns)))
    return timeline_by_slot(p, *np.concatenate(rows, axis=1))


def _long_enough(size: Size) -> SizeProblem | None:
    return check_two_directions(size, lambda ranks: 2 * ranks)


def _dualpipe_idle(size: Size) -> Fraction:
    """(p/2 - 1) (F + I - W + max(0, F - I - W)), if I <= F.

    The paper's (p/2 - 1) (F&B + B - 3W) is for F&B and B = I + W as single operations that take
    and give at their ends; with F and I apart what follows I starts earlier.
    """
    f, i, w = (Fraction(x) for x in (size.cost.f, size.cost.i, size.cost.w))
    return (size.ranks // 2 - 1) * (f + i - w + max(Fraction(0), f - i - w))


OVERLAPPED_ORDERS = (
    Order(
        "DualPipe",
        "DeepSeek-V3, 2024 (2412.19437), §3.2.1",
        _dualpipe,
        problem=_long_enough,
        bubble=_dualpipe_idle,
        peak=lambda size: Fraction(size.ranks + 1),
        replicas=2,
    ),
)
