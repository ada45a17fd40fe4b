"""Recomputation under a memory limit: costs of modules, choices of rows, balanced stages (AdaPipe).

* `chains_of`: for rows with a memory limit, which modules of each stage are recomputed.
* `time_weight_of`: weights for stages of equal time, with the recomputation that memory requires.
* `run_local_model`: the local model after a forward on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.features import Budgeted, Recomputing
from schedlang.ir.plan import Action, Plan
from schedlang.passes.partition.stage_assignment import RunWeight, max_in_flight
from schedlang.passes.propagate.propagate import Traced, backward_root
from schedlang.passes.propagate.saved_splits import experts_of, recomputing_rows
from schedlang.passes.propagate.sequence_trials import first_rank_inputs, tokens_of
from schedlang.remat.operators import RunCosts
from schedlang.remat.rotor import ModuleCost

if TYPE_CHECKING:
    from schedlang.passes.partition.staging import Staged
    from schedlang.passes.propagate.propagate import Traced
    from schedlang.passes.propagate.sharded_run import Loss
    from schedlang.pipeline.timeline.table import Timeline
    from schedlang.runtime.context_parallel.local_tokens import TokenSplit
    from schedlang.runtime.tracing.stage_graph import StageGraph


# sites of a row -> its chains (modules of one stage) with the choice for each: tree, choices, limit
Chains = Mapping[tuple[str, ...], tuple[tuple[tuple[str, ...], Any], ...]]


@dataclass(frozen=True)
class CostSubject:
    """The subject of cost counts: the local model of a plan, and one microbatch."""

    plan: Plan
    traced: Traced
    staged: Staged | None  # None: before stages are known
    sample: Mapping[str, Any]
    loss: Loss | None = None
    tokens: TokenSplit | None = None


def chains_of(counting: CostSubject) -> Chains:
    """Return the choices of rows with a memory limit, from counts on the meta device.

    The limit is that of a rank. Microbatches in flight have equal shares of the limit; so early
    stages, with more microbatches in flight, recompute more (Sun et al., AdaPipe, 2024). Raises
    Refusal S841 at a row whose limit is too small.
    """
    plan = counting.plan
    rows = [(a, row.budget) for a, row in plan.rows_with(Recomputing) if row.budget is not None]
    if not rows:
        return {}
    names = tuple(dict.fromkeys(site for action, _ in rows for site in action.sites))
    costs = dict(zip(names, costs_of(counting, names)))
    return {a.sites: tuple(_choose(counting, a, budget, costs)) for a, budget in rows}


def _choose(
    counting: CostSubject, action: Action, budget: Budgeted, costs: Mapping[str, ModuleCost]
) -> list[tuple[tuple[str, ...], Any]]:
    choices = []
    assert counting.staged is not None
    for names, share in _sites_by_stage(counting.staged, action.sites):
        try:
            chain = [costs[name] for name in names]
            run_choice = partial(_run_with_choice, counting, budget, names)
            choice = budget.fit(chain, int(budget.memory / share), run_choice)
        except Refusal as refusal:
            raise refusal.at(action.span) from None
        choices.append((names, choice))
    return choices


def describe_chains(plan: Plan, chains: Chains) -> list[str]:
    """Return descriptions of the choices of rows with a memory limit, one line per stage."""
    return [
        f"`{action.name}` of {' to '.join(dict.fromkeys((names[0], names[-1])))}:"
        f" {row.budget.describe(choice)}"
        for action, row in plan.rows_with(Recomputing)
        if row.budget is not None
        for names, choice in chains.get(action.sites, ())
    ]


def _sites_by_stage(staged: Staged, sites: tuple[str, ...]) -> list[tuple[tuple[str, ...], float]]:
    """Return (sites, microbatches in flight) of each stage.

    The microbatches are those of all stages on the stage's rank that have sites.
    """
    if staged.axis is None:
        return [(sites, 1.0)]
    graph, stage_of = staged.cut.graph, staged.cut.stage_of
    by_stage: dict[int, list[str]] = {}
    for site in sites:
        stages_inside = [
            stage_of[k]
            for k, unit in enumerate(graph.units)
            if unit == site or unit.startswith(f"{site}.")
        ]
        by_stage.setdefault(min(stages_inside, default=0), []).append(site)
    in_flight = max_in_flight(staged.timeline)
    groups = []
    for stage, names in by_stage.items():
        in_flight_there = max(
            sum(in_flight[local] for local in staged.stages_at(position) if local in by_stage)
            for position in staged.places(stage)
        )
        groups.append((tuple(names), max(1.0, in_flight_there)))
    return groups


@dataclass(frozen=True)
class Skeleton:
    """A local model on the meta device, into which rows are lowered without ranks."""

    plan: Plan
    module: Any
    chains: Chains
    bits: Mapping[str, Any] = field(default_factory=dict)  # of saved tensors, by module

    def at(self, fqn: str) -> Any:
        """Return the module of this name."""
        return self.module.get_submodule(fqn)


def single_process(counting: CostSubject) -> CostSubject:
    """Return the subject with the unmodified model of a single process."""
    plan = replace(counting.plan, layouts={})
    return replace(counting, plan=plan, traced=Traced(), tokens=None)


def install_recomputation(plan: Plan, model: Any, chains: Chains) -> None:
    """Install in a temporary model the recomputation that starts from compressed activations."""
    from schedlang.runtime.storage.saved_tensors_slot import without_quantization, wrap_modules

    wrap_modules(without_quantization, model, experts_of(plan))
    for action, row in recomputing_rows(plan):
        sites = tuple(plan.model.sites[name] for name in action.sites)
        row.lower(sites, Skeleton(plan, model, chains))


def _run_with_choice(
    counting: CostSubject, budget: Budgeted, names: tuple[str, ...], choice: Any
) -> Any:
    """Return the local model after a forward and a backward with a choice for some modules."""

    def change(model: Any) -> None:
        budget.lower([(names, choice)], Skeleton(counting.plan, model, {}))

    with run_local_model(counting, change) as (model, root):
        if root is not None:
            root.backward()
    return model


@contextmanager
def run_local_model(
    counting: CostSubject, change: Callable[[Any], None], watch: Callable[[Any], Any] = nullcontext
) -> Iterator[tuple[Any, Any]]:
    """Yield the local model after a forward on the meta device, and the root of its backward.

    `change` changes the model before the forward; the forward runs inside `watch(model)`.
    """
    from schedlang.passes.partition.staging import local_skeleton
    from schedlang.runtime.modes import enter_modes
    from schedlang.runtime.propagation.stand_ins import FusedAttention
    from schedlang.runtime.tracing.meta_runs import without_values

    model = local_skeleton(counting.plan, counting.traced)
    model.train()
    change(model)
    batch, within_shard = first_rank_inputs(counting.plan, model, counting.tokens, counting.sample)
    with (
        within_shard,
        enter_modes(FusedAttention()),
        without_values(batch) as (inputs, _),
        watch(model),
    ):
        yield model, backward_root(model, inputs, counting.loss)


def costs_of(counting: CostSubject, names: Sequence[str]) -> list[ModuleCost]:
    """Return costs of modules on one rank: operations of the forward, saved and input bytes."""
    from schedlang.runtime.activation_memory.costs import OperatorCosts
    from schedlang.runtime.tracing.recording import counting_costs

    menu = OperatorCosts(len(names))

    with run_local_model(
        counting, lambda model: None, lambda model: counting_costs(menu, model, names)
    ):
        pass
    total_flops = sum(menu.flops)  # 0: no operator has a formula; then all modules count the same
    unit_costs = zip(menu.flops, menu.saved, menu.given)
    return [
        ModuleCost(
            float(flops) if total_flops else 1.0,
            saved,
            given,
            menu.operators(unit),
            menu.fixed[unit],
            menu.forward[unit],
            menu.small[unit],
        )
        for unit, (flops, saved, given) in enumerate(unit_costs)
    ]


BACKWARD_RATIO = 2.0  # time of a backward in forwards


@dataclass(frozen=True)
class _Row:
    """A row with a memory limit; `before[unit]` is the number of its modules before a unit."""

    repeated: RunCosts
    before: tuple[int, ...]


def time_weight_of(
    counting: CostSubject,
    rows: Sequence[tuple[Action, Budgeted]],
    graph: StageGraph,
    timeline: Timeline,
) -> RunWeight:
    """Return the weight function for stages of equal time.

    The weight of a run of units is the work of forward, backward, and of the recomputation that
    rows with a memory limit need in the memory of the stage.
    """
    tokens = tokens_of(counting.plan, counting.traced, counting.sample, counting.loss, None)
    with_tokens = replace(counting, tokens=tokens)
    names = tuple(dict.fromkeys(site for action, _ in rows for site in action.sites))
    costs = dict(zip(names, costs_of(with_tokens, names)))
    limits = _limited_modules(graph.units, costs)
    flops_of = [float(flops) if limit is None else 0.0 for flops, limit in zip(graph.flops, limits)]
    for name, cost in costs.items():
        if name in limits:
            flops_of[limits.index(name)] += cost.forward
    sums = [0.0, *accumulate(flops_of)]
    in_flight_there = _stage_in_flight(timeline)
    chains = [
        _make_row(action.sites, budget, costs, limits, in_flight_there) for action, budget in rows
    ]

    def weight(stage: int, begin: int, end: int) -> float:
        rerun = sum(
            chain.repeated.of(stage, chain.before[begin], chain.before[end]) for chain in chains
        )
        return (1 + BACKWARD_RATIO) * (sums[end] - sums[begin]) + rerun

    return weight


def _limited_modules(units: Sequence[str], costs: Mapping[str, Any]) -> list[str | None]:
    """Return, for each unit, the module with a memory limit that is or contains the unit."""
    limited = []
    for unit in units:
        ancestor = unit
        while ancestor and ancestor not in costs:
            ancestor = ancestor.rpartition(".")[0]
        limited.append(ancestor or None)
    return limited


def _make_row(
    sites: Sequence[str],
    budget: Budgeted,
    costs: Mapping[str, ModuleCost],
    homes: Sequence[str | None],
    in_flight_there: Sequence[float],
) -> _Row:
    first_units = {
        name: unit_at for unit_at, name in reversed(list(enumerate(homes))) if name is not None
    }
    own_sites = sorted((first_units[name], name) for name in sites if name in first_units)
    starts = [unit_at for unit_at, _ in own_sites]
    counts = tuple(sum(unit_at < unit for unit_at in starts) for unit in range(len(homes) + 1))
    memory = [int(budget.memory / share) for share in in_flight_there]
    return _Row(RunCosts([costs[name] for _, name in own_sites], memory), counts)


def _stage_in_flight(timeline: Timeline) -> list[float]:
    """Return, for each stage, the largest number of microbatches in flight on its ranks.

    All stages of a rank count.
    """
    in_flight = max_in_flight(timeline)
    positions_of = timeline.replica_ranks.tolist()
    peaks = []
    for stage in range(timeline.stages):
        places = {row[stage] for row in positions_of}
        position_sums = [
            sum(
                in_flight[local_stage]
                for local_stage in range(timeline.stages)
                if any(row[local_stage] == position for row in positions_of)
            )
            for position in places
        ]
        peaks.append(max(1.0, *position_sums))
    return peaks
