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
        both = replace(self, limits=limits.combined_with(self.limits))
        if self.steps:
            return both._walked(profiles, job, seed)
        *_, last = search(profiles, job, both.limits)
        return last.best

    def _walked(self, profiles: Profiles, job: Job, seed: int) -> EvaluatedSetting | None:
        filler, known = Evaluator(job, self.limits), dict[Setting, EvaluatedSetting]()
        clocks: dict[Placement, ChainTimes] = {}
        space = sorted(self._space(profiles, job, clocks), key=_ranks_of_model)
        near: dict[tuple[object, ...], list[Setting]] = {}
        for way in space:
            for part in SETTING_PARTS:
                near.setdefault((part, *_parts_except(way, part)), []).append(way)

        def cost(way: Setting) -> float:
            if way not in known:
                known[way] = filler.evaluate(clocks[way.placement], way)
            priced = known[way].priced
            return priced.seconds if priced is not None else math.inf

        def propose(way: Setting, chance: random.Random) -> Setting:
            """Return a setting that differs in one part alone, if there is one."""
            part = chance.choice(SETTING_PARTS)
            return chance.choice(near[part, *_parts_except(way, part)])

        start = next((way for way in space if cost(way) < math.inf), None)
        if start is None:
            return None
        return known[walk(start, propose, cost, self.steps, seed=seed).plan]

    def _space(
        self, profiles: Profiles, job: Job, clocks: dict[Placement, ChainTimes]
    ) -> Iterator[Setting]:
        for group in iter_placements(job, self.limits):
            for rows in microbatch_rows(job, group, self.limits):
                chain = profiles(replace(group, rows=rows))
                found = (
                    list_candidates(job, chain, self.limits) if isinstance(chain, Chain) else None
                )
                if found is not None:
                    clocks[found.chain.placement] = ChainTimes(found.chain, job)
                    yield from map(found.setting, range(len(found)))


def _ranks_of_model(way: Setting) -> int:
    """Number of ranks that share one model: 1 for data parallelism alone."""
    return way.pp * way.placement.tp * way.placement.cp


SETTING_PARTS = ("axes", "rows", "order", "zero")


def _parts_except(way: Setting, part: str) -> tuple[object, ...]:
    """Return all parts of a setting except one; microbatches follow from axes and rows."""
    at = way.placement
    parts: dict[str, object] = {
        "axes": (way.dp, way.pp, at.tp, at.cp, at.ep, at.sequence),
        "rows": at.rows,
        "order": (way.order, way.chunks),
        "zero": way.zero,
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
    split, most = setting.dp, max(_parts(setting))
    sizes = (recipe.moments + recipe.master, recipe.gradient, recipe.parameter)
    each = sum(size / split if setting.zero > at else size for at, size in enumerate(sizes))
    found: list[Layer] = []
    for run in chain.runs:
        unit = run.unit
        forward, backward, _ = unit_seconds(unit, setting, cluster)
        layer = Layer(
            forward,
            backward,
            unit.numel * recipe.gradient,
            unit.numel * each,
            most * unit.kept,
            most * unit.input,
            most * unit.output,
        )
        found += [layer] * run.count
    return tuple(found)


def devices_of(setting: Setting, chain: Chain, cluster: Cluster) -> Devices:
    """Describe the ranks of a pipeline as devices in a row.

    The memory that a unit needs at its fullest moment is set aside.  Each place has the slowest
    replica's speed, with the rows that the replica has, and the smallest memory; links are the
    slowest of all.
    """
    parts = _parts(setting)
    aside = max(parts) * max(run.unit.peak + run.unit.kept for run in chain.runs)
    machines = _machines(setting, cluster)

    def took(one: Cluster) -> float:
        return float(_before(chain, setting, one)[-1])

    first, places = took(machines[0][0]), list(zip(*machines))
    speeds = [first / max(took(m) * part for m, part in zip(at, parts)) for at in places]
    rooms = [max(0.0, min(one.memory for one in at) - aside) for at in places]
    every = [one.device for one in cluster.nodes] if isinstance(cluster, Nodes) else [cluster]
    return Devices(
        setting.pp,
        max(rooms),
        max(1, min(one.node for one in every) // setting.stride("pp")),
        min(one.link for one in every),
        min(one.network for one in every),
        speeds=tuple(speeds),
        memories=tuple(rooms) if len(set(rooms)) > 1 else (),
    )


def _parts(setting: Setting) -> list[float]:
    """Rows of each replica, relative to the rows of a microbatch."""
    return [rows / setting.placement.rows for rows in setting.rows] or [1.0] * setting.dp


def _before(chain: Chain, setting: Setting, cluster: Cluster) -> Floats:
    """Seconds of a microbatch in the units before each unit, and in all units."""
    took = [sum(unit_seconds(run.unit, setting, cluster)[:2]) for run in chain.runs]
    return np.append(0.0, np.repeat(took, [run.count for run in chain.runs]).cumsum())


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
    found = _cut(name, chain, setting, cluster, recipe)
    return found and found[0]


def _cut(
    name: str, chain: Chain, setting: Setting, cluster: Cluster, recipe: Recipe
) -> tuple[Setting, float] | None:
    """Split as `split_as_planner` does; also return the value by the planner's own objective."""
    if not STAGE_PLANNERS[name].heterogeneous:
        check_equal_ranks(cluster)
    if setting.chunks != 1:
        raise ValueError(f"{name} gives each rank one stage, and {setting.order} has several")
    says = tuple(
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
        choices=says,
    )
    if planner.replicas in (reduce_each_step, spread_reduction):
        planner = replace(planner, replicas=_copied(planner.replicas, setting, cluster))
    flying: Sequence[float] = count_in_flight(setting.order, setting.pp, setting.micro, 1)[
        0
    ].tolist()
    layers = layers_of(chain, setting, _machines(setting, cluster)[0][0], recipe)
    if len(layers) < setting.pp:
        raise ValueError(f"{len(layers)} units do not make {setting.pp} stages")
    devices = devices_of(setting, chain, cluster)
    found = planner.solve(
        layers, devices, setting.micro, setting.pp, lambda after: flying[setting.pp - 1 - after]
    )
    if found is None:
        return None
    often = tuple(way.name.count("again") for way in found.options)
    return replace(setting, cuts=found.units, again=often if any(often) else ()), found.value


def _copied(replicas: Replicas, setting: Setting, cluster: Cluster) -> Replicas:
    """Bind the all-reduce of a setting's replicas in this cluster to a planner's model of
    replicas."""

    def over(way: StageOption, weights: float, copies: int, link: float, micro: int) -> StageOption:
        took = collective_seconds(cluster, "all_reduce", weights, setting.dp, setting.stride("dp"))
        ring = 2 * (setting.dp - 1) / setting.dp * weights
        return replicas(way, weights, setting.dp, ring / took, micro) if took else way

    return over


# -- one job ---------------------------------------------------------------------------------------


def case_of(profiles: Profiles, job: Job) -> JobFacts:
    """Describe a job for rule planners.

    Raises ValueError for a model that cannot be placed without splitting tensors.
    """
    whole = profiles(Placement())
    if not isinstance(whole, Chain):
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
        one = Setting(chain.placement)
        each = [(unit_seconds(run.unit, one, cluster), run.count) for run in chain.runs]
        return sum(t[0] * n for t, n in each), sum(t[1] * n for t, n in each)

    units = [run.unit.numel * number for run in whole.runs]
    state = float(sum(size * run.count for size, run in zip(units, whole.runs)))
    layers = max(run.count for run in whole.runs)
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
    told = [(name, one.paper, one.omits) for name, one in PLANNERS.items()]
    told.append(("unity", *UNITY))
    return "\n".join(f"{name:12} {paper}; leaves out {leaves}" for name, paper, leaves in told)


def find_planner(name: str) -> Planner:
    """Return the planner of a name; raises Refusal S106 where there is none."""
    if name not in PLANNERS:
        helps = (suggest_name(name, PLANNERS, "they are"),)
        title = f"there is no planner `{name}`"
        raise Refusal.of("S106", title, helps=helps, facts=facts_of_unknown(name, PLANNERS))
    return PLANNERS[name]


def plan_with(
    name: str, profiles: Profiles, job: Job, every: SearchResult, limits: Limits = NO_LIMITS
) -> SearchResult:
    """Let a planner choose for a job, and compare its setting with the search's result `every`.

    A planner that splits stages does so on the axes that are quickest for each number of stages,
    and chooses among these by its own model.  The result has no best where nothing that the planner
    chooses fits.  Raises Refusal S109 for unequal nodes where the planner takes all devices to be
    equal.
    """
    planner, unlike = find_planner(name), isinstance(job.cluster, Nodes)
    if unlike and not (isinstance(planner, StagePlanner) and planner.heterogeneous):
        title = f"`{name}` assumes equal ranks, but `{job.cluster.name}` has different nodes"
        known = ", ".join(f"`{name}`" for name, one in STAGE_PLANNERS.items() if one.heterogeneous)
        raise Refusal.of("S109", title, helps=(f"search without a planner, or ask {known}",))
    says = {StagePlanner: _staged, RulePlanner: _ruled, SearchPlanner: _searched}[type(planner)]
    said = says(name, profiles, job, limits)
    by = (f"Planner {name}: {planner.paper}; leaves out {planner.omits}.",)
    memory = job.cluster.memory
    if said is None:
        return replace(
            every,
            best=None,
            rejected=(RejectedSetting(name, None, "nothing fits"),),
            attribution=by,
        )
    setting, words = said
    if unlike:
        one = price_on_nodes(profiles, job, setting)
    else:
        priced = price(_chain(profiles, setting), setting, job.cluster, job.recipe)
        fits = priced if priced.peak <= memory else None
        one = EvaluatedSetting(setting, priced.seconds, priced.peak, fits)
    best, others = one if one.priced else None, list[RejectedSetting]()
    if best is None:
        others.append(compare_with_best(None, one, memory, name))
    elif every.best is not None:
        others.append(compare_with_best(best, every.best, memory, "the best of the whole search"))
    return replace(
        every, best=best, rejected=tuple(others), attribution=(*by, f"By its model: {words}.")
    )


def find_setting(
    profiles: Profiles, job: Job, limits: Limits, planner: str | None = None
) -> SearchResult:
    """Search, or let a planner choose where `planner` names one."""
    *_, every = search(profiles, job, limits)
    return every if planner is None else plan_with(planner, profiles, job, every, limits)


PlannerAnswer = (
    tuple[Setting, str] | None
)  # a setting, and its value by the planner's model in words


def _chain(profiles: Profiles, setting: Setting) -> Chain:
    chain = profiles(setting.placement)
    assert isinstance(chain, Chain)
    return chain


def _searched(name: str, profiles: Profiles, job: Job, limits: Limits) -> PlannerAnswer:
    found = SEARCH_PLANNERS[name].plan(profiles, job, limits=limits)
    return None if found is None else (found.setting, f"{format_seconds(found.least)} a step")


def _ruled(name: str, profiles: Profiles, job: Job, limits: Limits) -> PlannerAnswer:
    def legal(setting: Setting) -> bool:
        chain = profiles(setting.placement)
        return (
            isinstance(chain, Chain)
            and setting.pp <= chain.length
            and satisfies_limits(limits, setting)
        )

    found = RULE_PLANNERS[name].plan(case_of(profiles, job), legal)
    return found and (found[0], f"{found[1].when}: {found[1].why}")


def _staged(name: str, profiles: Profiles, job: Job, limits: Limits) -> PlannerAnswer:
    planner, best = STAGE_PLANNERS[name], math.inf
    flat: dict[str, tuple[Value, ...]] = {
        "order": ("1F1B",),
        "chunks": (1,),
        "offload": ("none",),
    }
    if recompute_forward not in planner.choices:
        flat["again"] = ("none",)
    found: PlannerAnswer = None
    for pp in limits.filter_admitted("pp", divisors(job.ranks)):
        own = Limits(pinned={"pp": (pp,)}).combined_with(limits).combined_with(Limits(pinned=flat))
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
                best, found = value, (cut[0], _valued(planner, cut[1]))
    return found


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
        way = replace(setting, axes=axes, nodes=order, rows=())
        yield way
        paces = [
            _pace([_before(chain, way, one) for one in some]) for some in _machines(way, cluster)
        ]
        rows = split_rows(way.dp * way.placement.rows, [partial(mul, pace) for pace in paces])
        if way.placement.ep == 1:
            near = (rows, *neighbour_splits(rows))
            yield from (replace(way, rows=one) for one in near if len(set(one)) > 1)


def _pace(before: Sequence[Floats]) -> float:
    """Seconds of a replica's slowest stage, given seconds of the units before each unit at each
    place."""
    cuts = split_for_slowest([before])
    assert cuts is not None
    ends = list(pairwise([0, *accumulate(cuts)]))
    return max(float(one[end] - one[start]) for one, (start, end) in zip(before, ends))


def _valued(planner: StagePlanner, value: float) -> str:
    if planner.objective is PEAK:
        return f"{format_bytes(round(value))} of the fullest rank"
    what = "for a microbatch in the slowest stage" if planner.objective is SLOWEST else "a step"
    return f"{format_seconds(value)} {what}"
