"""The plan: an immutable value that says what will be done, where, in which order, for whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from schedlang.mesh import Mesh
from schedlang.model import ModelFacts
from schedlang.placement import Layout, Placement, R

if TYPE_CHECKING:
    from schedlang.primitive import Primitive
    from schedlang.source import Span
    from schedlang.timeline import Timeline

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Action:
    """One row at the modules that it selects; `row` counts the rows of the plan from 0."""

    primitive: Primitive
    sites: tuple[str, ...]
    step: str
    row: int
    span: Span | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The word of the language for what is done."""
        return type(self.primitive).__name__

    @property
    def each(self) -> Iterator[tuple[str, ...]]:
        """The groups of sites that the primitive takes at a time."""
        return iter(self.primitive.taken(self.sites))


@dataclass(frozen=True)
class Boundary:
    """How activations enter and leave a sharded module, for one axis; None: as they come.

    differ: the module is whole on every rank, and what follows uses a part of its result.
    """

    axis: str
    input: Placement | None = R
    output: Placement | None = R
    differ: bool = False


@dataclass(frozen=True)
class Cut:
    """Cuts of the trunk for one pipeline axis.

    `before` are modules before which a cut falls; `trunks` lists of modules (and single ones
    beside them) that are cut into shares in call order, once the number of stages is known.
    """

    axis: str
    before: tuple[str, ...] = ()
    trunks: tuple[str, ...] = ()
    balance: str = "even"


@dataclass(frozen=True)
class Order:
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
        """Into how many stages the model is cut."""
        return self.timeline(ranks).stages if self.table else ranks * self.chunks


@dataclass(frozen=True)
class Replicas:
    """What the ranks along `axes`, which see different rows of the batch, keep whole or split.

    stage 0: all whole; 1: optimizer state split; 2: gradients too; 3: parameters too (ZeRO).
    Of stage 3: `prefetch` units are gathered ahead; `reshard` frees them between the passes.
    """

    axes: tuple[str, ...]
    stage: int
    prefetch: int = 0
    reshard: bool = True


@dataclass(frozen=True)
class Context:
    """Attention over sequences whose tokens are split over ranks.

    axes    those that the method exchanges over, as named in the row, outermost first
    method  how queries meet the keys of other ranks
    layout  which tokens a rank has: "contiguous", "zigzag" or "striped"; None: another row says
    """

    axes: tuple[str, ...]
    method: str
    layout: str | None = None


@dataclass(frozen=True)
class Compression:
    """How the sum of gradients over data axes is sent in fewer bytes.

    kind      "powersgd" (a product of `rank`), "int8" or "onebit" (in blocks of `block` elements)
    feedback  what a step leaves out is added to the gradients of the next
    """

    axes: tuple[str, ...]
    kind: str
    rank: int
    block: int
    feedback: bool


@dataclass(frozen=True)
class Kept:
    """What a module saves for backward is kept in numbers of `bits` bits, in blocks of `block`."""

    fqn: str
    bits: int
    block: int


@dataclass(frozen=True)
class Cast:
    """What a module computes in.

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
class Stored:
    """What a row keeps off the device of a module, and of all that it holds.

    what   "activations", "parameters", "gradients" or "optimizer" (its state)
    tier   "cpu" (host memory) or "disk"
    ahead  how many modules come back to the device before it is their turn
    """

    fqn: str
    what: str
    tier: str
    ahead: int


@dataclass(frozen=True)
class Expectation:
    """A bound on what the plan costs: `said` as written, `bound` in bytes or as a share.

    `axes` are those over which bytes are counted (none: all); `on` the machine that it is about.
    """

    measure: str
    axes: tuple[str, ...]
    op: str
    bound: float
    said: str
    on: str | None = None
    span: Span | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Plan:
    """Mesh, decisions, actions, and what follows from the actions.  Every change makes a new plan.

    layouts     parameter (first name) -> Layout, where it is not whole everywhere
    boundaries  module -> its boundaries, one per axis that shards it
    computes    module -> the kind of computation that a row chose for it; else its class says it
    told        module -> what that row says of it
    spread      parameters (first names) split over an axis that splits the batch too: what their
                modules send makes their gradients whole over it, and no sum over replicas does
    """

    model: ModelFacts = field(compare=False, repr=False)
    mesh: Mesh = Mesh()
    decisions: tuple[tuple[str, Any], ...] = ()
    actions: tuple[Action, ...] = ()
    relaxed: tuple[tuple[str, tuple[str, ...]], ...] = ()  # step -> what it may give up
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    boundaries: Mapping[str, tuple[Boundary, ...]] = field(default_factory=dict)
    computes: Mapping[str, str] = field(default_factory=dict)
    told: Mapping[str, Any] = field(default_factory=dict)
    spread: frozenset[str] = frozenset()
    completing: tuple[str, ...] = ()  # axes along which rows are added once there is a batch
    unrolled: tuple[tuple[str, int], ...] = ()  # module -> its calls, each a unit of its own
    cuts: tuple[Cut, ...] = ()
    order: Order | None = None
    late: tuple[str, ...] | None = None  # modules whose weight gradients may wait; None: all
    overlaps: tuple[str, ...] = ()  # communication that runs beside the computation
    ahead: int = 1  # operations before its use at which a receive is posted
    replicas: tuple[Replicas, ...] = ()
    contexts: Mapping[str, tuple[Context, ...]] = field(default_factory=dict)  # by module
    compression: Compression | None = None  # of the sums of gradients over some data axes
    casts: tuple[Cast, ...] = ()  # modules that compute in another dtype than they are stored in
    stores: tuple[Stored, ...] = ()  # what does not lie on the device
    kept: tuple[Kept, ...] = ()  # what is saved for backward in fewer bits
    expected: tuple[Expectation, ...] = ()  # bounds on what it costs

    @staticmethod
    def empty(model: ModelFacts, mesh: Mesh | None = None) -> Plan:
        """The plan that does nothing: the untouched model's, whatever rows have changed in it."""
        return Plan(model.base, mesh or Mesh())

    def __str__(self) -> str:
        """One line for each row: its step, where it acts and what it does."""
        lines = [f"{self.model.class_name} on {self.mesh}, {len(self.actions)} rows"]
        for action in self.actions:
            first = action.sites[0] or "the model"
            more = f" and {len(action.sites) - 1} more" if len(action.sites) > 1 else ""
            lines.append(f"  {action.step or '-'}: {first}{more}  {action.primitive}")
        return "\n".join(lines)

    def add(
        self,
        primitive: Primitive,
        sites: Sequence[str],
        *,
        step: str = "",
        span: Span | None = None,
    ) -> Plan:
        """The plan with one more row, applied to all its sites or to none.

        Raises Refusal from the primitive's own check; `self` is never changed.
        """
        row = self.actions[-1].row + 1 if self.actions else 0
        action = Action(primitive, tuple(sites), step, row, span)
        plan = self
        for target in self.targets(action):
            primitive.check(target, plan)
            plan = primitive.effect(target, plan)
        return replace(plan, actions=(*self.actions, action))

    def targets(self, action: Action) -> Iterator[Any]:
        """What the primitive of an action is given, one after the other: a site, or several."""
        for group in action.each:
            known = tuple(self.model.sites[fqn] for fqn in group)
            yield known if action.primitive.takes == "selection" else known[0]

    def layout(self, parameter: str) -> Layout:
        """How a parameter (any of its names) lies on the mesh."""
        fact = self.model.parameters[parameter]
        return self.layouts.get(fact.name) or Layout.whole(fact.shape)

    def held(self, parameter: str) -> Layout:
        """How a parameter really lies: axes of size 1 split nothing, and padding serves a split."""
        layout = self.layout(parameter)
        real = tuple(split for split in layout.splits if self.mesh.size(split.axis) > 1)
        return replace(layout, splits=real) if real else Layout.whole(layout.shape)

    def with_layout(self, parameter: str, layout: Layout) -> Plan:
        """The plan in which a parameter, under all its names, lies as given."""
        name = self.model.parameters[parameter].name
        return replace(self, layouts=_put(self.layouts, name, layout))

    def with_spread(self, parameter: str, layout: Layout) -> Plan:
        """The plan in which a parameter lies as given, and its module completes its gradient."""
        name = self.model.parameters[parameter].name
        plan = self.with_layout(parameter, layout)
        return replace(plan, spread=plan.spread | {name})

    def with_kind(self, fqn: str, kind: str, told: Any = None) -> Plan:
        """The plan in which a module computes as a kind of its own."""
        told = self.told if told is None else _put(self.told, fqn, told)
        return replace(self, computes=_put(self.computes, fqn, kind), told=told)

    def with_boundary(self, fqn: str, boundary: Boundary) -> Plan:
        """The plan with one more boundary at a module."""
        known = self.boundaries.get(fqn, ())
        return replace(self, boundaries=_put(self.boundaries, fqn, (*known, boundary)))

    @property
    def micro(self) -> int:
        """Into how many microbatches a rank's rows are split."""
        return self.order.micro if self.order is not None else 1

    def stages(self, axis: str) -> int:
        """Into how many stages the model is cut along an axis."""
        ranks = self.mesh.size(axis)
        return self.order.stages(ranks) if self.order is not None else ranks

    @property
    def gives_up(self) -> frozenset[str]:
        """All that the schedule's result may differ in from the original's."""
        return frozenset(name for a in self.actions for name in a.primitive.gives_up)

    @property
    def scaled(self) -> Cast | None:
        """The row that says how the loss is scaled, if it is."""
        return next((one for one in self.casts if one.dtype == "fp16"), None)

    @property
    def used_axes(self) -> frozenset[str]:
        """The plain axes that some row uses."""
        over = [axis for r in self.replicas for axis in r.axes]
        over += [*self.context_axes]
        over += [b.axis for boundaries in self.boundaries.values() for b in boundaries]
        over += [axis for layout in self.layouts.values() for axis in layout.axes]
        over += [cut.axis for cut in self.cuts]
        return frozenset(plain for axis in over for plain in self.mesh.fold(axis))

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The plain axes whose ranks see different rows or tokens of the batch, in mesh order."""
        named = {axis for r in self.replicas for over in r.axes for axis in self.mesh.fold(over)}
        named.update(self.context_axes)
        return tuple(axis for axis in self.mesh.sizes if axis in named)

    @property
    def context_axes(self) -> tuple[str, ...]:
        """The plain axes whose ranks see different tokens of the same rows, in mesh order."""
        named = [axis for rows in self.contexts.values() for row in rows for axis in row.axes]
        return self.mesh.fold(named)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The plain axes whose ranks see different rows of the batch, in mesh order."""
        tokens = self.context_axes
        return tuple(axis for axis in self.data_axes if axis not in tokens)

    @property
    def shares(self) -> int:
        """Into how many parts the rows of a batch are split."""
        return self.mesh.size(self.row_axes)

    @property
    def copies(self) -> tuple[Replicas, ...]:
        """`replicas`, and those that split sequences alone: what they hold is whole."""
        named = {axis for one in self.replicas for axis in self.mesh.fold(one.axes)}
        alone = tuple(axis for axis in self.context_axes if axis not in named)
        return (*self.replicas, Replicas(alone, 0)) if alone else self.replicas

    def split_axes(self, parameter: str) -> frozenset[str]:
        """The plain axes that split a parameter."""
        layout = self.layout(parameter)
        return frozenset(plain for axis in layout.axes for plain in self.mesh.fold(axis))

    def copied_over(self, parameter: str) -> tuple[str, ...]:
        """The data axes along which ranks hold the same of a parameter, in mesh order."""
        split = self.split_axes(parameter)
        return tuple(axis for axis in self.data_axes if axis not in split)

    def rows_at(self, fqn: str) -> list[Action]:
        """The actions whose sites are this module or hold it."""
        return [
            action
            for action in self.actions
            if any(fqn == s or not s or fqn.startswith(f"{s}.") for s in action.sites)
        ]


@lru_cache(maxsize=32)  # searched orders take seconds
def _timeline(order: Order, ranks: int) -> Timeline:
    from schedlang import orders

    if order.table:
        return orders.read_table(order.table, ranks, order.micro)
    return orders.order(
        order.name, ranks, order.micro, order.chunks,
        slices=order.slices, memory=order.memory, every=order.every,
    )  # fmt: skip


def _put(known: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    return {**known, key: value}
