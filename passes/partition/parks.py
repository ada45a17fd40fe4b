"""Activations on the next rank of the pipeline: which stages give them away, and their rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir.facets import Stored
from schedlang.ir.plan import Plan

if TYPE_CHECKING:
    from schedlang.passes.partition.staging import Staged
    from schedlang.pipeline.timeline import Timeline


def on_peers(plan: Plan, *what: str) -> list[Stored]:
    """Where one of these (or anything) of a module is kept on a peer."""
    return [s for s in plan.stores if s.tier == "peer" and (not what or s.what in what)]


def lodged(plan: Plan, staged: Staged) -> Staged:
    """The same stages; those with modules that rows say give away what these save.

    What a stage gave is called back as early as the farthest of its rows says.  Raises Refusal S851
    where the order says by itself what forwards keep.
    """
    ahead = _ahead(plan, staged)
    if not ahead:
        return staged
    from schedlang.pipeline.timeline import with_parks

    _check_order(plan, staged.timeline)
    return replace(staged, timeline=with_parks(staged.timeline, ahead))


def at_home(plan: Plan, staged: Staged) -> Staged:
    """The same stages, all of which keep what they save."""
    from schedlang.pipeline.timeline import Kind

    t = staged.timeline
    if not _ahead(plan, staged):
        return staged
    return replace(staged, timeline=t.pick((t.kind != Kind.EVICT) & (t.kind != Kind.LOAD)))


def meet(one: str, other: str) -> bool:
    """Whether a module is, holds or lies in another."""
    a, b = f"{one}.".lstrip("."), f"{other}.".lstrip(".")
    return a.startswith(b) or b.startswith(a)


def _ahead(plan: Plan, staged: Staged) -> dict[int, int]:
    """Stage -> before how many operations its activations come home."""
    found: dict[int, int] = {}
    for one in on_peers(plan, "activations"):
        if one.over != staged.axis:
            continue  # what is refused
        for stage in range(staged.cut.stages):
            units = [staged.cut.graph.units[k] for k in staged.cut.units(stage)]
            if any(meet(unit, one.fqn) for unit in units):
                found[stage] = max(found.get(stage, 0), one.ahead)
    return found


def _check_order(plan: Plan, timeline: Timeline) -> None:
    from schedlang.pipeline.timeline import Kind

    own = [kind for kind in (Kind.EVICT, Kind.OFFLOAD, Kind.RECOMPUTE) if kind in timeline.kind]
    if not own:
        return
    order = plan.order.name if plan.order is not None else ""
    row = plan.origin(on_peers(plan, "activations")[0])
    refusal = Refusal(
        Diagnostic(
            "S851",
            f"the order `{order}` already decides what happens to saved activations",
            notes=(f"its timeline has {own[0].name} operations",),
            helps=(
                "drop this row",
                'or use an order without them: `pipeline(order="1F1B", micro=4)`',
            ),
        )
    )
    raise refusal.at(row.span) if row is not None and row.span is not None else refusal
