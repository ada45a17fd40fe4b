"""DualPipe: both ends feed microbatches, forwards of one way beside backwards of the other."""

from __future__ import annotations

from collections import deque
from fractions import Fraction

from schedlang.pipeline.schedules.opposite import even
from schedlang.pipeline.schedules.registry import Order, Problem, Size
from schedlang.pipeline.timeline import Kind, Op, Timeline, timeline


def _dualpipe(size: Size) -> Timeline:
    """The eight phases of every rank.

    The i-th microbatch of direction d is 2i + d; stage s of direction 0 is on rank s, of direction
    1 on rank p - 1 - s. A forward that the system overlaps with a backward stands right before it.
    """
    return timeline([_Rank(rank, size).phases() for rank in range(size.ranks)])


class _Rank:
    """One rank's operations; its near direction is the one whose first stages are closer."""

    def __init__(self, rank: int, size: Size) -> None:
        self.rank, self.ranks = rank, size.ranks
        self.inner = min(rank, size.ranks - 1 - rank)  # distance to the closer end
        self.each = size.micro // 2  # microbatches of a direction
        self.flip = rank >= size.ranks // 2
        self.rows: list[Op] = []
        self.count: dict[tuple[Kind, bool], int] = {}
        self.weights: deque[Op] = deque()

    def phases(self) -> list[Op]:
        """F of the near direction, F of both, IWF, the steady state, and the way down."""
        near, far = False, True
        outer = self.ranks // 2 - self.inner - 1
        for _ in range(2 * outer):
            self.run(Kind.F, near)
        for _ in range(self.inner + 1):
            self.run(Kind.F, near)
            self.run(Kind.F, far)
        for _ in range(outer):
            self.run(Kind.I, far)
            self.weight()
            self.run(Kind.F, far)
        for _ in range(self.each - self.ranks + self.inner + 1):
            self.run(Kind.F, near)
            self.run(Kind.B, far)
            self.run(Kind.F, far)
            self.run(Kind.B, near)
        for _ in range(outer):
            self.run(Kind.B, far)
            self.run(Kind.F, far)
            self.run(Kind.B, near)
        for k in range(2 * (self.inner + 1)):  # whole backwards first, split ones then
            self.run(Kind.B if k < self.inner + 1 else Kind.I, k % 2 == 0)
        for _ in range(outer):
            self.weight()
            self.run(Kind.I, near)
        while self.weights:
            self.weight()
        return self.rows

    def run(self, kind: Kind, far: bool) -> None:
        """The next microbatch of a direction; I leaves its W for later."""
        replica = int(far != self.flip)
        stage = self.rank if replica == 0 else self.ranks - 1 - self.rank
        turn = (Kind.F if kind is Kind.F else Kind.B, far)
        nth = self.count.get(turn, 0)
        self.count[turn] = nth + 1
        op = Op(kind, stage, 2 * nth + replica, replica)
        self.rows.append(op)
        if kind is Kind.I:
            self.weights.append(op._replace(kind=Kind.W))

    def weight(self) -> None:
        """The oldest weight gradient that waits."""
        self.rows.append(self.weights.popleft())


def _problem(size: Size) -> Problem | None:
    return even(size, lambda ranks: 2 * ranks)


def _idle(size: Size) -> Fraction:
    """(p/2 - 1) (F + I - W), and max(0, F - I - W) more, where I <= F.

    The paper's (p/2 - 1) (F&B + B - 3W) is for F&B and B = I + W as single operations that take
    and give at their ends; with F and I apart what follows I starts earlier.
    """
    f, i, w = (Fraction(x) for x in (size.cost.f, size.cost.i, size.cost.w))
    return (size.ranks // 2 - 1) * (f + i - w + max(Fraction(0), f - i - w))


ORDERS = (
    Order(
        "DualPipe",
        "DeepSeek-V3, 2024 (2412.19437), §3.2.1",
        _dualpipe,
        problem=_problem,
        bubble=_idle,
        peak=lambda size: Fraction(size.ranks + 1),
        replicas=2,
    ),
)
