"""What is summed after the last backward, and what is sliced over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from schedlang.passes.holdings import slicing
from schedlang.passes.propagate import Traced
from schedlang.passes.staging import Staged
from schedlang.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from schedlang.runtime.gradient import Sum
    from schedlang.runtime.holding import Holding
    from schedlang.runtime.ranks import Ranks
    from schedlang.runtime.replicas import Sliced


def slice_state(
    plan: Plan, module: nn.Module, ranks: Ranks, staged: Staged, holdings: Mapping[str, Holding]
) -> dict[int, Sliced]:
    """Put fully_shard around the units of each stage of this rank."""
    from schedlang.runtime.replicas import Sliced

    sliced, whole = slicing(plan)
    if sliced is None:
        return {}
    mesh = ranks.device_mesh(plan.mesh.fold(sliced.axes), plan.mesh.fold(whole) if whole else ())
    ignored = {
        p for n, p in module.named_parameters()
        if not holdings[n].sliced or not holdings[n].held(plan.mesh, ranks.rank)
    }  # fmt: skip
    out = {}
    if staged.axis is None:
        one = Sliced(sliced.stage, mesh, ignored)
        for fqn in sorted(staged.trunk):
            one.add(module.get_submodule(fqn))
        one.add(module)
        return {0: one}
    place = plan.mesh.index(ranks.rank, staged.axis)
    for stage, owner in enumerate(staged.ranks):
        if owner != place:
            continue
        one = Sliced(sliced.stage, mesh, ignored)
        names = [staged.cut.graph.units[u] for u in staged.cut.units(stage)]
        for unit in map(module.get_submodule, names):
            if any(p not in ignored for p in unit.parameters()):
                one.add(unit)
        out[stage] = one
    return out


def sums_of(
    plan: Plan, traced: Traced, holdings: Mapping[str, Holding],
    found: Mapping[str, nn.Parameter], ranks: Ranks,
) -> list[Sum]:  # fmt: skip
    """The reductions after the last backward: over ties, over parts, over whole replicas."""
    from schedlang.runtime.gradient import Sum

    sums = []
    trained = [name for name in plan.model.unique if plan.model.unique[name].requires_grad]
    by_axes: dict[tuple[str, ...], list[str]] = {}
    for name in trained:
        axes = tuple(a for a in plan.mesh.names if a in traced.partial.get(name, ()))
        if axes:
            by_axes.setdefault(axes, []).append(name)
    for axes, names in sorted(by_axes.items()):
        group = ranks.group(axes)  # made on every rank, whatever its stage holds
        mine = tuple(name for name in names if name in found)
        sums += [Sum(group, mine, "partial")] if mine else []
    sums += _ties(plan, holdings, trained, ranks)
    group = ranks.group(plan.data_axes)
    if group.size > 1:
        whole = [n for n in trained if n in found and not holdings[n].sliced]
        if whole:
            sums.append(Sum(group, tuple(whole), "replicas"))
    return sums


def _ties(
    plan: Plan, holdings: Mapping[str, Holding], trained: Sequence[str], ranks: Ranks
) -> list[Sum]:
    """Sums over the stages that share a parameter; every rank takes part in making the groups."""
    from schedlang.runtime.gradient import Sum

    by_stages: dict[frozenset[int], list[str]] = {}
    for name in trained:
        stages = holdings[name].stages
        if stages is not None and len(stages) > 1:
            by_stages.setdefault(stages, []).append(name)
    sums = []
    for stages, names in sorted(by_stages.items(), key=lambda item: sorted(item[0])):
        axis = holdings[names[0]].axis
        assert axis is not None
        groups = [tuple(ranks_[s] for s in sorted(stages)) for ranks_ in plan.mesh.groups(axis)]
        group = ranks.subset(axis, groups)
        if group is not None:
            sums.append(Sum(group, tuple(names), "tied"))
    return sums
