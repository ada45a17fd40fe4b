"""Rows that fit modules into memory: what each costs on a rank, and what is chosen for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from schedlang.passes.cutting.weights import in_flight
from schedlang.plan import Action, Plan
from schedlang.regions.rotor import Cost

if TYPE_CHECKING:
    from schedlang.passes.cutting.staging import Staged
    from schedlang.passes.laying.dryrun import Loss
    from schedlang.passes.laying.propagate import Traced
    from schedlang.runtime.context.tokens import Tokens

# the sites of a row -> the chains that it forms, each with what is done: a tree, choices, a budget
Chains = Mapping[tuple[str, ...], tuple[tuple[tuple[str, ...], Any], ...]]


@dataclass(frozen=True)
class Counting:
    """With what modules are counted: the plan's local model, and one microbatch."""

    plan: Plan
    traced: Traced
    staged: Staged | None  # None: before it is cut
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
) -> list[tuple[tuple[str, ...], Any]]:
    from schedlang.diagnostic import Refusal

    found = []
    limit = action.primitive.limit
    assert limit is not None and counting.staged is not None
    for names, share in _by_stage(counting.staged, action.sites):
        try:
            chain = [costs[name] for name in names]
            play = partial(_played, counting, action, names)
            chosen = action.primitive.fit(chain, int(limit / share), play)
        except Refusal as refusal:
            raise refusal.at(action.span) if action.span is not None else refusal from None
        found.append((names, chosen))
    return found


def told(plan: Plan, chains: Chains) -> list[str]:
    """What rows with a limit of memory chose, in words, a line for each stage."""
    return [
        f"`{action.name}` of {' to '.join(dict.fromkeys((names[0], names[-1])))}:"
        f" {action.primitive.said(found)}"
        for action in plan.actions
        for names, found in chains.get(action.sites, ())
    ]


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


@dataclass(frozen=True)
class Skeleton:
    """What a primitive's `apply` is given: a local model on the meta device, module by module."""

    plan: Plan
    module: Any
    chains: Chains
    bits: Mapping[str, Any] = field(default_factory=dict)  # of saved tensors, by modules

    def at(self, fqn: str) -> Any:
        """The module of this name."""
        return self.module.get_submodule(fqn)


def alone(counting: Counting) -> Counting:
    """With what the untouched model of one process is counted."""
    from schedlang.passes.laying.propagate import Traced

    plan = replace(counting.plan, layouts={})
    return replace(counting, plan=plan, traced=Traced(), tokens=None)


def run_again(plan: Plan, model: Any, chains: Chains) -> None:
    """Let modules of a throwaway model run again as rows say that start from fewer bits."""
    from schedlang.passes.laying.kept_parts import experts_of, meeting
    from schedlang.runtime.storage.fewer import put_inside, uncoded

    put_inside(uncoded, model, experts_of(plan))
    for action in meeting(plan):
        sites = tuple(plan.model.sites[name] for name in action.sites)
        action.primitive.apply(sites, Skeleton(plan, model, chains))


def _played(counting: Counting, action: Action, names: tuple[str, ...], chosen: Any) -> Any:
    """The local model, in which these modules did as chosen, after a forward and a backward."""
    from schedlang.runtime.sharding import crossing

    def apply(model: Any) -> None:
        sites = tuple(counting.plan.model.sites[name] for name in names)
        given = Skeleton(counting.plan, model, {names: ((names, chosen),)})
        action.primitive.apply(sites, given)

    with running(counting, apply) as (model, root):
        if root is not None:
            root.backward()
    crossing.forget()
    return model


@contextmanager
def running(
    counting: Counting, change: Callable[[Any], None], watch: Callable[[Any], Any] = nullcontext
) -> Iterator[tuple[Any, Any]]:
    """The local model after a forward on the meta device, and where its backward begins."""
    from schedlang.passes.cutting.staging import local_skeleton
    from schedlang.passes.laying.context import seated
    from schedlang.passes.laying.root import backward_root
    from schedlang.runtime.following.fused_meta import Fused
    from schedlang.runtime.modes import ambient
    from schedlang.runtime.recording.constants import OnMeta
    from schedlang.runtime.recording.meta import hollow_batch

    model = local_skeleton(counting.plan, counting.traced)
    model.train()
    change(model)
    batch, sitting = seated(counting.plan, model, counting.tokens, counting.sample)
    inputs = hollow_batch(dict(batch))
    with sitting, ambient(Fused()), OnMeta(dict(batch), inputs), watch(model):
        yield model, backward_root(model, inputs, counting.loss)


def costs_of(counting: Counting, names: Sequence[str]) -> list[Cost]:
    """Operations of a forward, bytes saved and bytes of the input of modules, on one rank."""
    from schedlang.runtime.keeping.menu import Menu
    from schedlang.runtime.recording.burden import counted

    menu = Menu(len(names))

    with running(counting, lambda model: None, lambda model: counted(menu, model, names)):
        pass
    known = sum(menu.flops)  # without a formula for any operator all count the same
    own = zip(menu.flops, menu.saved, menu.given)
    return [
        Cost(float(flops) if known else 1.0, saved, given,
             menu.operators(unit), menu.fixed[unit], menu.forward[unit], menu.small[unit])
        for unit, (flops, saved, given) in enumerate(own)
    ]  # fmt: skip
