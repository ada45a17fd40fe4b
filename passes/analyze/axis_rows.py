"""The row of a schedule that causes a collective along an axis; used by messages and timelines."""

from __future__ import annotations

from schedlang.ir.plan import Action, Plan
from schedlang.ir.primitive import Facet


def last_row_changing(plan: Plan, facet: Facet) -> Action | None:
    """Return the last row that changes a facet, or None."""
    return next(reversed(plan.rows_changing(facet)), None)


def axis_row(plan: Plan, fqn: str, axis: str) -> Action | None:
    """Return the row because of which ranks along an axis communicate at a module.

    It is the `zero` row for data axes, the stage cut for the pipeline's axis, and otherwise the
    placement row over this axis whose module has the longest common path with `fqn`.
    """
    if axis in plan.data_axes:
        return last_row_changing(plan, Facet.STATE)
    if any(axis in plan.mesh.fold(cut.axis) for cut in plan.cuts):
        return last_row_changing(plan, Facet.STAGE)
    best: tuple[tuple[int, int], Action] | None = None
    for action in plan.rows_changing(Facet.PLACEMENT):
        for site in action.sites:
            axes = (b.axis for b in plan.boundaries.get(site, ()))
            if any(axis in plan.mesh.fold(name) for name in axes):
                distance = (_common_segments(site, fqn), -abs(len(site) - len(fqn)))
                if best is None or distance > best[0]:
                    best = (distance, action)
    return best[1] if best is not None else None


def _common_segments(fqn: str, other_fqn: str) -> int:
    """Return the number of leading segments that two module names have in common."""
    count = 0
    for a, b in zip(fqn.split("."), other_fqn.split(".")):
        if a != b:
            break
        count += 1
    return count
