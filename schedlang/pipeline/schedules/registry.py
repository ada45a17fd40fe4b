"""What an order is: a name, its paper, and a function from sizes to a timeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from schedlang.pipeline.cost import UNIT_COST, Cost
from schedlang.pipeline.timeline import Timeline


class OrderError(ValueError):
    """An order that does not exist for these sizes: why, and what would be legal."""

    def __init__(self, reason: str, legal: str) -> None:
        super().__init__(f"{reason}; {legal}")
        self.reason, self.legal = reason, legal


@dataclass(frozen=True)
class Size:
    """The sizes that an order is made for.

    ranks    of the pipeline (p)
    micro    microbatches (m)
    chunks   stages on each rank, of one replica (v)
    slices   runs of the sequence into which each microbatch is cut (k)
    cost     times and activations, for orders that are searched; others ignore them
    memory   the most activations a rank may hold, in microbatches of one rank's share of the model
             (1F1B on p ranks needs p); None: what the order itself prescribes
    every    microbatches of an update, of orders that update inside the step; None: their own
    barrier  all ranks wait for each other before the optimizer: a search shortens the makespan,
             without it the longest span of a rank
    """

    ranks: int
    micro: int
    chunks: int = 1
    slices: int = 1
    cost: Cost = UNIT_COST
    memory: Fraction | None = None
    every: int | None = None
    barrier: bool = True


Problem = tuple[str, str]  # why a size is not legal, and sizes that are


def times(size: Size) -> tuple[Fraction, Fraction, Fraction]:
    """F, I and W of one microbatch on one rank, exact."""
    return Fraction(size.cost.f), Fraction(size.cost.i), Fraction(size.cost.w)


def flushed(size: Size) -> Fraction:
    """(p-1) (F + I + W)."""
    return (size.ranks - 1) * sum(times(size), Fraction(0))


@dataclass(frozen=True)
class Order:
    """A named order.

    make      the compute operations of every rank, in order; sizes are legal
    problem   why sizes are not legal and which would be, or None
    chunks    the numbers of stages per rank that it runs, the default first; None: any, by default
              `default_chunks`
    alone     also runs with one stage per rank, where `chunks` is None and the default is more
    bubble    closed form of the idle time of a rank between its first and its last operation, with
              F, I and W of a rank's whole share and transfers free; None: none is known, for any
              size or for this one
    peak      closed form of the most live activations of any rank, in microbatches of one rank's
              share
    replicas  copies of the stages, each microbatch going through one of them
    sliced    it cuts sequences (`slices`)
    relaxed   what its result may differ in, beyond rounding, or nothing; with "staleness" it
              updates inside the step (`every`)
    kept      share of a microbatch's activations between I and W, where its paper counts less than
              one; it is used where no `Cost.kept` is given
    searched  finding it takes seconds: it is not made at many sizes for the sake of a picture
    source    the paper or system, with its year and number
    """

    name: str
    source: str
    make: Callable[[Size], Timeline]
    aliases: tuple[str, ...] = ()
    problem: Callable[[Size], Problem | None] = lambda size: None
    chunks: tuple[int, ...] | None = (1,)
    default_chunks: int = 1
    alone: bool = False
    searched: bool = False
    bubble: Callable[[Size], Fraction | None] | None = None
    peak: Callable[[Size], Fraction] | None = None
    replicas: int = 1
    sliced: bool = False
    kept: Fraction | None = None
    relaxed: frozenset[str] = field(default_factory=frozenset)
