"""Values of the planner: costs of a model's units on one rank, a setting, and its price."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["product", "attention", "other"]
Shapes = tuple[tuple[tuple[int, ...], int, int], ...]


@dataclass(frozen=True)
class OperatorCost:
    """Operators of equal cost.

    kind   "product" (matrix product or convolution), fused "attention", or "other"
    flops  floating-point operations of one, counted as 16-bit operations
    moved  bytes that one reads and writes
    count  how often it runs
    cause  name under which a fit to measured runs weights it; "" for its kind
    """

    kind: Kind
    flops: float
    moved: float
    count: float = 1
    cause: str = ""


@dataclass(frozen=True)
class CollectiveCost:
    """Collectives, or messages, of equal cost.

    op     all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send
    axis   of the mesh, along which they run
    bytes  of the full tensor, of one
    count  how often it is sent
    """

    op: str
    axis: str
    bytes: float
    count: float = 1


@dataclass(frozen=True)
class Work:
    """Operators that one rank runs, and messages that it sends, in a stretch of a step."""

    operators: tuple[OperatorCost, ...] = ()
    collectives: tuple[CollectiveCost, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Axes that split tensors, and rows: what the cost of one unit on one rank depends on.

    rows      of a microbatch on one rank
    sequence  whether activations between layers of `tp` are split along the sequence too
    offload   what is on the host: "none", "activations", "optimizer", or "both"
    slices    of a sequence, which run one after the other: costs of a unit are of a mean slice
    """

    rows: int = 1
    tp: int = 1
    sequence: bool = False
    cp: int = 1
    ep: int = 1
    offload: str = "none"
    slices: int = 1

    @property
    def offloads_activations(self) -> bool:
        """Whether activations are offloaded to the host, of units that are modules."""
        return self.offload in ("activations", "both")

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state is on the host, where its step runs."""
        return self.offload in ("optimizer", "both")


@dataclass(frozen=True)
class Unit:
    """One unit of a stage (a layer, an embedding, a head with its loss), on one rank.

    All figures are for one microbatch of `Placement.rows` rows, or one of its slices. `numel` are
    parameters that the rank holds with this placement, before ZeRO shards them; `expert_numel` are
    those among them that `ep` has split, which are therefore reduced over fewer replicas.
    `shapes` are the shapes of these parameters, which decide along which dim ZeRO shards them, each
    with its parameters and the experts' among them; () where all are sharded evenly. Bytes: `kept`
    is saved by a forward for its backward; `input` is saved instead where the unit is recomputed;
    `peak` is held besides saved bytes at the fullest moment of forward or backward; `output` goes
    to the next unit; `entering` is saved besides by the first unit of a stage, which holds the
    input that it received; `waiting` is saved besides between two halves of a backward: gradients
    of outputs of layers.
    """

    name: str
    numel: int
    forward: Work
    backward: Work
    kept: float
    input: float
    peak: float
    output: float
    expert_numel: int = 0
    entering: float = 0.0
    waiting: float = 0.0
    shapes: Shapes = ()


@dataclass(frozen=True)
class UnitRun:
    """`count` equal units in a row."""

    unit: Unit
    count: int


@dataclass(frozen=True)
class Chain:
    """A model under one placement: its units from first to last, as runs of equal units.

    tied  pairs of indices of runs that share parameters (an embedding and its head)
    """

    placement: Placement
    runs: tuple[UnitRun, ...]
    tied: tuple[tuple[int, int], ...] = ()

    @property
    def length(self) -> int:
        """The number of units."""
        return sum(run.count for run in self.runs)


@dataclass(frozen=True)
class Recipe:
    """Bytes of one number of a parameter, of its gradient, and of its optimizer state.

    master  bytes of the optimizer's 32-bit copy, which ZeRO shards with the optimizer state
    """

    parameter: int = 2
    gradient: int = 2
    moments: int = 8
    master: int = 4

    def state(self, hosted: bool) -> int:
        """Bytes of optimizer state on the device per parameter; masters always stay there."""
        return self.master + (0 if hosted else self.moments)


@dataclass(frozen=True)
class Setting:
    """One way to train: axes, pipeline order, stages, and what is done to save memory.

    order   of the pipeline, by its name in the catalogue; `chunks` stages on each rank of pp
    micro   microbatches of a step on one replica
    zero    stage over the replicas
    cuts    units of each stage, in order; () for stages as even as possible by the planner's rule
    again   units of each stage that are recomputed, the first ones; () for none
    axes    from the slowest (ranks farthest apart) to the fastest; ep is folded into dp
    rows    of a microbatch of each replica, where these differ; () for those of the placement
    nodes   indices into the cluster's nodes, in the order of ranks; () for the cluster's order
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
        """Ranks of the mesh; ranks of experts are replicas for everything else."""
        return self.dp * self.pp * self.placement.tp * self.placement.cp

    def stride(self, axis: str) -> int:
        """Return the distance in ranks to a neighbour along an axis; ep is folded into dp."""
        placement = self.placement
        sizes = {"dp": self.dp, "pp": self.pp, "cp": placement.cp, "tp": placement.tp}
        position = self.axes.index("dp" if axis == "ep" else axis)
        return math.prod(sizes[inner] for inner in self.axes[position + 1 :])


@dataclass(frozen=True)
class Price:
    """Seconds of a step of a setting, and bytes of its ranks.

    seconds  of a step; `parts` of it by cause (their sum is `seconds`): computing, sending along
             axes, pipeline bubble ("idle"), gradients, optimizer
    peaks    bytes of a rank of each place along `pp`, at its fullest moment
    """

    seconds: float
    peaks: tuple[float, ...]
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return max(self.peaks)
