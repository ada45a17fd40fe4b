"""Orders with one stage on each rank: GPipe, 1F1B, ZB-H1, ZB-H2, BPipe, Varuna; PipeDream and its
kin."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np

from schedlang.pipeline.schedules.registry import (
    Ints,
    Order,
    Size,
    SizeProblem,
    exact_times,
    flush_bubble,
    merge_split_backwards,
    one_f_one_b,
    timeline_of_units,
)
from schedlang.pipeline.timeline.table import Kind, Op, Timeline, timeline_from_rows


def _gpipe(size: Size) -> Timeline:
    """All forwards, then all backwards, both from the first microbatch to the last."""
    return one_f_one_b(size, lambda rank: size.micro)


def _one_f_one_b(size: Size) -> Timeline:
    """Backward as early as possible: rank r runs p - 1 - r forwards, then F and B in turn."""
    return one_f_one_b(size, lambda rank: size.ranks - 1 - rank)


def _eager(size: Size) -> Timeline:
    """Twice the warm-up of 1F1B, to hide transfers: 2 (p-r) - 1 forwards precede the first B."""
    return one_f_one_b(size, lambda rank: 2 * (size.ranks - 1 - rank))


FLUSHED_ORDERS = (
    Order(
        "GPipe",
        "Huang et al., GPipe, 2019 (1811.06965)",
        _gpipe,
        aliases=("ScheduleGPipe",),
        bubble=flush_bubble,
        peak=lambda size: Fraction(size.micro),
    ),
    Order(
        "1F1B",
        "PipeDream-flush, Narayanan et al. 2021 (2006.09503); DAPPLE, Fan et al. 2021",
        _one_f_one_b,
        aliases=("Schedule1F1B", "PipeDream-Flush"),
        bubble=flush_bubble,
        peak=lambda size: Fraction(min(size.ranks, size.micro)),
    ),
    Order(
        "Eager1F1B",
        "DAPPLE, Fan et al. 2021, policy PB of early backward",
        _eager,
        aliases=("1F1B-eager", "DAPPLE-PB"),
        bubble=flush_bubble,
        peak=lambda size: Fraction(min(2 * size.ranks - 1, size.micro)),
    ),
)


def _zb_h1(size: Size) -> Timeline:
    """F and I run as in 1F1B; rank r runs the W of a microbatch after the next r I."""
    return _woven(size, 1)


def _zb_h2(size: Size) -> Timeline:
    """Twice the warm-up of 1F1B, so that no rank waits for its first I; W after the next 2r I."""
    return _woven(size, 2)


def _woven(size: Size, times: int) -> Timeline:
    rows = []
    for rank in range(size.ranks):
        units = rank * size.micro + np.arange(size.micro)
        rows.append(
            merge_split_backwards(units, units, times * (size.ranks - 1 - rank), times * rank)
        )
    return timeline_of_units(rows, size.micro)


def _h1_idle(size: Size) -> Fraction:
    """(p-1) (F + I - min(F, W)); with fewer than p microbatches, some gaps have no W to fill them.

    The paper has F + I - W, of times with W < F.
    """
    f, i, w = exact_times(size)
    return (size.ranks - 1) * (f + i) - (min(size.micro, size.ranks) - 1) * min(f, w)


def _h2_idle(size: Size) -> Fraction | None:
    """(p-1) (F + I - 2 min(F, W)), at least 0, for 2p - 1 microbatches or more."""
    f, i, w = exact_times(size)
    is_filled = size.micro >= 2 * size.ranks - 1
    return (size.ranks - 1) * max(f + i - 2 * min(f, w), Fraction(0)) if is_filled else None


ZERO_BUBBLE_ORDERS = (
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
    """1F1B with a limit of activations on each rank; rank r and rank p - 1 - r are partners.

    From the paper: the pairs, and the limit of ceil((p+2)/2) microbatches. An early rank sends
    activations to its partner before it would exceed the limit, and gets them back before their
    backward. Our reading: the rank sends the newest microbatch, because its backward is farthest
    away. The activations come back right after the backward before their own, so each transfer has
    the time of a forward. A microbatch comes back before the next one leaves, so the partner never
    holds more than the excess.
    """
    limit = _limit(size)
    return timeline_from_rows([_parked_rank(rank, size, limit) for rank in range(size.ranks)])


def _parked_rank(rank: int, size: Size, limit: int) -> list[Op]:
    partner = size.ranks - 1 - rank
    first = min(size.ranks - 1 - rank, size.micro)
    rows: list[Op] = []
    stored: list[int] = []  # microbatches whose activations are on this rank, oldest first

    def forward(microbatch: int) -> None:
        if len(stored) == limit:
            rows.append(Op(Kind.EVICT, rank, stored.pop(), peer=partner))
        rows.append(Op(Kind.F, rank, microbatch))
        stored.append(microbatch)

    def backward(microbatch: int, forwards: int) -> None:
        stored.remove(microbatch)
        rows.append(Op(Kind.B, rank, microbatch))
        if microbatch + 1 < forwards and microbatch + 1 not in stored:
            rows.append(Op(Kind.LOAD, rank, microbatch + 1, peer=partner))
            stored.insert(0, microbatch + 1)

    for microbatch in range(first):
        forward(microbatch)
    for microbatch in range(size.micro - first):
        forward(first + microbatch)
        backward(microbatch, first + microbatch + 1)
    for microbatch in range(size.micro - first, size.micro):
        backward(microbatch, size.micro)
    return rows


def _limit(size: Size) -> int:
    """Return ceil((p+2)/2), or what `memory` allows."""
    return (size.ranks + 3) // 2 if size.memory is None else int(size.memory)


def _least(size: Size) -> int:
    """Return the smallest limit: half of what the two ranks of any pair hold together in 1F1B."""
    p, m = size.ranks, size.micro
    pairs = (min(p - rank, m) + min(rank + 1, m) for rank in range(p))
    return max(-(-total // 2) for total in pairs)


def _too_little(size: Size) -> SizeProblem | None:
    smallest = _least(size)
    if _limit(size) >= smallest:
        return None
    text = f"{size.ranks} ranks in 1F1B hold {smallest} microbatches each, parked ones included"
    return f"{text}, and the limit is {_limit(size)}", f"memory={smallest}"


def _parked_idle(size: Size) -> Fraction:
    """(p-1) (F + I + W), as in 1F1B: activations are sent during the computation."""
    return flush_bubble(size)


def _parked_peak(size: Size) -> Fraction:
    """min(p, m, limit) on each rank, with the activations that it holds for its partner."""
    return Fraction(min(size.ranks, size.micro, _limit(size)))


PARTNER_ORDERS = (
    Order(
        "BPipe",
        "Kim et al., BPipe, 2023 (ICML); limit as in Huang et al. 2024 (2401.02088)",
        _bpipe,
        problem=_too_little,
        bubble=_parked_idle,
        peak=_parked_peak,
    ),
)


# priority: the second half of a backward, a backward, a recomputation, a forward
REST, BACKWARD, AGAIN, FORWARD = range(4)
NAMES = {BACKWARD: Kind.B, AGAIN: Kind.RECOMPUTE, FORWARD: Kind.F}


def _varuna(size: Size) -> Timeline:
    """The static table that Varuna makes before training, slot by slot.

    The paper (§3) has these rules. Activations are recomputed. A backward follows its recomputation
    at once, since two recomputed microbatches would not fit. The last rank recomputes nothing: its
    backward follows its forward. Backwards of forwarded microbatches come before new forwards. The
    details are those of the published generator. A forward and a recomputation take one slot, a
    backward takes two. A rank runs the oldest operation of the most urgent kind: backward before
    recomputation before forward. A gradient is sent after the first half of the backward, and
    starts the recomputation on the rank that receives it. In training, Varuna departs from its
    table when a gradient is late (opportunistic scheduling). A timeline is fixed, so that part
    is left out.
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
    return timeline_from_rows(rows)


def _take(queues: list[deque[int]]) -> tuple[int, int]:
    """Return the kind and the microbatch that a rank runs in this slot; -1: none."""
    for kind, queue in enumerate(queues):
        if queue:
            return kind, queue.popleft()
    return FORWARD, -1


RECOMPUTED_ORDERS = (
    Order(
        "Varuna",
        "Athlur et al., Varuna, 2022 (2111.04007), §3; github.com/microsoft/varuna",
        _varuna,
    ),
)


# -- updates inside the step -----------------------------------------------------------------------
# PipeDream, PipeDream-2BW, PipeMare, Pipelined-Backprop: a step of the program is one run of the
# timeline, which holds several updates and is drained at its end.  Rows say which version of the
# stage's weights they read; a STEP row makes the next one.


STALENESS = frozenset({"staleness"})

# (rows, updates made before each, microbatches of an update) -> version that each row reads
VersionRule = Callable[[Timeline, Ints, int], Ints]


def _stashed(rows: Timeline, at_hand: Ints, every: int) -> Ints:
    """F reads the current weights; B those that its own F has read, which were stashed for it."""
    forward = rows.kind == Kind.F
    version_of = np.zeros((rows.ranks, rows.microbatches), dtype=np.int64)
    version_of[rows.rank[forward], rows.microbatch[forward]] = at_hand[forward]
    return version_of[rows.rank, rows.microbatch]


def _one_late(rows: Timeline, at_hand: Ints, every: int) -> Ints:
    """F and B of an update read the weights of the update before it: w(t+1) = w(t) - g(w(t-1))."""
    late: Ints = np.maximum(rows.microbatch // every - 1, 0)
    return late


def _at_hand(rows: Timeline, at_hand: Ints, every: int) -> Ints:
    """F and B both read the current weights; nothing is stashed."""
    return at_hand


def _updating(size: Size, spacing: int, read: VersionRule, every: int) -> Timeline:
    """F and B in turn, after `spacing` forwards for each rank behind; updates inside the step.

    An update comes after the last backward that it sums.
    """
    t = one_f_one_b(size, lambda rank: spacing * (size.ranks - 1 - rank))
    backwards = (t.kind == Kind.B).reshape(size.ranks, -1).astype(np.int64)
    at_hand = ((backwards.cumsum(1) - backwards) // every).ravel()
    t = replace(t, version=read(t, at_hand, every).astype(np.int32))
    ends = np.flatnonzero((t.kind == Kind.B) & ((t.microbatch + 1) % every == 0))
    updates = {"kind": Kind.STEP, "version": (t.microbatch[ends] + 1) // every}
    return t.with_copies(2 * np.arange(len(t)), (ends, 2 * ends + 1, updates))


def _update_size(size: Size) -> int:
    """Return the microbatches of an update: the fewest from p on that divide m, or all."""
    if size.every is not None:
        return size.every
    return next(
        n for n in range(min(size.ranks, size.micro), size.micro + 1) if size.micro % n == 0
    )


def _pipedream(size: Size) -> Timeline:
    """1F1B without a flush between updates: on rank r, the weights are p - 1 - r updates old."""
    return _updating(size, 1, _stashed, size.every or 1)


def _double_buffered(size: Size) -> Timeline:
    """1F1B; every update reads weights that are one update old, so two versions are enough."""
    return _updating(size, 1, _one_late, _update_size(size))


def _too_few(size: Size) -> SizeProblem | None:
    """Two versions suffice where an update sums p - 1 microbatches or more; the paper says p."""
    every = _update_size(size)
    if every >= min(size.ranks, size.micro):
        return None
    return (
        f"an update of {every} microbatches is too small for {size.ranks} stages: there would be"
        " more than two versions of the weights",
        f'every={size.ranks} or more, or order="PipeDream"',
    )


def _pipemare(size: Size) -> Timeline:
    """F runs 2 (p-1-r) microbatches ahead of B on rank r; both read the newest weights."""
    return _updating(size, 2, _at_hand, _update_size(size))


def _pipelined(size: Size) -> Timeline:
    """PipeMare with an update after every microbatch; F on rank r is 2 (p-1-r) updates late."""
    return _updating(size, 2, _at_hand, size.every or 1)


def _idle(size: Size) -> Fraction:
    """(p-1) (F + I + W): the pipeline fills and drains once a step, not once an update."""
    return flush_bubble(size)


STALE_ORDERS = (
    Order(
        "PipeDream",
        "Harlap et al. 2018 (1806.03377); Narayanan et al., SOSP 2019, §3.3: weight stashing",
        _pipedream,
        bubble=_idle,
        peak=lambda size: Fraction(min(size.ranks, size.micro)),
        relaxed=STALENESS,
    ),
    Order(
        "PipeDream-2BW",
        "Narayanan et al. 2021 (2006.09503), §3.1: double-buffered weight updates",
        _double_buffered,
        aliases=("2BW",),
        problem=_too_few,
        bubble=_idle,
        peak=lambda size: Fraction(min(size.ranks, size.micro)),
        relaxed=STALENESS,
    ),
    Order(
        "PipeMare",
        "Yang et al. 2021 (1910.05124), §2; without its T1 and T2",
        _pipemare,
        bubble=_idle,
        peak=lambda size: Fraction(min(2 * size.ranks - 1, size.micro)),
        relaxed=STALENESS,
    ),
    Order(
        "Pipelined-Backprop",
        "Kosson et al. 2021 (2003.11666), without spike compensation and weight prediction",
        _pipelined,
        aliases=("PB", "PipelinedBackprop"),
        bubble=_idle,
        peak=lambda size: Fraction(min(2 * size.ranks - 1, size.micro)),
        relaxed=STALENESS,
    ),
)
