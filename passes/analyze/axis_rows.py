"""The row of a schedule that is behind what ranks along an axis send each other."""

from __future__ import annotations

from schedlang.ir.plan import Action, Plan
from schedlang.ir.primitive import Facet


def facet_row(plan: Plan, facet: Facet) -> Action | None:
    """The last row that writes a facet."""
    return next(reversed(plan.rows_changing(facet)), None)


def axis_row(plan: Plan, fqn: str, axis: str) -> Action | None:
    """The row that brings an axis to a module: of those that use it, the one nearest by name.

    Data axes come with `zero`, the pipeline's with the cut, others with placements.
    """
    if axis in plan.data_axes:
        return facet_row(plan, Facet.STATE)
    if any(axis in plan.mesh.fold(cut.axis) for cut in plan.cuts):
        return facet_row(plan, Facet.STAGE)
    best: tuple[tuple[int, int], Action] | None = None
    for action in plan.rows_changing(Facet.PLACEMENT):
        for site in action.sites:
            over = (b.axis for b in plan.boundaries.get(site, ()))
            if any(axis in plan.mesh.fold(name) for name in over):
                near = (_shared(site, fqn), -abs(len(site) - len(fqn)))
                if best is None or near > best[0]:
                    best = (near, action)
    return best[1] if best is not None else None


def _shared(one: str, other: str) -> int:
    """Return the number of leading names that two modules share."""
    count = 0
    for a, b in zip(one.split("."), other.split(".")):
        if a != b:
            break
        count += 1
    return count
