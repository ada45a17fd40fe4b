"""The plan: an immutable value with everything that rows decide, bound to the modules of a model.

`expand` makes it from a schedule; analysis, lowering, simulation and proofs read it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import NOWHERE, Span
from schedlang.ir.annotations import (
    ActivationCoding,
    Annotation,
    Boundary,
    Cast,
    Check,
    Completion,
    Compression,
    ContextSplit,
    Expectation,
    OffloadedTensors,
    Order,
    Overlap,
    PaddedDim,
    Replicas,
    RowGather,
    StageCut,
)
from schedlang.ir.features import Grouping, Recomputing
from schedlang.ir.mesh import Mesh
from schedlang.ir.model import ModelFacts
from schedlang.ir.placement import Layout
from schedlang.ir.primitive import Facet, Primitive
from schedlang.ir.sharing import RowIndex, apply_by_class, as_layered, changes_layouts, parents_of

F = TypeVar("F")


@dataclass(frozen=True)
class Action:
    """One row at the modules that it selects; `row` counts the rows of the plan from 0."""

    primitive: Primitive
    sites: tuple[str, ...]
    step: str
    row: int
    span: Span = field(default=NOWHERE, compare=False)

    @property
    def name(self) -> str:
        """The primitive's name in the language."""
        return type(self.primitive).__name__

    def changes(self, *facets: Facet) -> bool:
        """Return whether the row writes one of these facets."""
        return self.primitive.changes(*facets)

    @property
    def has_effect(self) -> bool:
        """Whether the row changes anything; a check does not."""
        return bool(self.primitive.writes)

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The groups of sites that the primitive is applied to, one call each."""
        if isinstance(self.primitive, Grouping):
            return self.primitive.group_sites(self.sites)
        return (
            [(site,) for site in self.sites] if self.primitive.takes == "module" else [self.sites]
        )

    @property
    def inseparable_groups(self) -> list[tuple[str, ...]]:
        """The groups of sites that are recomputed as one; no stage cut divides a group."""
        if isinstance(self.primitive, Recomputing):
            return self.primitive.inseparable_groups(self.sites)
        return [(site,) for site in self.sites]


class PlanPrinter(Protocol):
    """A printer of plans for users; `viz.picture` installs one."""

    def text(self, plan: Plan) -> str:
        """Return the plan as text for a terminal."""
        ...

    def picture(self, plan: Plan) -> str:
        """Return the plan as a picture for a notebook."""
        ...


PLAN_PRINTERS: list[PlanPrinter] = []


def place_at_row(refusal: Refusal, row: Action | None) -> Refusal:
    """Return the refusal placed at its row; unchanged where there is no row."""
    return refusal.at(row.span) if row is not None else refusal


@dataclass(frozen=True, repr=False)
class Plan:
    """Mesh, decisions, actions, and what follows from the actions. Every change makes a new plan.

    layouts                 parameter (first name) -> Layout, where it is sharded or padded
    boundaries              module -> its boundaries, one per axis that shards it
    computes                module -> the kind of computation that a row chose for it; else its
                            class decides
    kind_options            module -> the options of that computation, from the row
    batch_split_parameters  parameters (first names) sharded over an axis that splits the batch too:
                            collectives of their modules make the gradients full over it; sums over
                            replicas leave it out
    """

    model: ModelFacts = field(compare=False, repr=False)
    mesh: Mesh = Mesh()
    decisions: tuple[tuple[str, Any], ...] = ()
    actions: tuple[Action, ...] = ()
    relaxed: tuple[tuple[str, tuple[str, ...]], ...] = ()  # step -> the properties it may give up
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    boundaries: Mapping[str, tuple[Boundary, ...]] = field(default_factory=dict)
    computes: Mapping[str, str] = field(default_factory=dict)
    kind_options: Mapping[str, Any] = field(default_factory=dict)
    batch_split_parameters: frozenset[str] = frozenset()
    completions: tuple[Completion, ...] = ()
    unrolled: tuple[tuple[str, int], ...] = ()  # module -> number of its calls, each a unit
    cuts: tuple[StageCut, ...] = ()
    order: Order | None = None
    deferred_weight_grads: tuple[str, ...] | None = (
        None  # modules whose weight gradients may be deferred; None: all
    )
    overlaps: tuple[Overlap, ...] = ()
    receive_ahead: int = 1  # a receive is posted this many operations before its use
    replicas: tuple[Replicas, ...] = ()
    row_gathers: tuple[RowGather, ...] = ()
    contexts: Mapping[str, tuple[ContextSplit, ...]] = field(default_factory=dict)  # by module
    compression: Compression | None = None  # of the gradients' all-reduce over some data axes
    casts: Sequence[Cast] = ()  # modules with another dtype of computation than of storage
    stores: Sequence[OffloadedTensors] = ()  # tensors that are offloaded from the device
    # activations saved for backward in fewer bits
    activation_codings: Sequence[ActivationCoding] = ()
    padded: Sequence[PaddedDim] = ()
    checks: tuple[Check, ...] = ()  # demands to a proof
    expected: tuple[Expectation, ...] = ()  # bounds on the plan's costs
    row_index: RowIndex = field(default_factory=RowIndex, compare=False, repr=False)

    @staticmethod
    def empty(model: ModelFacts, mesh: Mesh | None = None) -> Plan:
        """Return the plan without rows, of the untouched model."""
        return Plan(model.base, mesh or Mesh())

    def __repr__(self) -> str:
        rows = f"{len(self.actions)} row{'s' * (len(self.actions) != 1)}"
        differs = f", may differ in {', '.join(sorted(self.gives_up))}" if self.gives_up else ""
        return f"<Plan for {self.model.class_name} on {self.mesh}: {rows}{differs}>"

    def __getstate__(self) -> tuple[dict[str, Any], tuple[type, ...]]:
        """Return the fields, after making the model picklable, and the classes registered with
        pytree."""
        from schedlang.ir.pytree import known_classes, make_picklable

        for module in {id(m): m for m in (self.model.model, self.model.base.model)}.values():
            make_picklable(module)
        return dict(vars(self)), known_classes()

    def __setstate__(self, state: tuple[dict[str, Any], tuple[type, ...]]) -> None:
        """Restore the fields in another process, and repeat there what making the model
        registers."""
        from schedlang.ir.pytree import record_outputs, register_classes

        vars(self).update(state[0])
        register_classes(state[1])
        record_outputs(*self.model.model.modules())

    def __str__(self) -> str:
        """Return the plan as the verb `plan` shows it without a batch."""
        return PLAN_PRINTERS[-1].text(self) if PLAN_PRINTERS else self.rows()

    def _repr_html_(self) -> str:
        """Return the plan as a picture for notebooks: placements on the model's tree, and
        memory."""
        return (
            PLAN_PRINTERS[-1].picture(self)
            if PLAN_PRINTERS
            else f"<pre>{html.escape(self.rows())}</pre>"
        )

    def rows(self) -> str:
        """Format one line for each row: its step, where it acts and what it does."""
        lines = [f"{self.model.class_name} on {self.mesh}, {len(self.actions)} rows"]
        for action in self.actions:
            first = action.sites[0] or "the model"
            suffix = f" and {len(action.sites) - 1} more" if len(action.sites) > 1 else ""
            lines.append(f"  {action.step or '-'}: {first}{suffix}  {action.primitive}")
        return "\n".join(lines)

    def add(
        self, primitive: Primitive, sites: Sequence[str], *, step: str = "", span: Span = NOWHERE
    ) -> Plan:
        """Return the plan with one more row, applied to all its sites or to none.

        Raises Refusal from the primitive's own checks; `self` is never changed.
        """
        primitive.agree(self.mesh.names)
        action = Action(primitive, tuple(sites), step, self.next_row, span)
        by_class = apply_by_class(self, action) if len(sites) > 1 else None
        plan = by_class or self
        for target in self.targets(action) if by_class is None else ():
            primitive.check(target, plan)
            plan = primitive.transform(target, plan)
        actions = (*self.actions, action)
        many = len(sites) > 1 or bool(self.model.children(sites[0]))
        one_by_one = many and by_class is None and changes_layouts(self, plan)
        return replace(plan, actions=actions, row_index=self.trail.with_row(actions, one_by_one))

    @property
    def next_row(self) -> int:
        """The number of the row that is added next, for annotations that the row makes."""
        return len(self.actions)  # not the last number plus 1: completed rows stand between others

    def origin(self, annotation: Annotation) -> Action | None:
        """Return the row that an annotation comes from; None if the row is not in the plan."""
        return next((action for action in self.actions if action.row == annotation.row), None)

    def rows_changing(self, *facets: Facet) -> list[Action]:
        """Return the rows that write one of these facets, in order."""
        return [action for action in self.actions if action.primitive.changes(*facets)]

    def rows_with(self, feature: type[F]) -> list[tuple[Action, F]]:
        """Return the rows that have a feature (`schedlang.ir.features`), in order."""
        rows = ((action, action.primitive) for action in self.actions)
        return [(action, row) for action, row in rows if isinstance(row, feature)]

    @property
    def trail(self) -> RowIndex:
        """The rows at each module: maintained while rows are added, computed anew for other
        rows."""
        return (
            self.row_index
            if self.row_index.rows is self.actions
            else RowIndex.index_rows(self.actions)
        )

    def targets(self, action: Action) -> Iterator[Any]:
        """Yield what the primitive of an action is called with, call by call: one site, or
        several."""
        for group in action.groups:
            sites = tuple(self.model.sites[fqn] for fqn in group)
            yield sites if action.primitive.takes == "selection" else sites[0]

    def layout(self, parameter: str) -> Layout:
        """Return the layout of a parameter (by any of its names) on the mesh."""
        fact = self.model.parameters[parameter]
        return self.layouts.get(fact.name) or Layout.whole(fact.shape)

    def effective_layout(self, parameter: str) -> Layout:
        """Return the effective layout of a parameter: without splits over axes of size 1 and their
        padding."""
        layout = self.layout(parameter)
        real = tuple(split for split in layout.splits if self.mesh.size(split.axis) > 1)
        return replace(layout, splits=real) if real else Layout.whole(layout.shape)

    def with_layout(self, parameter: str, layout: Layout) -> Plan:
        """Return the plan with this layout of a parameter, under all its names."""
        name = self.model.parameters[parameter].name
        return replace(self, layouts=as_layered(self.layouts).put({name: layout}))

    def with_batch_split_layout(self, parameter: str, layout: Layout) -> Plan:
        """Return the plan with this layout of a parameter whose module itself reduces the gradient
        fully."""
        name = self.model.parameters[parameter].name
        plan = self.with_layout(parameter, layout)
        return replace(plan, batch_split_parameters=plan.batch_split_parameters | {name})

    def with_kind(self, fqn: str, kind: str, new_options: Any = None) -> Plan:
        """Return the plan in which a module computes as `kind`, with the options `new_options`."""
        options = (
            self.kind_options
            if new_options is None
            else as_layered(self.kind_options).put({fqn: new_options})
        )
        return replace(
            self, computes=as_layered(self.computes).put({fqn: kind}), kind_options=options
        )

    def with_boundary(self, fqn: str, boundary: Boundary) -> Plan:
        """Return the plan with one more boundary at a module."""
        existing, boundary = self.boundaries.get(fqn, ()), replace(boundary, row=self.next_row)
        updated = as_layered(self.boundaries).put({fqn: (*existing, boundary)})
        return replace(self, boundaries=updated)

    @property
    def micro(self) -> int:
        """The number of microbatches that a rank's rows are split into."""
        return self.order.micro if self.order is not None else 1

    def find_overlap(self, what: str) -> Overlap | None:
        """Return the annotation on overlapped communication of this kind; None if there is none."""
        return next((overlap for overlap in self.overlaps if overlap.what == what), None)

    def stages(self, axis: str) -> int:
        """Return the number of stages that the model is cut into along an axis."""
        ranks = self.mesh.size(axis)
        return self.order.stages(ranks) if self.order is not None else ranks

    @property
    def gives_up(self) -> frozenset[str]:
        """The properties in which the schedule's result may differ from the original's."""
        return frozenset(name for a in self.actions for name in a.primitive.gives_up)

    @property
    def loss_scaling(self) -> Cast | None:
        """The cast that scales the loss (fp16); None without one."""
        return next((cast for cast in self.casts if cast.dtype == "fp16"), None)

    @property
    def used_axes(self) -> frozenset[str]:
        """The plain axes that some row uses."""
        axes = [axis for r in self.replicas for axis in r.axes]
        axes += [axis for rows in self.contexts.values() for row in rows for axis in row.axes]
        axes += [b.axis for boundaries in self.boundaries.values() for b in boundaries]
        axes += [axis for layout in self.layouts.values() for axis in layout.axes]
        axes += [cut.axis for cut in self.cuts]
        return frozenset(plain for axis in axes for plain in self.mesh.fold(axis))

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The plain axes whose ranks see different rows or tokens of the batch, in mesh order."""
        axes = {
            axis for r in self.replicas for declared in r.axes for axis in self.mesh.fold(declared)
        }
        if self.contexts:
            axes.update(self.context_axes)
        return tuple(axis for axis in self.mesh.sizes if axis in axes)

    @property
    def context_axes(self) -> tuple[str, ...]:
        """The plain axes whose ranks see different tokens of the same rows, in mesh order."""
        axes = [axis for rows in self.contexts.values() for row in rows for axis in row.axes]
        return self.mesh.fold(axes)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The plain axes whose ranks see different rows of the batch, in mesh order."""
        tokens = self.context_axes if self.contexts else ()
        return tuple(axis for axis in self.data_axes if axis not in tokens)

    @property
    def shares(self) -> int:
        """The number of parts that the rows of a batch are split into."""
        return self.mesh.size(self.row_axes)

    @property
    def share_weights(self) -> int | tuple[int, ...]:
        """The number of equal `shares`; if shares differ, the relative number of rows of each."""
        uneven = [replicas for replicas in self.replicas if replicas.rows]
        if not uneven:
            return self.shares
        ranks = (self.mesh.member(0, self.row_axes, index) for index in range(self.shares))
        return tuple(
            math.prod(replicas.rows[self.mesh.index(rank, replicas.axes)] for replicas in uneven)
            for rank in ranks
        )

    @property
    def all_replicas(self) -> tuple[Replicas, ...]:
        """`replicas`, and one of stage 0 for context axes that no replicas name."""
        axes = {axis for replicas in self.replicas for axis in self.mesh.fold(replicas.axes)}
        unnamed = tuple(axis for axis in self.context_axes if axis not in axes)
        return (*self.replicas, Replicas(unnamed, 0)) if unnamed else self.replicas

    def split_axes(self, parameter: str) -> frozenset[str]:
        """Return the plain axes that split a parameter."""
        layout = self.layout(parameter)
        return frozenset(plain for axis in layout.axes for plain in self.mesh.fold(axis))

    def replica_axes(self, parameter: str) -> tuple[str, ...]:
        """Return the data axes along which ranks hold the same values of a parameter, in mesh
        order."""
        split = self.split_axes(parameter)
        return tuple(axis for axis in self.data_axes if axis not in split)

    def rows_at(self, fqn: str) -> list[Action]:
        """Return the actions at this module and at modules that contain it."""
        places = {
            p for rows in self.trail.rows_at.get_many((fqn, *parents_of(fqn)), ()) for p in rows
        }
        return [self.actions[index] for index in sorted(places)]

    def rows_by_module(self) -> dict[str, list[int]]:
        """Return the numbers of the rows at each module that a row names."""
        rows: dict[str, list[int]] = {}
        for action in self.actions:
            for fqn in dict.fromkeys(action.sites):
                rows.setdefault(fqn, []).append(action.row)
        return rows

    def rows_near(self, fqn: str) -> list[Action]:
        """Return the actions at this module, at modules that contain it and at modules inside of
        it."""
        return [self.actions[index] for index in sorted(self.trail.rows_around((fqn,)))]
