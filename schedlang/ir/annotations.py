"""Annotations: what rows say of one thing each, as values of a plan, with the row that says it."""

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
    """One typed fact that a row adds to a plan; `row` is the row's number in the plan
    (`Plan.origin`)."""

    row: int = field(default=-1, kw_only=True, compare=False, repr=False)


@dataclass(frozen=True)
class Boundary(Annotation):
    """The placements of a sharded module's input and output over one axis; None: left as they come.

    differ: the module is whole on every rank, and what follows uses a part of its result.
    """

    axis: str
    input: Placement | None = R
    output: Placement | None = R
    differ: bool = False

    def show(self) -> str:
        """The placements as a schedule's reader sees them: `S(1) -> as it comes`."""
        sides = ("as it comes" if one is None else str(one) for one in (self.input, self.output))
        return " -> ".join(sides)


@dataclass(frozen=True)
class StageCut(Annotation):
    """Cuts of the trunk for one pipeline axis.

    `before` are modules before which a cut falls; `trunks` lists of modules (and single ones
    beside them) that are cut into shares in call order, once the number of stages is known.
    """

    axis: str
    before: tuple[str, ...] = ()
    trunks: tuple[str, ...] = ()
    balance: str = "even"


@dataclass(frozen=True)
class Order(Annotation):
    """The order in which a pipeline runs its microbatches.

    chunks   stages on each rank (of one replica)
    slices   runs of the sequence into which each microbatch is cut
    memory   limit of a search, in microbatches of one rank's share of the model
    table    the text of a table that lists the order; else the name says it
    every    microbatches of an update, of orders that update inside the step; None: their own
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
        """The operations of every rank; raises OrderError for sizes that the order does not run."""
        return _timeline(replace(self, axis=None), ranks)

    def stages(self, ranks: int) -> int:
        """Return the number of stages that the model is cut into on so many ranks."""
        return self.timeline(ranks).stages if self.table else ranks * self.chunks


@dataclass(frozen=True)
class Replicas(Annotation):
    """The state that ranks along `axes`, which see different rows of the batch, replicate or split.

    stage 0: all whole; 1: optimizer state split; 2: gradients too; 3: parameters too (ZeRO).
    Of stage 3: `prefetch` units are gathered ahead; `reshard` frees them between the passes.
    Of stage 0: gradients are summed in buckets of up to so many bytes (None: the runtime's own).
    `rows`: how many rows each gets, in relation to the others; (): all as many.
    """

    axes: tuple[str, ...]
    stage: int
    prefetch: int = 0
    reshard: bool = True
    bucket: int | None = None
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Context(Annotation):
    """Attention over sequences whose tokens are split over ranks.

    axes    those that the method exchanges over, as named in the row, outermost first
    method  how queries meet the keys of other ranks
    layout  which tokens a rank has: "contiguous", "zigzag" or "striped"; None: another row says
    """

    axes: tuple[str, ...]
    method: str
    layout: str | None = None


@dataclass(frozen=True)
class Codec:
    """The method by which gradients are compressed.

    kind      "powersgd", "int8" or "onebit"
    rank      of the product that stands for a matrix (powersgd)
    block     elements that share their scales (int8, onebit)
    feedback  whether what a step leaves out is added to the next one's gradient
    """

    kind: str
    rank: int = 4
    block: int = 256
    feedback: bool = True

    def smaller(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this shape is compressed; vectors never are."""
        if len(shape) < 2:
            return False
        if self.kind != "powersgd":
            return math.prod(shape) >= 8
        rows, columns = shape[0], math.prod(shape[1:])
        return self.rank * (rows + columns) < rows * columns


@dataclass(frozen=True)
class Compression(Annotation):
    """The compression of a sum of gradients over data axes, so that it is sent in fewer bytes."""

    axes: tuple[str, ...]
    codec: Codec


@dataclass(frozen=True)
class Kept(Annotation):
    """The coding of a module's saved activations: `bits` bits a number, in blocks of `block`
    numbers.

    With a `budget` of bits for an element a table says the bits of each tensor; `bits` of others.
    """

    fqn: str
    bits: int
    block: int
    budget: float | None = None


@dataclass(frozen=True)
class Cast(Annotation):
    """The dtype in which a module computes.

    dtype    "bf16", "fp16" or "fp32"
    params   parameters are cast as they are used, and all that comes in; else operations by a list
    scale    of the loss at first, and after how many good steps it is doubled (fp16)
    """

    fqn: str
    dtype: str
    params: bool
    scale: int
    growth: int


@dataclass(frozen=True)
class Stored(Annotation):
    """The storage of a module's tensors, and of those of all its children, off the device.

    what   "activations", "parameters", "gradients" or "optimizer" (its state)
    tier   "cpu" (host memory), "disk" or "peer" (the next rank along `over`)
    ahead  how many modules come back to the device before it is their turn
    """

    fqn: str
    what: str
    tier: str
    ahead: int
    over: str | None = None


@dataclass(frozen=True)
class Padded(Annotation):
    """A dim of `size` of a module's weight is rounded up to a multiple, where it is split."""

    fqn: str
    size: int
    multiple: int


@dataclass(frozen=True)
class Completion(Annotation):
    """Rows that a few rows left open are added along an axis, once there is a batch."""

    axis: str


@dataclass(frozen=True)
class Overlap(Annotation):
    """Communication that runs beside the computation: "transfers" or "gradients"."""

    what: str


@dataclass(frozen=True)
class Check(Annotation):
    """The demands of a row `verify` beyond what every proof compares."""

    what: tuple[str, ...]
    rtol: float | None
    steps: int | None
    within: float | None
    evaluate: bool


@dataclass(frozen=True)
class Expectation:
    """A bound on what the plan costs: `said` as written, `bound` in bytes, seconds or a share.

    `axes` are those over which bytes are counted (none: all); `on` the machine that it is about.
    """

    measure: str
    axes: tuple[str, ...]
    op: str
    bound: float
    said: str
    on: str | None = None
    span: Span = field(default=NOWHERE, compare=False)

    def applies(self, mesh: Mesh) -> bool:
        """Return whether the expectation is about plans on this mesh: on its machine, or on none
        named."""
        return self.on is None or mesh.device is None or self.on == mesh.device

    def holds(self, found: float) -> bool:
        """Return whether a value is within the bound."""
        return BOUNDS[self.op](found, self.bound)


@lru_cache(maxsize=32)  # searched orders take seconds
def _timeline(order: Order, ranks: int) -> Timeline:
    from schedlang.pipeline import schedules

    if order.table:
        return schedules.read_table(order.table, ranks, order.micro)
    return schedules.order(
        order.name,
        ranks,
        order.micro,
        order.chunks,
        slices=order.slices,
        memory=order.memory,
        every=order.every,
    )
