"""Sums after the last backward and slices over data-parallel ranks, put into a rank's module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from schedlang.passes.laying.casts import gathered_in
from schedlang.passes.laying.propagate import Traced
from schedlang.passes.preparing.holdings import slicing
from schedlang.passes.preparing.reductions import reductions, sliced_names, sliced_over
from schedlang.passes.preparing.residence import tier_of_unit
from schedlang.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor, nn

    from schedlang.passes.preparing.prepare import Prepared
    from schedlang.runtime.collectives.ranks import Ranks
    from schedlang.runtime.saving.holding import Holding
    from schedlang.runtime.summing.compressed import Compressor
    from schedlang.runtime.summing.gradient import Sum
    from schedlang.runtime.summing.replicas import Sliced


def slice_state(
    plan: Plan, module: nn.Module, ranks: Ranks, prepared: Prepared
) -> dict[int, Sliced]:
    """Put fully_shard around the units of each stage of this rank."""
    from schedlang.runtime.summing.replicas import Sliced, Unit

    staged, holdings = prepared.staged, prepared.holdings
    sliced, _ = slicing(plan)
    if sliced is None:
        return {}
    axes = plan.mesh.fold(sliced.axes)
    every = dict.fromkeys((axes, *(h.sliced for h in holdings.values() if h.sliced)))
    meshes = {over: ranks.device_mesh(over) for over in every}  # by all ranks, in one order
    ignored = {
        p for n, p in module.named_parameters()
        if not holdings[n].sliced or not holdings[n].held(plan.mesh, ranks.rank)
    }  # fmt: skip
    place = plan.mesh.index(ranks.rank, staged.axis) if staged.axis is not None else 0
    reached = prepared.traced.reached
    met = {p for n, p in module.named_parameters() if n in reached}
    out = {}
    for stage in staged.stages_at(place):
        asked = prepared.traced.asked
        out[stage] = one = Sliced(sliced.stage, meshes[axes], ignored, sliced.reshard, asked)
        for fqn, names in sliced_names(plan, staged, holdings, stage).items():
            over, tier = sliced_over(holdings, names) or axes, tier_of_unit(plan, fqn, names)
            low = gathered_in(plan, names)
            unit = Unit(root=not fqn, waits=_waits(plan, fqn), tier=tier, low=low)
            one.add(module.get_submodule(fqn), meshes[over], unit, met)
        one.prefetch(sliced.prefetch)
    return out


def _waits(plan: Plan, fqn: str) -> bool:
    """Whether a row lets something in this module compute after its forward."""
    late = (a for a in plan.actions if getattr(a.primitive, "waits", False))
    return any(s == fqn or s.startswith(f"{fqn}.") for action in late for s in action.sites)


def sums_of(
    plan: Plan, traced: Traced, holdings: Mapping[str, Holding],
    found: Mapping[str, nn.Parameter], ranks: Ranks,
) -> list[Sum]:  # fmt: skip
    """The reductions after the last backward: over ties, over parts, over whole replicas."""
    from schedlang.runtime.summing.gradient import Sum

    sums = []
    for axes in (plan.data_axes, plan.row_axes, plan.context_axes):
        ranks.group(axes)  # made on every rank: outputs are gathered over it on some
    for one in reductions(plan, traced, holdings):
        names = tuple(name for name in one.names if name in found)
        if one.stages is not None:  # every rank takes part in making these groups
            ends = sorted(one.stages)
            groups = [tuple(line[s] for s in ends) for line in plan.mesh.groups(one.axes)]
            group = ranks.subset(one.axes[0], groups)
        else:
            group = ranks.group(one.axes)
            if one.kind == "replicas" and "gradients" in plan.overlaps:
                # begun in the middle of a backward, beside what that itself sends
                group = replace(group, pg=ranks.again(one.axes, "early"))
        if one.kind != "compressed" and group is not None and names:
            sums.append(Sum(group, names, one.kind, one.bucket))
    return sums


def compressor_of(
    plan: Plan, traced: Traced, holdings: Mapping[str, Holding],
    found: Mapping[str, nn.Parameter], ranks: Ranks,
) -> Compressor | None:  # fmt: skip
    """What does the compressed sums of this rank, where a row asks for them."""
    from schedlang.runtime.saving.holding import cleaned
    from schedlang.runtime.summing.compressed import Codec, Compressor

    how = plan.compression
    rows = [one for one in reductions(plan, traced, holdings) if one.kind == "compressed"]
    if how is None or not rows:
        return None
    (one,) = rows
    codec = Codec(how.kind, how.rank, how.block, how.feedback)
    names = tuple(name for name in one.names if name in found)

    def clean(name: str, part: Tensor) -> Tensor:
        return cleaned(part, holdings[name], plan.mesh, ranks.rank)

    return Compressor(codec, ranks.group(one.axes), names, clean)
