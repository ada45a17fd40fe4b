"""Annotations: typed facts that rows add to a plan, each with the number of its row."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from schedlang.diagnostics.source import NOWHERE, Span
from schedlang.ir.placement import Placement, R

if TYPE_CHECKING:
    from schedlang.ir.mesh import Mesh
    from schedlang.pipeline.timeline.table import Timeline


BOUNDS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Annotation:
    """A typed fact that a row adds to a plan; `row` is the row's number in the plan
    (`Plan.origin`)."""

    row: int = field(default=-1, kw_only=True, compare=False, repr=False)


@dataclass(frozen=True)
class Boundary(Annotation):
    """The placements of a sharded module's input and output over one axis; None: not changed.

    differ: the module is full on every rank, but the modules after it use a part of its output.
    """

    axis: str
    input: Placement | None = R
    output: Placement | None = R
    replicated_output: bool = False

    def show(self) -> str:
        """Format the placements for a reader: `S(1) -> as it comes`."""
        sides = ("as it comes" if side is None else str(side) for side in (self.input, self.output))
        return " -> ".join(sides)


@dataclass(frozen=True)
class StageCut(Annotation):
    """Cuts of the model into stages along one pipeline axis.

    `before` are modules before which a stage begins. `trunks` are lists of modules (and single
    modules beside them) that are cut into shares, in call order, once the number of stages is
    known.
    """

    axis: str
    before: tuple[str, ...] = ()
    trunks: tuple[str, ...] = ()
    balance: str = "even"


@dataclass(frozen=True)
class Order(Annotation):
    """The order in which a pipeline runs its microbatches.

    chunks   stages on each rank (of one replica)
    slices   slices of the sequence into which each microbatch is cut
    memory   limit of a search, in microbatches of one rank's share of the model
    table    the text of a table that lists the order; "": `name` names the order
    every    microbatches per update, for orders that update within a step; None: the default
    """

    axis: str | None
    name: str
    micro: int
    chunks: int = 1
    slices: int = 1
    memory: float | None = None
    table: str = ""
    every: int | None = None

    def timeline(self, ranks: int) -> Timeline:
        """Return the operations of every rank; raises OrderError for sizes that the order cannot
        run."""
        return _timeline(replace(self, axis=None), ranks)

    def stages(self, ranks: int) -> int:
        """Return the number of stages that the model is cut into on this number of ranks."""
        return self.timeline(ranks).stages if self.table else ranks * self.chunks


@dataclass(frozen=True)
class Replicas(Annotation):
    """The state that ranks along `axes`, which see different rows of the batch, replicate or shard.

    stage 0: all replicated; 1: optimizer state sharded; 2: gradients too; 3: parameters too (ZeRO).
    For stage 3: `prefetch` units are gathered ahead; `reshard` frees them between forward and
    backward. For stage 0: gradients are all-reduced in buckets of at most `bucket` bytes (None: the
    runtime's default). `rows`: the relative number of rows of each rank; (): equal numbers.
    """

    axes: tuple[str, ...]
    stage: int
    prefetch: int = 0
    reshard: bool = True
    bucket: int | None = None
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class RowGather(Annotation):
    """A module whose output's rows are all-gathered over the ranks that split the batch."""

    fqn: str


@dataclass(frozen=True)
class ContextSplit(Annotation):
    """Attention over sequences whose tokens are split over ranks.

    axes    the axes that the method exchanges over, as named in the row, outermost first
    method  how queries reach the keys of other ranks
    layout  the tokens of a rank: "contiguous", "zigzag" or "striped"; None: set by another row
    """

    axes: tuple[str, ...]
    method: str
    layout: str | None = None


@dataclass(frozen=True)
class Codec:
    """The method by which gradients are compressed.

    kind      "powersgd", "int8" or "onebit"
    rank      the rank of the low-rank product that approximates a matrix (powersgd)
    block     elements that share their scales (int8, onebit)
    feedback  whether a step's compression error is added to the next step's gradient
    """

    kind: str
    rank: int = 4
    block: int = 256
    feedback: bool = True

    def compresses(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this shape is compressed; vectors never are."""
        if len(shape) < 2:
            return False
        if self.kind != "powersgd":
            return math.prod(shape) >= 8
        rows, columns = shape[0], math.prod(shape[1:])
        return self.rank * (rows + columns) < rows * columns


@dataclass(frozen=True)
class Compression(Annotation):
    """The compression of an all-reduce of gradients over data axes, to send fewer bytes."""

    axes: tuple[str, ...]
    codec: Codec


@dataclass(frozen=True)
class ActivationCoding(Annotation):
    """The coding of a module's saved activations: `bits` bits per number, in blocks of `block`
    numbers.

    With a `budget` (bits per element) a table sets the bits of each tensor; `bits` is for the
    others.
    """

    fqn: str
    bits: int
    block: int
    budget: float | None = None


@dataclass(frozen=True)
class Cast(Annotation):
    """The dtype in which a module computes.

    dtype    "bf16", "fp16" or "fp32"
    params   cast parameters as they are used, and all inputs; else cast by a list of operations
    scale    the initial loss scale (fp16)
    growth   the number of good steps after which the loss scale is doubled (fp16)
    """

    fqn: str
    dtype: str
    params: bool
    scale: int
    growth: int


@dataclass(frozen=True)
class OffloadedTensors(Annotation):
    """The storage of a module's tensors, its children's included, off the device.

    what   "activations", "parameters", "gradients" or "optimizer" (its state)
    tier   "cpu" (host memory), "disk" or "peer" (the next rank along `over`)
    ahead  the number of modules ahead of their use that tensors are copied back to the device
    """

    fqn: str
    what: str
    tier: str
    ahead: int
    over: str | None = None


@dataclass(frozen=True)
class PaddedDim(Annotation):
    """A dim of `size` of a module's weight that is padded to a multiple where it is split."""

    fqn: str
    size: int
    multiple: int


@dataclass(frozen=True)
class Completion(Annotation):
    """A demand to add rows along an axis that other rows left open, once there is a batch."""

    axis: str


@dataclass(frozen=True)
class Overlap(Annotation):
    """Communication that runs concurrently with the computation: "transfers" or "gradients"."""

    what: str


@dataclass(frozen=True)
class Check(Annotation):
    """The demands of a row `verify`, beyond the comparisons of every proof."""

    what: tuple[str, ...]
    rtol: float | None
    steps: int | None
    within: float | None
    evaluate: bool


@dataclass(frozen=True)
class Expectation:
    """A bound on what the plan costs: `said` as written, `bound` in bytes, seconds or a share.

    `axes`: the axes over which bytes are counted (none: all); `on`: the machine that the bound is
    for.
    """

    measure: str
    axes: tuple[str, ...]
    op: str
    bound: float
    said: str
    on: str | None = None
    span: Span = field(default=NOWHERE, compare=False)

    def applies(self, mesh: Mesh) -> bool:
        """Return whether the bound is for plans on this mesh: its machine is the mesh's, or not
        named."""
        return self.on is None or mesh.device is None or self.on == mesh.device

    def holds(self, value: float) -> bool:
        """Return whether a value satisfies the bound."""
        return BOUNDS[self.op](value, self.bound)


@lru_cache(maxsize=32)  # a search for an order takes seconds
def _timeline(order: Order, ranks: int) -> Timeline:
    from schedlang.pipeline import schedules

    if order.table:
        return schedules.read_table(order.table, ranks, order.micro)
    return schedules.make_order(
        order.name,
        ranks,
        order.micro,
        order.chunks,
        slices=order.slices,
        memory=order.memory,
        every=order.every,
    )
