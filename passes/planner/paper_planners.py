"""Planners of the literature by name (`tune --planner`), each a setting of the engines here.

Three kinds: planners that search (limits of `search`, or a random walk over its space), planners
that are rules (`rules`), and planners that split a chain into stages (`staged`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise, product
from operator import mul

import numpy as np

from schedlang.diagnostics.diagnostic import Refusal, facts_of_unknown, suggest_name
from schedlang.diagnostics.tables import format_bytes, format_seconds
from schedlang.ir.limits import Limits, Value
from schedlang.passes.partition.stage_partition import PEAK, SLOWEST, StageOption
from schedlang.passes.planner.bounds import ChainTimes
from schedlang.passes.planner.critical_path import count_in_flight
from schedlang.passes.planner.evaluation import EvaluatedSetting, Evaluator, neighbour_splits
from schedlang.passes.planner.heterogeneous import (
    NODE_AXIS_ORDERS,
    node_orders,
    order_nodes,
    price_on_nodes,
    replica_machines,
    split_for_slowest,
    split_rows,
)
from schedlang.passes.planner.limits import satisfies_limits
from schedlang.passes.planner.operators.unity import UNITY
from schedlang.passes.planner.price import (
    DEFAULT_RECIPE,
    check_equal_ranks,
    collective_seconds,
    price,
    unit_seconds,
)
from schedlang.passes.planner.random_walk import walk
from schedlang.passes.planner.reasons import RejectedSetting, compare_with_best
from schedlang.passes.planner.rule_planners import RULE_PLANNERS, JobFacts, RulePlanner
from schedlang.passes.planner.search import NO_LIMITS, Profiles, SearchResult, search
from schedlang.passes.planner.search_space import (
    Floats,
    Job,
    divisors,
    iter_placements,
    list_candidates,
    microbatch_rows,
)
from schedlang.passes.planner.stage_options import (
    Devices,
    Layer,
    Replicas,
    keep_activations,
    recompute_forward,
    reduce_each_step,
    spread_reduction,
)
from schedlang.passes.planner.stage_planners import STAGE_PLANNERS, StagePlanner, one_device
from schedlang.passes.planner.values import Chain, Placement, Recipe, Setting
from schedlang.passes.simulate.machine import Cluster
from schedlang.passes.simulate.node_cluster import Nodes

# -- planners that search --------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchPlanner:
    """A planner that searches settings by their price.

    paper   authors and venue; `omits` what this implementation leaves out
    limits  limits of its search space
    steps   steps of a random walk; 0 for best-first search with bounds
    """

    paper: str
    omits: str
    limits: Limits = field(default_factory=Limits)
    steps: int = 0

    def plan(
        self, profiles: Profiles, job: Job, seed: int = 0, limits: Limits = NO_LIMITS
    ) -> EvaluatedSetting | None:
        """Find the quickest setting within the planner's limits and `limits`; None where none
        fits."""
        planner = replace(self, limits=limits.combined_with(self.limits))
        if self.steps:
            return planner._walked(profiles, job, seed)
        *_, last = search(profiles, job, planner.limits)
        return last.best

    def _walked(self, profiles: Profiles, job: Job, seed: int) -> EvaluatedSetting | None:
        evaluator, evaluated = Evaluator(job, self.limits), dict[Setting, EvaluatedSetting]()
        clocks: dict[Placement, ChainTimes] = {}
        space = sorted(self._space(profiles, job, clocks), key=_ranks_of_model)
        neighbours: dict[tuple[object, ...], list[Setting]] = {}
        for setting in space:
            for part in SETTING_PARTS:
                neighbours.setdefault((part, *_parts_except(setting, part)), []).append(setting)

        def cost(setting: Setting) -> float:
            if setting not in evaluated:
                evaluated[setting] = evaluator.evaluate(clocks[setting.placement], setting)
            priced = evaluated[setting].priced
            return priced.seconds if priced is not None else math.inf

        def propose(setting: Setting, chance: random.Random) -> Setting:
            """Return a setting that differs in one part alone, if there is one."""
            part = chance.choice(SETTING_PARTS)
            return chance.choice(neighbours[part, *_parts_except(setting, part)])

        start = next((setting for setting in space if cost(setting) < math.inf), None)
        if start is None:
            return None
        return evaluated[walk(start, propose, cost, self.steps, seed=seed).plan]

    def _space(
        self, profiles: Profiles, job: Job, clocks: dict[Placement, ChainTimes]
    ) -> Iterator[Setting]:
        for group in iter_placements(job, self.limits):
            for rows in microbatch_rows(job, group, self.limits):
                chain = profiles(replace(group, rows=rows))
                candidates = (
                    list_candidates(job, chain, self.limits) if isinstance(chain, Chain) else None
                )
                if candidates is not None:
                    clocks[candidates.chain.placement] = ChainTimes(candidates.chain, job)
                    yield from map(candidates.setting, range(len(candidates)))


def _ranks_of_model(setting: Setting) -> int:
    """Number of ranks that share one model: 1 for data parallelism alone."""
    return setting.pp * setting.placement.tp * setting.placement.cp


SETTING_PARTS = ("axes", "rows", "order", "zero")


def _parts_except(setting: Setting, part: str) -> tuple[object, ...]:
    """Return all parts of a setting except one; microbatches follow from axes and rows."""
    placed = setting.placement
    parts: dict[str, object] = {
        "axes": (setting.dp, setting.pp, placed.tp, placed.cp, placed.ep, placed.sequence),
        "rows": placed.rows,
        "order": (setting.order, setting.chunks),
        "zero": setting.zero,
    }
    return tuple(value for name, value in parts.items() if name != part)


SEARCH_PLANNERS = {
    "kwai": SearchPlanner(
        "Optimal hybrid parallelism (Yuan et al., USENIX ATC 2024)",
        "copies of some units alone; its figures are measured operators, as a profile's are after"
        " `calibrate`",
        Limits(
            pinned={
                "order": ("1F1B", "Interleaved1F1B"),
                "offload": ("none", "activations"),
            }
        ),
    ),
    "tessel": SearchPlanner(
        "Tessel (Lin et al., HPCA 2024)",
        "placements other than a row of stages; its order is searched for stages that are alike",
        Limits(pinned={"order": ("search",), "chunks": (1, 2), "offload": ("none",)}),
    ),
    "flexflow": SearchPlanner(
        "FlexFlow (Jia et al., MLSys 2019)",
        "operators one by one, but with `--layouts`: else its walk goes over settings of the model",
        Limits(pinned={"offload": ("none",)}),
        steps=400,
    ),
}

# -- all of them -----------------------------------------------------------------------------------

Planner = StagePlanner | RulePlanner | SearchPlanner
PLANNERS: dict[str, Planner] = {**STAGE_PLANNERS, **RULE_PLANNERS, **SEARCH_PLANNERS}

# -- stages of a setting ---------------------------------------------------------------------------


def layers_of(
    chain: Chain, setting: Setting, cluster: Cluster, recipe: Recipe
) -> tuple[Layer, ...]:
    """List the units of a chain as layers, on the ranks that share a stage under this setting.

    For replicas with unequal rows, bytes of activations are those of the most rows.
    """
    split, largest = setting.dp, max(_parts(setting))
    sizes = (recipe.moments + recipe.master, recipe.gradient, recipe.parameter)
    param_bytes = sum(size / split if setting.zero > k else size for k, size in enumerate(sizes))
    layers: list[Layer] = []
    for run in chain.runs:
        unit = run.unit
        forward, backward, _ = unit_seconds(unit, setting, cluster)
        layer = Layer(
            forward,
            backward,
            unit.numel * recipe.gradient,
            unit.numel * param_bytes,
            largest * unit.kept,
            largest * unit.input,
            largest * unit.output,
        )
        layers += [layer] * run.count
    return tuple(layers)


def devices_of(setting: Setting, chain: Chain, cluster: Cluster) -> Devices:
    """Describe the ranks of a pipeline as devices in a row.

    The memory that a unit needs at its fullest moment is set aside.  Each place has the slowest
    replica's speed, with the rows that the replica has, and the smallest memory; links are the
    slowest of all.
    """
    parts = _parts(setting)
    reserved = max(parts) * max(run.unit.peak + run.unit.kept for run in chain.runs)
    machines = _machines(setting, cluster)

    def took(machine: Cluster) -> float:
        return float(_before(chain, setting, machine)[-1])

    base, places = took(machines[0][0]), list(zip(*machines))
    speeds = [base / max(took(m) * part for m, part in zip(group, parts)) for group in places]
    rooms = [max(0.0, min(device.memory for device in group) - reserved) for group in places]
    kinds = [device.device for device in cluster.nodes] if isinstance(cluster, Nodes) else [cluster]
    return Devices(
        setting.pp,
        max(rooms),
        max(1, min(device.node for device in kinds) // setting.stride("pp")),
        min(device.link for device in kinds),
        min(device.network for device in kinds),
        speeds=tuple(speeds),
        memories=tuple(rooms) if len(set(rooms)) > 1 else (),
    )


def _parts(setting: Setting) -> list[float]:
    """Rows of each replica, relative to the rows of a microbatch."""
    return [rows / setting.placement.rows for rows in setting.rows] or [1.0] * setting.dp


def _before(chain: Chain, setting: Setting, cluster: Cluster) -> Floats:
    """Seconds of a microbatch in the units before each unit, and in all units."""
    unit_times = [sum(unit_seconds(run.unit, setting, cluster)[:2]) for run in chain.runs]
    return np.append(0.0, np.repeat(unit_times, [run.count for run in chain.runs]).cumsum())


def _machines(setting: Setting, cluster: Cluster) -> Sequence[Sequence[Cluster]]:
    """Machines of each replica, one for each place of its pipeline."""
    if isinstance(cluster, Nodes):
        return replica_machines(setting, order_nodes(cluster, setting.nodes))
    return [[cluster] * setting.pp]  # all replicas are equal


def split_as_planner(
    name: str, chain: Chain, setting: Setting, cluster: Cluster, recipe: Recipe = DEFAULT_RECIPE
) -> Setting | None:
    """Split a setting into stages as the planner of this name does, one stage on each rank.

    Choices that a setting cannot express, such as offloading of some units, are left out.  Returns
    None where none fit in memory.  Raises KeyError for a planner that splits no stages, ValueError
    for several stages on a rank and for fewer units than stages, TypeError for unequal nodes if the
    planner takes all devices to be equal.
    """
    split = _cut(name, chain, setting, cluster, recipe)
    return split and split[0]


def _cut(
    name: str, chain: Chain, setting: Setting, cluster: Cluster, recipe: Recipe
) -> tuple[Setting, float] | None:
    """Split as `split_as_planner` does; also return the value by the planner's own objective."""
    if not STAGE_PLANNERS[name].heterogeneous:
        check_equal_ranks(cluster)
    if setting.chunks != 1:
        raise ValueError(f"{name} gives each rank one stage, and {setting.order} has several")
    choices = tuple(
        choice
        for choice in STAGE_PLANNERS[name].choices
        if choice in (keep_activations, recompute_forward)
    )
    planner = replace(
        STAGE_PLANNERS[name],
        equal_stages=False,
        arranges_devices=False,
        sizes=one_device,
        degrees=one_device,
        choices=choices,
    )
    if planner.replicas in (reduce_each_step, spread_reduction):
        planner = replace(planner, replicas=_copied(planner.replicas, setting, cluster))
    in_flight: Sequence[float] = count_in_flight(setting.order, setting.pp, setting.micro, 1)[
        0
    ].tolist()
    layers = layers_of(chain, setting, _machines(setting, cluster)[0][0], recipe)
    if len(layers) < setting.pp:
        raise ValueError(f"{len(layers)} units do not make {setting.pp} stages")
    devices = devices_of(setting, chain, cluster)
    result = planner.solve(
        layers, devices, setting.micro, setting.pp, lambda after: in_flight[setting.pp - 1 - after]
    )
    if result is None:
        return None
    again = tuple(option.name.count("again") for option in result.options)
    return replace(setting, cuts=result.units, again=again if any(again) else ()), result.value


def _copied(replicas: Replicas, setting: Setting, cluster: Cluster) -> Replicas:
    """Bind the all-reduce of a setting's replicas in this cluster to a planner's model of
    replicas."""

    def over(opt: StageOption, weights: float, copies: int, link: float, micro: int) -> StageOption:
        time = collective_seconds(cluster, "all_reduce", weights, setting.dp, setting.stride("dp"))
        ring = 2 * (setting.dp - 1) / setting.dp * weights
        return replicas(opt, weights, setting.dp, ring / time, micro) if time else opt

    return over


# -- one job ---------------------------------------------------------------------------------------


def case_of(profiles: Profiles, job: Job) -> JobFacts:
    """Describe a job for rule planners.

    Raises ValueError for a model that cannot be placed without splitting tensors.
    """
    full_chain = profiles(Placement())
    if not isinstance(full_chain, Chain):
        raise ValueError("the model cannot be placed on one rank")
    recipe, cluster = job.recipe, job.cluster
    number = recipe.parameter + recipe.gradient + recipe.moments + recipe.master

    def needs(setting: Setting) -> float:
        chain = profiles(setting.placement)
        if not isinstance(chain, Chain) or chain.length < setting.pp:
            return math.inf
        return price(chain, setting, cluster, recipe).peak

    def times(rows: int) -> tuple[float, float]:
        chain = profiles(Placement(rows))
        if not isinstance(chain, Chain):
            return math.inf, math.inf
        setting = Setting(chain.placement)
        unit_times = [(unit_seconds(run.unit, setting, cluster), run.count) for run in chain.runs]
        return sum(t[0] * n for t, n in unit_times), sum(t[1] * n for t, n in unit_times)

    units = [run.unit.numel * number for run in full_chain.runs]
    state = float(sum(size * run.count for size, run in zip(units, full_chain.runs)))
    layers = max(run.count for run in full_chain.runs)
    return JobFacts(
        job.ranks,
        cluster.node,
        cluster.memory,
        needs,
        state,
        layers,
        cluster.node,
        job.rows,
        max(units),
        cluster.network >= cluster.link,
        times,
    )


# -- results of one planner ------------------------------------------------------------------------


def describe_planners() -> str:
    """List all planners as text: name, paper, and what is left out."""
    rows = [(name, planner.paper, planner.omits) for name, planner in PLANNERS.items()]
    rows.append(("unity", *UNITY))
    return "\n".join(f"{name:12} {paper}; leaves out {omitted}" for name, paper, omitted in rows)


def find_planner(name: str) -> Planner:
    """Return the planner of a name; raises Refusal S106 where there is none."""
    if name not in PLANNERS:
        helps = (suggest_name(name, PLANNERS, "they are"),)
        message = f"there is no planner `{name}`"
        raise Refusal.of("S106", message, helps=helps, facts=facts_of_unknown(name, PLANNERS))
    return PLANNERS[name]


def plan_with(
    name: str, profiles: Profiles, job: Job, full: SearchResult, limits: Limits = NO_LIMITS
) -> SearchResult:
    """Let a planner choose for a job, and compare its setting with the search's result `full`.

    A planner that splits stages does so on the axes that are quickest for each number of stages,
    and chooses among these by its own model.  The result has no best where nothing that the planner
    chooses fits.  Raises Refusal S109 for unequal nodes where the planner takes all devices to be
    equal.
    """
    planner, unequal = find_planner(name), isinstance(job.cluster, Nodes)
    if unequal and not (isinstance(planner, StagePlanner) and planner.heterogeneous):
        message = f"`{name}` assumes equal ranks, but `{job.cluster.name}` has different nodes"
        names = ", ".join(f"`{name}`" for name, one in STAGE_PLANNERS.items() if one.heterogeneous)
        raise Refusal.of("S109", message, helps=(f"search without a planner, or ask {names}",))
    choose = {StagePlanner: _staged, RulePlanner: _ruled, SearchPlanner: _searched}[type(planner)]
    answer = choose(name, profiles, job, limits)
    credit = (f"Planner {name}: {planner.paper}; leaves out {planner.omits}.",)
    memory = job.cluster.memory
    if answer is None:
        return replace(
            full,
            best=None,
            rejected=(RejectedSetting(name, None, "nothing fits"),),
            attribution=credit,
        )
    setting, value = answer
    if unequal:
        one = price_on_nodes(profiles, job, setting)
    else:
        priced = price(_chain(profiles, setting), setting, job.cluster, job.recipe)
        fits = priced if priced.peak <= memory else None
        one = EvaluatedSetting(setting, priced.seconds, priced.peak, fits)
    best, rejected = one if one.priced else None, list[RejectedSetting]()
    if best is None:
        rejected.append(compare_with_best(None, one, memory, name))
    elif full.best is not None:
        rejected.append(compare_with_best(best, full.best, memory, "the best of the whole search"))
    return replace(
        full, best=best, rejected=tuple(rejected), attribution=(*credit, f"By its model: {value}.")
    )


def find_setting(
    profiles: Profiles,
    job: Job,
    before: SearchResult | None = None,
    *,
    limits: Limits,
    planner: str | None = None,
) -> SearchResult:
    """Search, or let a planner choose where `planner` names one; `before` is that of `search`."""
    *_, full = search(profiles, job, limits, before=before)
    return full if planner is None else plan_with(planner, profiles, job, full, limits)


PlannerAnswer = (
    tuple[Setting, str] | None
)  # a setting, and its value by the planner's model in words


def _chain(profiles: Profiles, setting: Setting) -> Chain:
    chain = profiles(setting.placement)
    assert isinstance(chain, Chain)
    return chain


def _searched(name: str, profiles: Profiles, job: Job, limits: Limits) -> PlannerAnswer:
    result = SEARCH_PLANNERS[name].plan(profiles, job, limits=limits)
    return None if result is None else (result.setting, f"{format_seconds(result.least)} a step")


def _ruled(name: str, profiles: Profiles, job: Job, limits: Limits) -> PlannerAnswer:
    def legal(setting: Setting) -> bool:
        chain = profiles(setting.placement)
        return (
            isinstance(chain, Chain)
            and setting.pp <= chain.length
            and satisfies_limits(limits, setting)
        )

    choice = RULE_PLANNERS[name].plan(case_of(profiles, job), legal)
    return choice and (choice[0], f"{choice[1].when}: {choice[1].why}")


def _staged(name: str, profiles: Profiles, job: Job, limits: Limits) -> PlannerAnswer:
    planner, best = STAGE_PLANNERS[name], math.inf
    fixed: dict[str, tuple[Value, ...]] = {
        "order": ("1F1B",),
        "chunks": (1,),
        "offload": ("none",),
    }
    if recompute_forward not in planner.choices:
        fixed["again"] = ("none",)
    answer: PlannerAnswer = None
    for pp in limits.filter_admitted("pp", divisors(job.ranks)):
        own = Limits(pinned={"pp": (pp,)}).combined_with(limits).combined_with(Limits(pinned=fixed))
        *_, last = search(profiles, job, own, moves=0)
        if last.best is None or last.best.setting.chunks > 1:
            continue
        chain = _chain(profiles, last.best.setting)
        for setting in _standing(name, chain, last.best.setting, job):
            cut = _cut(name, chain, setting, job.cluster, job.recipe)
            if cut is None or not satisfies_limits(limits, cut[0]):
                continue
            value = cut[1] * (setting.micro if planner.objective is SLOWEST else 1)
            if value < best:
                best, answer = value, (cut[0], _valued(planner, cut[1]))
    return answer


def _standing(name: str, chain: Chain, setting: Setting, job: Job) -> Iterator[Setting]:
    """Yield a setting in all orders of unequal nodes and of axes, for a planner that arranges
    devices.

    First with equal rows for all replicas, then with rows by the speed of each replica under its
    best stages, and with one row more or less.
    """
    cluster = job.cluster
    if not STAGE_PLANNERS[name].arranges_devices or not isinstance(cluster, Nodes):
        yield setting
        return
    for axes, order in product(NODE_AXIS_ORDERS, node_orders(cluster.nodes)):
        trial = replace(setting, axes=axes, nodes=order, rows=())
        yield trial
        paces = [
            _pace([_before(chain, trial, one) for one in row]) for row in _machines(trial, cluster)
        ]
        rows = split_rows(trial.dp * trial.placement.rows, [partial(mul, pace) for pace in paces])
        if trial.placement.ep == 1:
            row_splits = (rows, *neighbour_splits(rows))
            yield from (replace(trial, rows=one) for one in row_splits if len(set(one)) > 1)


def _pace(cumulative: Sequence[Floats]) -> float:
    """Seconds of a replica's slowest stage, given seconds of the units before each unit at each
    place."""
    cuts = split_for_slowest([cumulative])
    assert cuts is not None
    ends = list(pairwise([0, *accumulate(cuts)]))
    return max(float(sums[end] - sums[start]) for sums, (start, end) in zip(cumulative, ends))


def _valued(planner: StagePlanner, value: float) -> str:
    if planner.objective is PEAK:
        return f"{format_bytes(round(value))} of the fullest rank"
    scope = "for a microbatch in the slowest stage" if planner.objective is SLOWEST else "a step"
    return f"{format_seconds(value)} {scope}"
