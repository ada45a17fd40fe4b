"""The type of an order (name, paper, function from sizes to a timeline), and builders of
timelines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from schedlang.pipeline.cost import DEFAULT_COST, Cost
from schedlang.pipeline.timeline.table import COLUMNS, Column, Kind, Timeline, chain_edges


class OrderError(ValueError):
    """An order does not exist for these sizes: the reason, and what would be legal."""

    def __init__(self, reason: str, legal: str) -> None:
        super().__init__(f"{reason}; {legal}")
        self.reason, self.legal = reason, legal


@dataclass(frozen=True)
class Size:
    """The sizes that an order is made for.

    ranks    of the pipeline (p)
    micro    microbatches (m)
    chunks   stages on each rank, of one replica (v)
    slices   slices of the sequence into which each microbatch is split (k)
    cost     times and activations, for orders that are searched; others ignore them
    memory   the most activations a rank may hold, in microbatches of one rank's share of the model
             (1F1B on p ranks needs p); None: the order's own limit
    every    microbatches of an update, for orders that update inside the step; None: their own
    barrier  all ranks wait for each other before the optimizer: a search minimises the makespan,
             without it the longest span of a rank
    """

    ranks: int
    micro: int
    chunks: int = 1
    slices: int = 1
    cost: Cost = DEFAULT_COST
    memory: Fraction | None = None
    every: int | None = None
    barrier: bool = True


SizeProblem = tuple[str, str]  # why a size is not legal, and legal sizes


def exact_times(size: Size) -> tuple[Fraction, Fraction, Fraction]:
    """Return F, I and W of one microbatch on one rank, exact."""
    return Fraction(size.cost.f), Fraction(size.cost.i), Fraction(size.cost.w)


def flush_bubble(size: Size) -> Fraction:
    """(p-1) (F + I + W)."""
    return (size.ranks - 1) * sum(exact_times(size), Fraction(0))


@dataclass(frozen=True)
class Order:
    """A named order.

    make              compute operations of every rank, in order; sizes are legal
    problem           why sizes are not legal and which would be, or None
    chunks            legal numbers of stages per rank, the default first; None: any, by default
                      `default_chunks`
    allows_one_stage  also legal with one stage per rank, where `chunks` is None and the default is
                      more
    bubble            closed form of the idle time of a rank between its first and its last
                      operation, with F, I and W of a rank's full share and free transfers; None:
                      unknown, for any size or for this one
    peak              closed form of the most live activations of any rank, in microbatches of one
                      rank's share
    replicas          copies of the stages; each microbatch goes through one of them
    sliced            whether it slices sequences (`slices`)
    relaxed           words for what its result may change besides rounding; with "staleness" it
                      updates inside the step (`every`)
    kept              share of a microbatch's activations between I and W, where its paper counts
                      less than one; used where no `Cost.kept` is given
    searched          whether finding it takes seconds: then pictures do not make it at many sizes
    source            the paper or system, with its year and number
    """

    name: str
    source: str
    make: Callable[[Size], Timeline]
    aliases: tuple[str, ...] = ()
    problem: Callable[[Size], SizeProblem | None] = lambda size: None
    chunks: tuple[int, ...] | None = (1,)
    default_chunks: int = 1
    allows_one_stage: bool = False
    searched: bool = False
    bubble: Callable[[Size], Fraction | None] | None = None
    peak: Callable[[Size], Fraction] | None = None
    replicas: int = 1
    sliced: bool = False
    kept: Fraction | None = None
    relaxed: frozenset[str] = field(default_factory=frozenset)


# -- timelines from the rows of every rank, or from operations with a time each, as arrays ---------


Ints = NDArray[np.int64]
Row = tuple[Column, Ints]  # kinds of one rank's operations, and their units


def timeline_of_units(rows: Iterable[Row], micro: int) -> Timeline:
    """Build a timeline from each rank's kinds and units (stage * micro + microbatch), in order."""
    kinds, units = zip(*rows)
    rank = np.repeat(np.arange(len(kinds)), [len(kind) for kind in kinds])
    stage, microbatch = np.divmod(np.concatenate(units), micro)
    return _timeline(len(kinds), rank, np.concatenate(kinds), stage, microbatch)


def one_f_one_b(size: Size, warmup: Callable[[int], int]) -> Timeline:
    """Build one stage on each rank: `warmup` forwards of its rank, then F and B in turn, as in
    1F1B."""
    units = np.arange(size.micro)
    rows = (units + rank * size.micro for rank in range(size.ranks))
    return timeline_of_units(
        (merge_backwards(row, row, warmup(rank)) for rank, row in enumerate(rows)), size.micro
    )


def timeline_by_slot(
    ranks: int,
    slot: ArrayLike,
    rank: ArrayLike,
    kind: ArrayLike,
    stage: ArrayLike,
    microbatch: ArrayLike,
    replica: ArrayLike = 0,
    part: ArrayLike = 0,
) -> Timeline:
    """Build a timeline whose ranks run their operations in the order of `slot`; `part` is the
    slice.

    The columns are broadcast against each other and may have any shape.
    """
    arrays = np.broadcast_arrays(slot, rank, kind, stage, microbatch, replica, part)
    when, *columns = (column.ravel() for column in arrays)
    order = np.lexsort((when, columns[0]))
    return _timeline(ranks, *(column[order] for column in columns))


def _timeline(
    ranks: int,
    rank: NDArray[np.integer],
    kind: NDArray[np.integer],
    stage: NDArray[np.integer],
    microbatch: NDArray[np.integer],
    replica: NDArray[np.integer] | int = 0,
    part: NDArray[np.integer] | int = 0,
) -> Timeline:
    """Build a timeline with a chain of stages, of operations in the order in which each rank runs
    them."""
    none = np.zeros(len(rank), np.int32)
    arrays = np.broadcast_arrays(rank, kind, stage, replica, microbatch, part, none, none - 1)
    edges = chain_edges(int(stage.max(initial=-1)) + 1)
    return Timeline(**dict(zip(COLUMNS, arrays)), ranks=ranks, edges=edges)


def merge_backwards(forward: Ints, backward: Ints, warmup: int) -> Row:
    """Return `warmup` forwards, then one F and one B in turn, then the other backwards."""
    total = len(forward)
    k, warmup = np.arange(total), min(warmup, total)
    place_f = np.where(k < warmup, k, 2 * k - warmup)
    place_b = np.where(k < total - warmup, warmup + 2 * k + 1, total + k)
    kind, unit = np.empty(2 * total, np.int32), np.empty(2 * total, np.int64)
    kind[place_f], unit[place_f] = Kind.F, forward
    kind[place_b], unit[place_b] = Kind.B, backward
    return kind, unit


def merge_split_backwards(forward: Ints, backward: Ints, warmup: int, lag: int) -> Row:
    """Return `warmup` forwards, then F and I in turn; W comes right after the `lag`-th later I.

    An operation without a partner runs alone; the remaining weight gradients come last.
    """
    k, warmup = np.arange(len(forward)), min(warmup, len(forward))
    turn = np.concatenate([3 * (k - warmup), 3 * k + 1, 3 * (k + lag) + 2])
    order = np.argsort(turn, kind="stable")
    kind = np.repeat(np.array([Kind.F, Kind.I, Kind.W], dtype=np.int32), len(k))
    return kind[order], np.concatenate([forward, backward, backward])[order]
