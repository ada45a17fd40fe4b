"""ZB-1p and ZB-2p: the heuristic of Zero Bubble, under a limit on the activations held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import lcm

import numpy as np

from schedlang.pipeline.cost import Number
from schedlang.pipeline.schedules.registry import Order, Size, SizeProblem, timeline_of_units
from schedlang.pipeline.timeline.table import Kind, Timeline

# W needs 32 s b h of the s b (34 h + 5 a s) bytes of a layer (Zero Bubble, Table 1), and 5 a s / h
# is 40 for three of the paper's four models
PAPER_KEPT_SHARE = Fraction(32, 74)
KINDS = (Kind.F, Kind.I, Kind.W)
F, I, W = range(3)  # noqa: E741  (the literature's letter for the input gradient)


@dataclass(frozen=True)
class Knobs:
    """The three binary choices of Zero Bubble, §3.1; all eight combinations are tried.

    overfill  warm up with one forward more, although the first backward then waits for it
    skip      a rank that is two forwards ahead of the next may omit one for its backward
    idle      leave a gap shorter than W empty where other ranks have been idle for longer
    """

    overfill: bool
    skip: bool
    idle: bool


class Draft:
    """An order under construction: operations of every rank, when the rank is free, what it holds.

    Times are in any one unit; bytes are counted in parts of an activation, and stay exact.
    """

    def __init__(self, size: Size, limit: Fraction, knobs: Knobs) -> None:
        ranks, kept = size.ranks, Fraction(size.cost.kept).limit_denominator(10**6)
        self.ranks, self.micro, self.knobs = ranks, size.micro, knobs
        self.cost, self.comm, self.scale = _ticks(size)
        scale = kept.denominator * limit.denominator
        self.held = (scale, -int(scale * (1 - kept)), -int(scale * kept))
        self.limit = int(limit * scale)
        self.memory = [0] * ranks
        self.free: list[Number] = [0] * ranks
        self.first: list[Number] = [0] * ranks
        self.idle: list[Number] = [0] * ranks
        self.done = [[0] * ranks for _ in KINDS]
        self.end: list[list[list[Number]]] = [[[] for _ in range(ranks)] for _ in KINDS]
        self.rows: list[list[int]] = [[] for _ in range(ranks)]

    def arrival(self, rank: int, kind: int) -> Number:
        """Return the arrival time of the input of a rank's next F or I from another rank."""
        neighbour = rank - 1 if kind == F else rank + 1
        if not 0 <= neighbour < self.ranks:
            return 0
        return self.end[kind][neighbour][self.done[kind][rank]] + self.comm

    def put(self, rank: int, kind: int) -> None:
        """Append the next operation of a kind, as early as it can run."""
        start = self.free[rank]
        if kind != W:
            start = max(start, self.arrival(rank, kind))
        if not self.rows[rank]:
            self.first[rank] = start
        else:
            self.idle[rank] += start - self.free[rank]
        self.free[rank] = start + self.cost[rank][kind]
        self.end[kind][rank].append(self.free[rank])
        self.done[kind][rank] += 1
        self.memory[rank] += self.held[kind]
        self.rows[rank].append(kind)

    @property
    def span(self) -> Number:
        """The longest time of one rank from its first operation to its last."""
        ticks = max(free - first for free, first in zip(self.free, self.first))
        return ticks if isinstance(ticks, float) else Fraction(ticks, self.scale)

    def timeline(self) -> Timeline:
        """Return the finished order."""
        kinds, rows = np.array(KINDS, dtype=np.int32), []
        for rank, row in enumerate(self.rows):
            part = np.array(row)
            units = np.empty(len(part), dtype=np.int64)
            for k in range(len(KINDS)):
                units[part == k] = rank * self.micro + np.arange(self.micro)
            rows.append((kinds[part], units))
        return timeline_of_units(rows, self.micro)

    def waiting(self, rank: int) -> int:
        """Count the weight gradients that a rank could run."""
        return self.done[I][rank] - self.done[W][rank]

    def fill(self, rank: int, kind: int) -> None:
        """Run weight gradients before the next F or I: to free memory, then where the rank
        waits."""
        while self.memory[rank] + self.held[kind] > self.limit:
            assert self.waiting(rank), "nothing is left to be freed"
            self.put(rank, W)
        arrival, cost = self.arrival(rank, kind), self.cost[rank][W]
        while self.waiting(rank) and self.free[rank] + cost <= arrival:
            self.put(rank, W)
        gap = arrival - self.free[rank]
        if self.waiting(rank) and gap > 0 and (not self.knobs.idle or self.behind(rank) < gap):
            self.put(rank, W)

    def behind(self, rank: int) -> Number:
        """Return how much longer than this rank the most idle rank has been idle."""
        return max(self.idle) - self.idle[rank]


def _ticks(size: Size) -> tuple[list[tuple[Number, ...]], Number, int]:
    """Return F, I and W of every rank, a transfer, and their scale: to whole numbers if exact."""
    cost = size.cost
    shares = cost.shares or [1] * size.ranks
    rows = [tuple(x * share for x in (cost.f, cost.i, cost.w)) for share in shares]
    flat = [cost.comm, *(x for row in rows for x in row)]
    if any(isinstance(x, float) for x in flat):
        return rows, cost.comm, 1
    scale = lcm(*(Fraction(x).denominator for x in flat))
    return [tuple(int(x * scale) for x in row) for row in rows], int(cost.comm * scale), scale


def build_draft(size: Size, limit: Fraction, knobs: Knobs) -> Draft:
    """Build the order under these choices: rounds of one F and one I on every rank, W between
    them."""
    draft = Draft(size, limit, knobs)
    for rank in range(size.ranks):
        draft.put(rank, F)
    for rank, count in enumerate(_warmup(draft)):
        for _ in range(count):
            draft.put(rank, F)
    for rank in reversed(range(size.ranks)):
        draft.put(rank, I)
    for _ in range(1, size.micro):
        for rank in _forwards(draft):
            draft.fill(rank, F)
            draft.put(rank, F)
        for rank in reversed(range(size.ranks)):
            draft.fill(rank, I)
            draft.put(rank, I)
    for rank in range(size.ranks):
        while draft.done[W][rank] < size.micro:
            draft.put(rank, W)
    return draft


def _warmup(draft: Draft) -> list[int]:
    """Return how many more forwards each rank runs before its first backward, within memory."""
    extra = [0] * draft.ranks
    ready = draft.free[-1] + draft.cost[-1][I]  # the end of the first I of the rank after
    for rank in reversed(range(draft.ranks - 1)):
        f, i, _ = draft.cost[rank]
        free, arrival = draft.free[rank], ready + draft.comm
        limit = min(draft.micro - 1, (draft.limit - draft.memory[rank]) // draft.held[F])
        while extra[rank] < limit:
            if free + f > arrival if not draft.knobs.overfill else free >= arrival:
                break
            free += f
            extra[rank] += 1
        ready = max(free, arrival) + i
    for rank in range(1, draft.ranks):
        while extra[rank] and extra[rank] >= extra[rank - 1] and 1 + extra[rank] < draft.micro:
            extra[rank] -= 1
    return extra


def _forwards(draft: Draft) -> Iterator[int]:
    """Yield the ranks that run a forward in this round; where one omits it, so do those before."""
    runs_forward = [_wants(draft, rank) for rank in range(draft.ranks)]
    for rank in reversed(range(draft.ranks - 1)):
        runs_forward[rank] = runs_forward[rank] and runs_forward[rank + 1]
    return (rank for rank in range(draft.ranks) if runs_forward[rank])


def _wants(draft: Draft, rank: int) -> bool:
    done = draft.done[F]
    if done[rank] >= draft.micro:
        return False
    if not draft.knobs.skip or rank + 1 == draft.ranks or done[rank] < done[rank + 1] + 2:
        return True
    f, i, _ = draft.cost[rank + 1]
    gradient = draft.free[rank + 1] + f + i + draft.comm  # when the next rank's I can be here
    if draft.free[rank] >= gradient:
        return False
    excess = draft.memory[rank] + draft.held[F] - draft.limit
    freed = draft.waiting(rank) if excess > 0 else 0
    if excess > 0 and draft.held[W]:
        freed = min(freed, -(excess // draft.held[W]))
    f, _, w = draft.cost[rank]
    if draft.free[rank] + f + freed * w <= gradient:
        return True
    return gradient - draft.free[rank] > draft.behind(rank)


def best_draft(size: Size, limit: Fraction) -> Timeline:
    """Return the shortest of the eight orders whose ranks hold at most `limit` microbatches."""
    drafts = (build_draft(size, limit, Knobs(*knobs)) for knobs in product((True, False), repeat=3))
    return min(drafts, key=lambda draft: draft.span).timeline()


def _zb_1p(size: Size) -> Timeline:
    """Search within p microbatches of activations, as many as 1F1B has, or within `memory`."""
    return best_draft(size, Fraction(size.ranks) if size.memory is None else size.memory)


def _zb_2p(size: Size) -> Timeline:
    """Search within 2p microbatches of activations as the paper counts, or within `memory`.

    The paper counts less than one microbatch between I and W. Without `memory` and `kept`, this
    order counts in the same way: with one microbatch each, 2p would not be enough for the figures
    of the paper.
    """
    if size.memory is not None:
        return best_draft(size, size.memory)
    kept = PAPER_KEPT_SHARE if size.cost.kept == 1 else size.cost.kept
    counted = replace(size, cost=replace(size.cost, kept=kept))
    return best_draft(counted, Fraction(2 * size.ranks))


def _problem(size: Size) -> SizeProblem | None:
    if size.memory is not None and size.memory < 1:
        return "a rank holds one microbatch at least", "memory=1"
    if size.cost.shares is not None and len(size.cost.shares) != size.ranks:
        return f"{len(size.cost.shares)} shares are given", f"one for each of {size.ranks} stages"
    return None


PAPER = "Qi et al., Zero Bubble, 2023 (2401.10241), §3.1: {} microbatches of activations"
ORDERS = (
    Order("ZB-1p", PAPER.format("p"), _zb_1p, problem=_problem),
    Order("ZB-2p", PAPER.format("2p"), _zb_2p, problem=_problem, kept=PAPER_KEPT_SHARE),
)
