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
from schedlang.passes.complete.proposal import Row
from schedlang.passes.planner.operators.asked import WHOLE, Asked
from schedlang.passes.planner.operators.named import menu

if TYPE_CHECKING:
    from schedlang.ir.plan import Plan
    from schedlang.passes.reduce_model.blocks import Blocks

Told = tuple[int | None, int | None]


@dataclass(frozen=True)
class Given:
    """Rows that stay as they were written, by the axes along which they split.

    pins   axes -> common names of split parameters -> dim
    told   axes -> modules with rows -> dims of input and output that the rows give
    above  rows of no axis, before all others
    """

    rows: tuple[tuple[str, Row], ...] = ()
    pins: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    told: Mapping[str, Mapping[str, Told]] = field(default_factory=dict)
    above: tuple[Row, ...] = ()

    def beside(self, axis: str) -> list[Row]:
        """Return the rows along one axis."""
        return [row for own, row in self.rows if own == axis]

    def asked(self, axis: str, asked: Asked) -> list[Asked]:
        """List the requests for an axis: all that its rows leave open."""
        rows = self.beside(axis)
        stages = [row.argument("stage") for row in rows if row.changes(Facet.STATE)]
        pins, told = self.pins.get(axis, {}), self.told.get(axis, {})
        every = menu(replace(asked, pins=pins, told=told))
        if stages:
            stage = int(stages[0].text) if isinstance(stages[0], n.Lit) else 1
            return [replace(every[1], mode="rows", zero=1 if stage == 2 else stage)]  # type: ignore[arg-type]
        return every[:1] if rows else every


def given_of(plan: Plan, blocks: Blocks) -> Given:
    """Collect the rows of a plan, at modules by their common names."""
    rows: dict[tuple[str, Row], None] = {}
    pins: dict[str, dict[str, int]] = defaultdict(dict)
    told: dict[str, dict[str, Told]] = defaultdict(dict)
    for action in plan.actions:
        placed = action.changes(Facet.PLACEMENT, Facet.STATE)
        axes = action.primitive.along if placed else ()
        shapes = action.changes(Facet.SHAPE)
        if len(axes) != 1 and not shapes:
            continue
        axis = axes[0] if axes else next(iter(plan.mesh.sizes))
        called = lift.call_of(action.primitive)
        for name in _names(blocks, action.sites):
            rows[axis, Row((name,) if name else (), called)] = None
            ends = (_dim(getattr(action.primitive, end, None)) for end in ("input", "output"))
            entered, left = ends
            if axes:
                told[axis][name] = entered, left
    for name in plan.model.unique:
        for split in plan.held(name).splits:
            owner, _, own = name.rpartition(".")
            pins[split.axis][".".join(filter(None, (blocks.common(owner), own)))] = split.dim
    return Given(tuple(rows), pins, told)


def _names(blocks: Blocks, sites: Collection[str]) -> list[str]:
    """Common names of modules; a module that not all blocks have keeps its own name."""
    found = dict.fromkeys(
        common if {*blocks.named.get(common, (fqn,))} <= {*sites} else fqn
        for common, fqn in ((blocks.common(fqn), fqn) for fqn in sites)
    )
    return list(found)


def _dim(said: Any) -> int | None:
    """Return the dim that an argument names; None where it leaves the dim open."""
    if said == R:
        return WHOLE
    dim = said.dim if isinstance(said, S) else None
    return 1 if dim == "seq" else dim if isinstance(dim, int) and dim >= 0 else None
