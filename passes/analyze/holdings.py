"""Holdings of parameters: where parts lie, and how often sliced ones are gathered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from schedlang.ir.facets import Replicas
from schedlang.ir.plan import Plan
from schedlang.passes.partition.staging import Staged

if TYPE_CHECKING:
    from schedlang.runtime.checkpointing.holding import Holding

# ---- Where the parts of every parameter lie: on which stages, in which slices.


def slicing(plan: Plan) -> tuple[Replicas | None, tuple[str, ...]]:
    """The row that slices state, and the data axes that keep whole copies."""
    real = [r for r in plan.copies if plan.mesh.size(r.axes) > 1]
    sliced = next((r for r in real if r.stage > 0), None)
    whole = tuple(axis for r in real if r.stage == 0 for axis in r.axes)
    return sliced, whole


def holdings_of(plan: Plan, staged: Staged) -> dict[str, Holding]:
    """Return the place of every parameter's parts, by its first name."""
    from schedlang.runtime.checkpointing.holding import Holding

    sliced = slicing(plan)[0] if plan.replicas else None
    axes = plan.mesh.fold(sliced.axes) if sliced is not None else ()
    owners = _owners(staged) if staged.axis is not None else {}
    unsliced = _unsliced(plan, staged) if axes else frozenset()
    holdings = {}
    for name, fact in plan.model.unique.items():
        stages = None
        if staged.axis is not None:
            stages = owners.get(name) or _home(staged, fact.names)
        whole = not axes or name in unsliced or not fact.shape
        cut = () if whole else _left(plan, name, axes)
        holdings[name] = Holding(name, plan.held(name), cut, staged.axis, stages)
    return holdings


def _left(plan: Plan, name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the axes that slice state whose ranks hold the same part of a parameter.

    Experts that are spread over some of them have their gradients whole there.
    """
    split = plan.split_axes(name) if name in plan.spread else frozenset()
    left = tuple(axis for axis in axes if axis not in split)
    return left if plan.mesh.size(left) > 1 else ()


def _home(staged: Staged, names: tuple[str, ...]) -> frozenset[int]:
    """Return the places of a parameter that nothing reads: with its unit, else the first."""
    for unit, stage in zip(staged.cut.graph.units, staged.cut.stage_of):
        if any(name.startswith(f"{unit}.") for name in names):
            return staged.places(stage)
    return frozenset([0])


def _owners(staged: Staged) -> dict[str, frozenset[int]]:
    """The places along the pipeline axis that hold each parameter."""
    owners: dict[str, set[int]] = {}
    for stage in range(staged.cut.stages):
        for name in staged.cut.parameters(stage):
            owners.setdefault(name, set()).update(staged.places(stage))
    return {name: frozenset(places) for name, places in owners.items()}


def _unsliced(plan: Plan, staged: Staged) -> frozenset[str]:
    """Parameters that stay whole on data-parallel ranks although the rest is sliced.

    Those that several units use: each gathers and frees its own. In a pipeline also what no unit
    holds; without one the model itself takes that.
    """
    if staged.axis is None:
        return frozenset(_across(plan, staged))
    units = [f"{name}." for name in staged.cut.graph.units]
    held = {
        name: sum(any(n.startswith(unit) for n in fact.names) for unit in units)
        for name, fact in plan.model.unique.items()
    }
    return frozenset(staged.cut.shared) | {name for name, count in held.items() if count != 1}


def _across(plan: Plan, staged: Staged) -> Iterator[str]:
    """Parameters of an element of the trunk that have a name outside of it too."""
    for name, fact in plan.model.unique.items():
        homes = {next((u for u in staged.trunk if n.startswith(f"{u}.")), "") for n in fact.names}
        if len(homes) > 1:
            yield name


# ---- How often sliced parameters are gathered: rows of the timeline may hold a stage for a run.


Places = frozenset[int] | None


def gathers_by_rows(plan: Plan, staged: Staged) -> bool:
    """Return whether rows of the timeline gather parameters: in a pipeline that slices them (stage
    3)."""
    sliced, _ = slicing(plan)
    return staged.axis is not None and sliced is not None and sliced.stage == 3


def gathers_of(plan: Plan, staged: Staged, stage: int, place: int) -> tuple[int, int] | None:
    """Return the runs of forwards, and of backwards, that hold a stage gathered at a place; None:
    none."""
    from schedlang.pipeline.timeline.sharded_weights import runs

    if not gathers_by_rows(plan, staged):
        return None
    t = staged.timeline
    found = runs(t)
    mine = (t.stage[found.first] == stage) & (t.rank[found.first] == place)
    back = int(found.backward[mine].sum())
    return (int(mine.sum()) - back, back) if mine.any() else None


def gathers(
    plan: Plan, staged: Staged, stage: int, places: Places, microbatches: int
) -> Iterator[tuple[Places, int, int]]:
    """Yield the places of a stage, and how often stage 3 gathers it there in forwards and
    backwards."""
    often = (microbatches * staged.timeline.slices,) * 2
    if places is None:
        yield None, *often
        return
    alike: dict[tuple[int, int], set[int]] = {}
    for place in places:
        alike.setdefault(gathers_of(plan, staged, stage, place) or often, set()).add(place)
    for times, here in alike.items():
        yield frozenset(here), *times
