"""Rows that fit modules into memory, and stages balanced with what they recompute (AdaPipe).

* Rows that fit modules into memory: what each costs on a rank, and what is chosen for it.
* Stages cut so that their times are in balance, what each repeats within its memory included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from schedlang.ir.features import Budgeted, Recomputing
from schedlang.ir.plan import Action, Plan
from schedlang.passes.partition.stages import Weight, in_flight
from schedlang.passes.propagate.context import tokens_of
from schedlang.remat.operators import Repeated
from schedlang.remat.rotor import Cost

if TYPE_CHECKING:
    from schedlang.passes.partition.staging import Staged
    from schedlang.passes.propagate.dryrun import Loss
    from schedlang.passes.propagate.propagate import Traced
    from schedlang.pipeline.timeline.table import Timeline
    from schedlang.runtime.context_parallel.local_tokens import Tokens
    from schedlang.runtime.tracing.graph import StageGraph


# the sites of a row -> the chains that it forms, each with what is done: a tree, choices, a budget
Chains = Mapping[tuple[str, ...], tuple[tuple[tuple[str, ...], Any], ...]]


@dataclass(frozen=True)
class Counting:
    """The subject of counts of modules: the plan's local model, and one microbatch."""

    plan: Plan
    traced: Traced
    staged: Staged | None  # None: before it is cut
    sample: Mapping[str, Any]
    loss: Loss | None = None
    tokens: Tokens | None = None


def chains_of(counting: Counting) -> Chains:
    """Return the choices of rows with a limit of memory, from counts on the meta device.

    The limit is that of a rank. Where a pipeline keeps several microbatches at a time, each has an
    equal part of it; so early stages, which keep more of them, recompute more (Sun et al., AdaPipe,
    2024). Raises Refusal S841 at a row for which there is too little.
    """
    plan = counting.plan
    rows = [(a, row.budget) for a, row in plan.rows_with(Recomputing) if row.budget is not None]
    if not rows:
        return {}
    names = tuple(dict.fromkeys(site for action, _ in rows for site in action.sites))
    costs = dict(zip(names, costs_of(counting, names)))
    return {a.sites: tuple(_chosen(counting, a, budget, costs)) for a, budget in rows}


def _chosen(
    counting: Counting, action: Action, budget: Budgeted, costs: Mapping[str, Cost]
) -> list[tuple[tuple[str, ...], Any]]:
    from schedlang.diagnostics.diagnostic import Refusal

    found = []
    assert counting.staged is not None
    for names, share in _by_stage(counting.staged, action.sites):
        try:
            chain = [costs[name] for name in names]
            play = partial(_played, counting, budget, names)
            chosen = budget.fit(chain, int(budget.memory / share), play)
        except Refusal as refusal:
            raise refusal.at(action.span) from None
        found.append((names, chosen))
    return found


def told(plan: Plan, chains: Chains) -> list[str]:
    """Describe the choices of rows with a limit of memory, a line for each stage."""
    return [
        f"`{action.name}` of {' to '.join(dict.fromkeys((names[0], names[-1])))}:"
        f" {row.budget.said(found)}"
        for action, row in plan.rows_with(Recomputing)
        if row.budget is not None
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
            stage_of[k]
            for k, unit in enumerate(graph.units)
            if unit == site or unit.startswith(f"{site}.")
        ]
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
    """The model that rows are lowered into without ranks: local, on the meta device."""

    plan: Plan
    module: Any
    chains: Chains
    bits: Mapping[str, Any] = field(default_factory=dict)  # of saved tensors, by modules

    def at(self, fqn: str) -> Any:
        """The module of this name."""
        return self.module.get_submodule(fqn)


def alone(counting: Counting) -> Counting:
    """Return the counting of the untouched model of one process."""
    from schedlang.passes.propagate.propagate import Traced

    plan = replace(counting.plan, layouts={})
    return replace(counting, plan=plan, traced=Traced(), tokens=None)


def run_again(plan: Plan, model: Any, chains: Chains) -> None:
    """Let modules of a throwaway model run again as rows say that start from fewer bits."""
    from schedlang.passes.propagate.saved_parts import experts_of, meeting
    from schedlang.runtime.storage.saved import put_inside, uncoded

    put_inside(uncoded, model, experts_of(plan))
    for action, row in meeting(plan):
        sites = tuple(plan.model.sites[name] for name in action.sites)
        row.lower(sites, Skeleton(plan, model, chains))


def _played(counting: Counting, budget: Budgeted, names: tuple[str, ...], chosen: Any) -> Any:
    """The local model, in which these modules did as chosen, after a forward and a backward."""

    def change(model: Any) -> None:
        budget.lower([(names, chosen)], Skeleton(counting.plan, model, {}))

    with running(counting, change) as (model, root):
        if root is not None:
            root.backward()
    return model


@contextmanager
def running(
    counting: Counting, change: Callable[[Any], None], watch: Callable[[Any], Any] = nullcontext
) -> Iterator[tuple[Any, Any]]:
    """The local model after a forward on the meta device, and where its backward begins."""
    from schedlang.passes.partition.staging import local_skeleton
    from schedlang.passes.propagate.context import on_its_tokens
    from schedlang.passes.propagate.propagate import backward_root
    from schedlang.runtime.modes import ambient
    from schedlang.runtime.propagation.stand_ins import Fused
    from schedlang.runtime.tracing.meta import without_values

    model = local_skeleton(counting.plan, counting.traced)
    model.train()
    change(model)
    batch, within_shard = on_its_tokens(counting.plan, model, counting.tokens, counting.sample)
    with within_shard, ambient(Fused()), without_values(batch) as (inputs, _), watch(model):
        yield model, backward_root(model, inputs, counting.loss)


def costs_of(counting: Counting, names: Sequence[str]) -> list[Cost]:
    """Operations of a forward, bytes saved and bytes of the input of modules, on one rank."""
    from schedlang.runtime.activation_memory.costs import Menu
    from schedlang.runtime.tracing.record import counted

    menu = Menu(len(names))

    with running(counting, lambda model: None, lambda model: counted(menu, model, names)):
        pass
    known = sum(menu.flops)  # without a formula for any operator all count the same
    own = zip(menu.flops, menu.saved, menu.given)
    return [
        Cost(
            float(flops) if known else 1.0,
            saved,
            given,
            menu.operators(unit),
            menu.fixed[unit],
            menu.forward[unit],
            menu.small[unit],
        )
        for unit, (flops, saved, given) in enumerate(own)
    ]


BACKWARD = 2.0  # of a unit's forward


@dataclass(frozen=True)
class _Row:
    """A row whose modules have a limit: of each unit how many of them begin before it."""

    repeated: Repeated
    before: tuple[int, ...]


def time_of(
    counting: Counting,
    rows: Sequence[tuple[Action, Budgeted]],
    graph: StageGraph,
    timeline: Timeline,
) -> Weight:
    """The work of a run of units in forward, backward and second runs, which rows with a limit
    keep to what the memory of a stage makes them repeat."""
    tokens = tokens_of(counting.plan, counting.traced, counting.sample, counting.loss, None)
    whole = replace(counting, tokens=tokens)
    names = tuple(dict.fromkeys(site for action, _ in rows for site in action.sites))
    costs = dict(zip(names, costs_of(whole, names)))
    homes = _homes(graph.units, costs)
    works = [float(flops) if home is None else 0.0 for flops, home in zip(graph.flops, homes)]
    for name, cost in costs.items():
        if name in homes:
            works[homes.index(name)] += cost.forward
    sums = [0.0, *accumulate(works)]
    beside = _beside(timeline)
    made = [_row(action.sites, budget, costs, homes, beside) for action, budget in rows]

    def weight(stage: int, low: int, high: int) -> float:
        again = sum(r.repeated.of(stage, r.before[low], r.before[high]) for r in made)
        return (1 + BACKWARD) * (sums[high] - sums[low]) + again

    return weight


def _homes(units: Sequence[str], costs: Mapping[str, Any]) -> list[str | None]:
    """The module with a limit that each unit is, or lies in."""
    found = []
    for unit in units:
        above = unit
        while above and above not in costs:
            above = above.rpartition(".")[0]
        found.append(above or None)
    return found


def _row(
    sites: Sequence[str],
    budget: Budgeted,
    costs: Mapping[str, Cost],
    homes: Sequence[str | None],
    beside: Sequence[float],
) -> _Row:
    firsts = {name: place for place, name in reversed(list(enumerate(homes))) if name is not None}
    mine = sorted((firsts[name], name) for name in sites if name in firsts)
    starts = [place for place, _ in mine]
    before = tuple(sum(place < unit for place in starts) for unit in range(len(homes) + 1))
    memory = [int(budget.memory / share) for share in beside]
    return _Row(Repeated([costs[name] for _, name in mine], memory), before)


def _beside(timeline: Timeline) -> list[float]:
    """Return for each stage the most microbatches, of all stages of a rank of it, kept at a
    time."""
    alive = in_flight(timeline)
    homes = timeline.homes.tolist()
    found = []
    for stage in range(timeline.stages):
        places = {row[stage] for row in homes}
        kept = [
            sum(
                alive[other]
                for other in range(timeline.stages)
                if any(row[other] == place for row in homes)
            )
            for place in places
        ]
        found.append(max(1.0, *kept))
    return found
