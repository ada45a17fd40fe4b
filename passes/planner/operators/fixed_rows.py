"""Rows of an existing schedule as fixed points of the solver."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from schedlang.ir.placement import R, S
from schedlang.ir.primitive import Facet
from schedlang.language import lift
from schedlang.language import nodes as n
from schedlang.passes.complete.proposed_rows import ProposedRow
from schedlang.passes.planner.operators.layout_requests import UNSPLIT, LayoutRequest
from schedlang.passes.planner.operators.paper_planners import axis_requests

if TYPE_CHECKING:
    from schedlang.ir.plan import Plan
    from schedlang.passes.reduce_model.blocks import Blocks

InputOutputDims = tuple[int | None, int | None]


@dataclass(frozen=True)
class FixedRows:
    """Rows that stay as they were written, by the axes along which they split.

    pins        axes -> common names of split parameters -> dim
    row_dims    axes -> modules with rows -> dims of input and output that the rows give
    first_rows  rows of no axis, before all others
    """

    rows: tuple[tuple[str, ProposedRow], ...] = ()
    pins: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    row_dims: Mapping[str, Mapping[str, InputOutputDims]] = field(default_factory=dict)
    first_rows: tuple[ProposedRow, ...] = ()

    def rows_along(self, axis: str) -> list[ProposedRow]:
        """Return the rows along one axis."""
        return [row for row_axis, row in self.rows if row_axis == axis]

    def requests(self, axis: str, request: LayoutRequest) -> list[LayoutRequest]:
        """List the requests for an axis: all that its rows leave open."""
        rows = self.rows_along(axis)
        stages = [row.argument("stage") for row in rows if row.changes_facet(Facet.STATE)]
        pins, row_dims = self.pins.get(axis, {}), self.row_dims.get(axis, {})
        requests = axis_requests(replace(request, pins=pins, row_dims=row_dims))
        if stages:
            stage = int(stages[0].text) if isinstance(stages[0], n.Lit) else 1
            return [replace(requests[1], mode="rows", zero=1 if stage == 2 else stage)]  # type: ignore[arg-type]
        return requests[:1] if rows else requests


def fixed_rows_of(plan: Plan, blocks: Blocks) -> FixedRows:
    """Collect the rows of a plan, at modules by their common names."""
    rows: dict[tuple[str, ProposedRow], None] = {}
    pins: dict[str, dict[str, int]] = defaultdict(dict)
    row_dims: dict[str, dict[str, InputOutputDims]] = defaultdict(dict)
    for action in plan.actions:
        placed = action.changes(Facet.PLACEMENT, Facet.STATE)
        axes = action.primitive.along if placed else ()
        shapes = action.changes(Facet.SHAPE)
        if len(axes) != 1 and not shapes:
            continue
        axis = axes[0] if axes else next(iter(plan.mesh.sizes))
        call = lift.call_of(action.primitive)
        for name in _names(blocks, action.sites):
            rows[axis, ProposedRow((name,) if name else (), call)] = None
            ends = (_dim(getattr(action.primitive, end, None)) for end in ("input", "output"))
            input_dim, output_dim = ends
            if axes:
                row_dims[axis][name] = input_dim, output_dim
    for name in plan.model.unique_parameters:
        for split in plan.effective_layout(name).splits:
            owner, _, leaf = name.rpartition(".")
            pins[split.axis][".".join(filter(None, (blocks.common_name(owner), leaf)))] = split.dim
    return FixedRows(tuple(rows), pins, row_dims)


def _names(blocks: Blocks, sites: Collection[str]) -> list[str]:
    """Common names of modules; a module that not all blocks have keeps its own name."""
    names = dict.fromkeys(
        common_name if {*blocks.modules_by_name.get(common_name, (fqn,))} <= {*sites} else fqn
        for common_name, fqn in ((blocks.common_name(fqn), fqn) for fqn in sites)
    )
    return list(names)


def _dim(value: Any) -> int | None:
    """Return the dim that an argument names; None where it leaves the dim open."""
    if value == R:
        return UNSPLIT
    dim = value.dim if isinstance(value, S) else None
    return 1 if dim == "seq" else dim if isinstance(dim, int) and dim >= 0 else None
