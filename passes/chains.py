"""Rows that fit modules into memory: what each costs on a rank, and what is chosen for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedlang.passes.weights import in_flight
from schedlang.plan import Action, Plan
from schedlang.regions import Tree
from schedlang.regions.rotor import Cost

if TYPE_CHECKING:
    from schedlang.passes.dryrun import Loss
    from schedlang.passes.propagate import Traced
    from schedlang.passes.staging import Staged
    from schedlang.runtime.context.tokens import Tokens

# the sites of a row -> the chains that it forms, each with its tree
Chains = Mapping[tuple[str, ...], tuple[tuple[tuple[str, ...], Tree], ...]]


@dataclass(frozen=True)
class Counting:
    """With what modules are counted: the plan's local model, and one microbatch."""

    plan: Plan
    traced: Traced
    staged: Staged
    sample: Mapping[str, Any]
    loss: Loss | None = None
    tokens: Tokens | None = None


def chains_of(counting: Counting) -> Chains:
    """What rows with a limit of memory choose, from counts on the meta device; others not at all.

    The limit is that of a rank. Where a pipeline keeps several microbatches at a time, each has an
    equal part of it; so early stages, which keep more of them, recompute more (Sun et al., AdaPipe,
    2024). Raises Refusal S841 at a row for which there is too little.
    """
    plan = counting.plan
    rows = [action for action in plan.actions if action.primitive.limit is not None]
    if not rows:
        return {}
    names = tuple(dict.fromkeys(site for action in rows for site in action.sites))
    costs = dict(zip(names, costs_of(counting, names)))
    return {action.sites: tuple(_chosen(counting, action, costs)) for action in rows}


def _chosen(
    counting: Counting, action: Action, costs: Mapping[str, Cost]
) -> list[tuple[tuple[str, ...], Tree]]:
    from schedlang.diagnostic import Refusal

    found = []
    limit = action.primitive.limit
    assert limit is not None
    for names, share in _by_stage(counting.staged, action.sites):
        try:
            tree = action.primitive.fit([costs[name] for name in names], int(limit / share))
        except Refusal as refusal:
            raise refusal.at(action.span) if action.span is not None else refusal from None
        found.append((names, tree))
    return found


def _by_stage(staged: Staged, sites: tuple[str, ...]) -> list[tuple[tuple[str, ...], float]]:
    """The sites of each stage, and how many microbatches of all stages of its ranks are kept."""
    if staged.axis is None:
        return [(sites, 1.0)]
    graph, stage_of = staged.cut.graph, staged.cut.stage_of
    homes: dict[int, list[str]] = {}
    for site in sites:
        inside = [
            stage_of[k] for k, unit in enumerate(graph.units)
            if unit == site or unit.startswith(f"{site}.")
        ]  # fmt: skip
        homes.setdefault(min(inside, default=0), []).append(site)
    alive = in_flight(staged.timeline)
    found = []
    for stage, names in homes.items():
        beside = max(
            sum(alive[other] for other in staged.stages_at(place) if other in homes)
            for place in staged.places(stage)
        )
        found.append((tuple(names), max(1.0, beside)))
    return found


def costs_of(counting: Counting, names: Sequence[str]) -> list[Cost]:
    """Operations of a forward, bytes saved and bytes of the input of modules, on one rank."""
    from schedlang.passes.context import seated
    from schedlang.passes.root import backward_root
    from schedlang.passes.staging import local_skeleton
    from schedlang.runtime.burden import counted
    from schedlang.runtime.constants import OnMeta
    from schedlang.runtime.menu import Menu
    from schedlang.runtime.meta import hollow_batch

    model = local_skeleton(counting.plan, counting.traced)
    model.train()
    batch, sitting = seated(counting.plan, model, counting.tokens, counting.sample)
    inputs = hollow_batch(dict(batch))
    menu = Menu(len(names))
    with sitting, OnMeta(dict(batch), inputs), counted(menu, model, names), menu.attention():
        backward_root(model, inputs, counting.loss)
    known = sum(menu.flops)  # without a formula for any operator all count the same
    return [
        Cost(float(flops) if known else 1.0, saved, given, menu.operators(unit), menu.fixed[unit])
        for unit, (flops, saved, given) in enumerate(zip(menu.flops, menu.saved, menu.given))
    ]
