"""What runs the timeline on this rank: its stages, its sums, and the groups that they use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from schedlang.passes.cutting.parks import meet, peer_rows
from schedlang.passes.cutting.staging import Staged, local_skeleton
from schedlang.passes.laying.context import exchange
from schedlang.passes.preparing.gathers import gathers_by_rows
from schedlang.passes.preparing.prepare import Prepared
from schedlang.passes.preparing.sequence import slices_of
from schedlang.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from schedlang.runtime.assembly import Weight
    from schedlang.runtime.collectives.ranks import Ranks
    from schedlang.runtime.staging.early import EarlySums
    from schedlang.runtime.staging.pipeline import Pipeline
    from schedlang.runtime.summing.gradient import Sum

Loss = Callable[..., Any]


def pipeline_of(
    plan: Plan,
    module: nn.Module,
    ranks: Ranks,
    prepared: Prepared,
    loss: Loss | None,
    weight: Weight | None,
    sliced: Mapping[int, Any],
) -> Pipeline:
    """The stages of this rank's module in the order of the plan; `sliced` are those of `zero`."""
    from schedlang.runtime.recording.units import Switch
    from schedlang.runtime.staging.pipeline import Pipeline
    from schedlang.runtime.staging.stage import Stage, Stub
    from schedlang.runtime.summing.replicas import gathering

    staged, device = prepared.staged, ranks.device
    slices = slices_of(prepared.slicing, module, prepared.traced, weight)
    if staged.axis is None:
        split = _splits(plan, staged, 0, sliced)
        stage = Stage(module, staged.cut, 0, loss=loss, split=split, late=_late(plan))
        alone = (ranks.rank,)
        return Pipeline({0: stage}, staged.timeline, alone, device=device, slices=slices)
    group = ranks.group(staged.axis)
    down = ranks.again(staged.axis, "down") if ranks.one_way else None
    place = plan.mesh.index(ranks.rank, staged.axis)
    switch = Switch(module, staged.cut.graph.units)
    skeleton = local_skeleton(plan, prepared.traced)
    exchange(plan, skeleton, prepared.tokens, ranks)
    stub = Stub(skeleton, staged.cut)
    late = _late(plan)
    stages = {
        s: Stage(
            module, staged.cut, s, switch=switch, stub=stub, loss=loss,
            split=_splits(plan, staged, s, sliced), late=late,
        )
        for s in staged.stages_at(place)
    }  # fmt: skip
    return Pipeline(
        stages, staged.timeline, group.ranks, place, group=group.pg, down=down, device=device,
        lookahead=plan.ahead, slices=slices, parks=_parks(staged, ranks),
        picked=bool(peer_rows(plan, "activations")),
        handlers=gathering(sliced) if gathers_by_rows(plan, staged) else None,
    )  # fmt: skip


def early_sums(
    plan: Plan, staged: Staged, found: Mapping[str, nn.Parameter], sums: Sequence[Sum]
) -> EarlySums | None:
    """The sums that begin before the step ends, where a row asks for it."""
    from schedlang.runtime.staging.early import EarlySums

    if "gradients" not in plan.overlaps:
        return None
    if staged.axis is None:
        return EarlySums(found, sums, dict.fromkeys(found, frozenset([0])))
    held = [(stage, staged.cut.parameters(stage)) for stage in range(staged.cut.stages)]
    stages = {name: frozenset(s for s, names in held if name in names) for name in found}
    return EarlySums(found, sums, stages)


def _splits(plan: Plan, staged: Staged, stage: int, sliced: Mapping[int, Any]) -> bool:
    """Whether a stage's backward is run in halves, where the order has halves.

    Not where weights are gathered, which are gone again when the second half needs them, nor where
    activations are computed again: each part of a backward would compute all of them.
    """
    if stage in sliced:
        return False
    units = [staged.cut.graph.units[k] for k in staged.cut.units(stage)]
    again = {site for a in plan.actions if "recompute" in a.primitive.writes for site in a.sites}
    return not any(meet(unit, site) for unit in units for site in again)


def _parks(staged: Staged, ranks: Ranks) -> tuple[Any, ...]:
    """Groups for activations that are parked on partners, where some are."""
    from schedlang.timeline import Kind

    if staged.axis is None or not (staged.timeline.kind == Kind.EVICT).any():
        return ()
    return tuple(ranks.again(staged.axis, f"parked {way}") for way in range(4))


def _late(plan: Plan) -> frozenset[str] | None:
    """Parameters whose gradients may wait, under every name; None: all."""
    if plan.late is None:
        return None
    inside = tuple(f"{fqn}." if fqn else "" for fqn in plan.late)
    return frozenset(
        name
        for fact in plan.model.unique.values()
        for name in fact.names
        if any(other.startswith(inside) for other in fact.names)
    )
