"""Planners of the literature by their names: settings of the engines, none with code of its own.

* Planners that search: limits of the search, or a walk over all that it would look at.
* All of them.
* A setting's stages cut as one of them would.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from schedlang.passes.planner.bounds import Clock
from schedlang.passes.planner.fill import Filled, Filler
from schedlang.passes.planner.limits import Limits
from schedlang.passes.planner.menus import Devices, Layer
from schedlang.passes.planner.price import RECIPE, price, stride, unit_times
from schedlang.passes.planner.rules import RULED, Ruled
from schedlang.passes.planner.search import Profiles, search
from schedlang.passes.planner.space import Job, groups, rows_of, ways
from schedlang.passes.planner.span import in_flight
from schedlang.passes.planner.staged import STAGED, Staged
from schedlang.passes.planner.values import Chain, Placement, Recipe, Setting
from schedlang.passes.planner.walk import walk
from schedlang.passes.simulate.machine import Cluster

# -- planners that search --------------------------------------------------------------------------


@dataclass(frozen=True)
class Searched:
    """A planner that looks for settings by their price.

    paper   who described it, and where; `leaves` what it leaves out
    limits  what it does not look at
    steps   of a walk; 0: it looks at all by their bounds
    """

    paper: str
    leaves: str
    limits: Limits = field(default_factory=Limits)
    steps: int = 0

    def plan(self, profiles: Profiles, job: Job, seed: int = 0) -> Filled | None:
        """The quickest setting that it finds; None where none that it looks at fits."""
        if self.steps:
            return self._walked(profiles, job, seed)
        *_, last = search(profiles, job, self.limits)
        return last.best

    def _walked(self, profiles: Profiles, job: Job, seed: int) -> Filled | None:
        filler, known = Filler(job, self.limits), dict[Setting, Filled]()
        clocks: dict[Placement, Clock] = {}
        space = sorted(self._space(profiles, job, clocks), key=_splits)
        near: dict[tuple[object, ...], list[Setting]] = {}
        for way in space:
            for part in PARTS:
                near.setdefault((part, *_but(way, part)), []).append(way)

        def cost(way: Setting) -> float:
            if way not in known:
                known[way] = filler.filled(clocks[way.placement], way)
            priced = known[way].priced
            return priced.seconds if priced is not None else math.inf

        def propose(way: Setting, chance: random.Random) -> Setting:
            """Another way that differs in one thing alone, if there is one."""
            part = chance.choice(PARTS)
            return chance.choice(near[part, *_but(way, part)])

        start = next((way for way in space if cost(way) < math.inf), None)
        if start is None:
            return None
        return known[walk(start, propose, cost, self.steps, seed=seed).plan]

    def _space(
        self, profiles: Profiles, job: Job, clocks: dict[Placement, Clock]
    ) -> Iterator[Setting]:
        for group in groups(job, self.limits):
            for rows in rows_of(job, group, self.limits):
                chain = profiles(replace(group, rows=rows))
                found = ways(job, chain, self.limits) if isinstance(chain, Chain) else None
                if found is not None:
                    clocks[found.chain.placement] = Clock(found.chain, job)
                    yield from map(found.setting, range(len(found)))


def _splits(way: Setting) -> int:
    """How often a way splits the model: data parallelism alone comes first."""
    return way.pp * way.placement.tp * way.placement.cp


PARTS = ("axes", "rows", "order", "zero")


def _but(way: Setting, part: str) -> tuple[object, ...]:
    """All of a way but one thing; microbatches follow from axes and rows."""
    at = way.placement
    parts: dict[str, object] = {
        "axes": (way.dp, way.pp, at.tp, at.cp, at.ep, at.sequence),
        "rows": at.rows,
        "order": (way.order, way.chunks),
        "zero": way.zero,
    }
    return tuple(value for name, value in parts.items() if name != part)


SEARCHED = {
    "kwai": Searched(
        "Optimal hybrid parallelism (Yuan et al., USENIX ATC 2024)",
        "activations that leave for the host; its figures are measured operators, as a profile's"
        " are after `calibrate`",
        Limits(pinned={"order": ("1F1B", "Interleaved1F1B")}),
    ),
    "flexflow": Searched(
        "FlexFlow (Jia et al., MLSys 2019)",
        "operators one by one: its walk goes over settings of the whole model here",
        steps=400,
    ),
}

# -- all of them -----------------------------------------------------------------------------------

Planner = Staged | Ruled | Searched
PLANNERS: dict[str, Planner] = {**STAGED, **RULED, **SEARCHED}

# -- stages of a setting ---------------------------------------------------------------------------


def layers_of(
    chain: Chain, setting: Setting, cluster: Cluster, recipe: Recipe
) -> tuple[Layer, ...]:
    """The units of a chain as layers, on the ranks that share a stage under this setting."""
    split = setting.dp
    sizes = (recipe.moments + recipe.master, recipe.gradient, recipe.parameter)
    each = sum(size / split if setting.zero > at else size for at, size in enumerate(sizes))
    found: list[Layer] = []
    for run in chain.runs:
        unit = run.unit
        forward, backward, _ = unit_times(unit, setting, cluster)
        layer = Layer(
            forward,
            backward,
            unit.numbers * recipe.gradient,
            unit.numbers * each,
            unit.kept,
            unit.input,
            unit.handed,
        )
        found += [layer] * run.count
    return tuple(found)


def devices_of(setting: Setting, chain: Chain, cluster: Cluster) -> Devices:
    """The ranks of a pipeline as devices in a row; what a unit holds at its fullest is set
    aside."""
    aside = max(run.unit.most + run.unit.kept for run in chain.runs)
    node = max(1, cluster.node // stride(setting, "pp"))
    memory = max(0.0, cluster.memory - aside)
    return Devices(setting.pp, memory, node, cluster.link, cluster.network)


def cut_as(
    name: str, chain: Chain, setting: Setting, cluster: Cluster, recipe: Recipe = RECIPE
) -> Setting | None:
    """A setting with the stages that a planner of this name gives it, one on each rank.

    Returns None where none fit in memory.  Raises KeyError for a planner that cuts no stages,
    ValueError for several stages on a rank, and for fewer units than stages.
    """
    if setting.chunks != 1:
        raise ValueError(f"{name} gives each rank one stage, and {setting.order} has several")
    planner = replace(STAGED[name], alike=False, arranged=False, sizes=_one, degrees=_one)
    flying: Sequence[float] = in_flight(setting.order, setting.pp, setting.micro, 1).tolist()
    layers = layers_of(chain, setting, cluster, recipe)
    if len(layers) < setting.pp:
        raise ValueError(f"{len(layers)} units do not make {setting.pp} stages")
    problem = planner.problem(
        layers,
        devices_of(setting, chain, cluster),
        setting.micro,
        setting.pp,
        lambda after: flying[setting.pp - 1 - after],
    )
    found = planner.solver(problem, planner.objective)
    if found is None:
        return None
    again = tuple(way.name.count("again") for way in found.ways)
    return replace(setting, cuts=found.units, again=again if any(again) else ())


def _one(count: int) -> tuple[int, ...]:
    return (1,)


def seconds_as(
    name: str, chain: Chain, setting: Setting, cluster: Cluster, recipe: Recipe = RECIPE
) -> float | None:
    """Seconds of a step, by our price, with the stages that a planner of this name gives it."""
    cut = cut_as(name, chain, setting, cluster, recipe)
    return None if cut is None else price(chain, cut, cluster, recipe).seconds
