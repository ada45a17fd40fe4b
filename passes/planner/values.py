"""Values of the planner: what units of a model cost one rank, a setting, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["product", "attention", "other"]


@dataclass(frozen=True)
class Operator:
    """Operators that cost alike.

    kind   a product of matrices (convolutions too), fused attention, or anything else
    flops  floating-point operations of one, as 16-bit ones
    moved  bytes that one reads and writes
    count  how often it runs
    cause  under which a fit to measured runs weighs it; "" its kind
    """

    kind: Kind
    flops: float
    moved: float
    count: float = 1
    cause: str = ""


@dataclass(frozen=True)
class Sent:
    """Collectives, or messages, that cost alike.

    op     all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send
    axis   of the mesh, whose ranks meet
    bytes  of the whole tensor, of one
    count  how often it is sent
    """

    op: str
    axis: str
    bytes: float
    count: float = 1


@dataclass(frozen=True)
class Work:
    """Operators that one rank runs, and messages that it sends, in a stretch of a step."""

    operators: tuple[Operator, ...] = ()
    sent: tuple[Sent, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Axes that split tensors, and rows: they decide how much one unit costs one rank.

    rows      of a microbatch on one rank
    sequence  activations between the layers of `tp` are split along the sequence as well
    offload   what lies on the host: "none", "activations", "optimizer", or "both"
    slices    of a sequence, which run one after the other: a unit is one of them in the mean
    """

    rows: int = 1
    tp: int = 1
    sequence: bool = False
    cp: int = 1
    ep: int = 1
    offload: str = "none"
    slices: int = 1

    @property
    def parked(self) -> bool:
        """Whether activations leave for the host, of units that are modules."""
        return self.offload in ("activations", "both")

    @property
    def hosted(self) -> bool:
        """Whether the optimizer's state lies on the host, where its step is made."""
        return self.offload in ("optimizer", "both")


@dataclass(frozen=True)
class Unit:
    """One unit that stages are made of (a layer, an embedding, a head with its loss), on one rank.

    All of one microbatch of `Placement.rows` rows, or of one of its slices.  `numbers` are
    parameters that the rank holds with this placement, before ZeRO splits them; `spread` those of
    them that `ep` has split already, and which are therefore summed over fewer replicas.  Bytes:
    `kept` by a forward for its backward; `input`, which is kept instead where the unit is computed
    again; `most` that forward or backward holds beside what is kept, at its fullest moment;
    `handed` to the next unit;
    `entering` kept besides by the first unit of a stage, which holds what another one sent it;
    `waiting` kept besides between two halves of a backward, of gradients of what layers gave.
    """

    name: str
    numbers: int
    forward: Work
    backward: Work
    kept: float
    input: float
    most: float
    handed: float
    spread: int = 0
    entering: float = 0.0
    waiting: float = 0.0


@dataclass(frozen=True)
class Run:
    """Equal units, `count` of them in a row."""

    unit: Unit
    count: int


@dataclass(frozen=True)
class Chain:
    """A model under one placement: its units from first to last, by runs of equal ones.

    tied  pairs of places of runs that share their parameters (an embedding and its head)
    """

    placement: Placement
    runs: tuple[Run, ...]
    tied: tuple[tuple[int, int], ...] = ()

    @property
    def length(self) -> int:
        """The number of units."""
        return sum(run.count for run in self.runs)


@dataclass(frozen=True)
class Recipe:
    """Bytes of each number of a parameter, of its gradient, and of its optimizer's state.

    master  bytes of a copy in 32 bits that the optimizer keeps, and ZeRO splits with its state
    """

    parameter: int = 2
    gradient: int = 2
    moments: int = 8
    master: int = 4

    def state(self, hosted: bool) -> int:
        """Bytes of a number that the optimizer keeps on the device; masters stay there."""
        return self.master + (0 if hosted else self.moments)


@dataclass(frozen=True)
class Setting:
    """One way to train: axes, order, cuts, and what is given up for memory.

    order   of the pipeline, by its name in the catalogue; `chunks` stages on each rank of pp
    micro   microbatches of a step on one replica
    zero    stage over the replicas
    cuts    units of each stage, in order; () are as even as can be by the planner's own rule
    again   units of each stage that are computed again, the first ones; () none
    axes    from the slowest, whose ranks lie farthest apart, to the fastest; ep is folded into dp
    rows    of a microbatch of each replica, where these are unlike; () those of the placement
    nodes   by their places in the cluster, in the order of their ranks; () as they are there
    """

    placement: Placement
    dp: int = 1
    pp: int = 1
    micro: int = 1
    order: str = "1F1B"
    chunks: int = 1
    zero: int = 1
    cuts: tuple[int, ...] = ()
    again: tuple[int, ...] = ()
    axes: tuple[str, ...] = ("dp", "pp", "cp", "tp")
    rows: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()

    @property
    def passes(self) -> int:
        """Forwards of each stage in a step: slices of all microbatches."""
        return self.micro * self.placement.slices

    @property
    def ranks(self) -> int:
        """Ranks of the mesh; experts lie on ranks that are replicas for all else."""
        return self.dp * self.pp * self.placement.tp * self.placement.cp

    def stride(self, axis: str) -> int:
        """Ranks from one to its neighbour along an axis; ep is folded into dp."""
        at = self.placement
        sizes = {"dp": self.dp, "pp": self.pp, "cp": at.cp, "tp": at.tp}
        place = self.axes.index("dp" if axis == "ep" else axis)
        return math.prod(sizes[inner] for inner in self.axes[place + 1 :])


@dataclass(frozen=True)
class Priced:
    """Seconds of a step of a setting, and bytes of its ranks.

    seconds  of a step; `parts` of it by cause (their sum is `seconds`): computing, sending of
             axes, idle in the pipeline, gradients, optimizer
    peaks    bytes of a rank of each place along `pp`, at its fullest moment
    """

    seconds: float
    peaks: tuple[float, ...]
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return max(self.peaks)
