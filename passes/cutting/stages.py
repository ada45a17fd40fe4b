"""Cut points to the stage of every unit: by name, evenly, or by the lightest heaviest stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from schedlang.diagnostic import Diagnostic, Label, Refusal, closest, quoted
from schedlang.facets import Cut
from schedlang.plan import Plan
from schedlang.runtime.recording.graph import refusal
from schedlang.source import NOWHERE

if TYPE_CHECKING:
    from schedlang.runtime.recording.graph import StageGraph

Weight = Callable[[int, int, int], float]
LISTS = ("ModuleList", "ModuleDict", "Sequential")


@dataclass(frozen=True)
class Unit:
    """A unit in call order: its name, its parameters, and whether it belongs to the trunk.

    Only trunk units are counted when stages are made even; what stands before and after them
    goes with the first and the last.
    """

    name: str
    params: int
    trunk: bool = True


def at_units(units: Sequence[Unit], starts: Sequence[str]) -> tuple[int, ...]:
    """A new stage starts at each unit named. Gives the stage of every unit."""
    names = [unit.name for unit in units]
    places = [_place(names, start) for start in starts]
    if len(places) != len(set(places)) or 0 in places:
        raise refusal(
            "S613",
            "",
            f"`{names[0]}` is the first module: no stage would be before it"
            if 0 in places
            else "two stages start at one module",
            f"stages may start at {quoted(names[1:])}",
        )
    return _stages(len(units), places)


def _place(names: Sequence[str], start: str) -> int:
    """The first unit that is a module or lies inside it."""
    for place, name in enumerate(names):
        if name == start or name.startswith((f"{start}.", f"{start}#")):
            return place
    guess = closest(start, names)
    helps = (f"did you mean `{guess}`?",) if guess else (", ".join(names),)
    raise refusal("S613", start, "is not a module at which a stage can start", *helps)


def at_indices(units: Sequence[Unit], starts: Sequence[int]) -> tuple[int, ...]:
    """A new stage starts at each trunk unit of these numbers (from 0)."""
    trunk = [unit.name for unit in units if unit.trunk]
    for start in starts:
        if not 0 < start < len(trunk):
            reason = f"no cut is possible before module {start} of the {len(trunk)} of the list"
            raise refusal("S613", "", reason, f"1 to {len(trunk) - 1}")
    return at_units(units, [trunk[start] for start in starts])


def even(units: Sequence[Unit], stages: int) -> tuple[int, ...]:
    """Trunk units in equal runs; where they do not divide, earlier stages take one more.

    The last stage also holds what follows the trunk, so it is among the smaller ones.
    """
    trunk = [unit.name for unit in units if unit.trunk]
    _enough(len(trunk), stages)
    size, more = divmod(len(trunk), stages)
    starts = list(accumulate(size + (k < more) for k in range(stages - 1)))
    return at_units(units, [trunk[start] for start in starts])


def balanced(units: Sequence[Unit], stages: int, weight: Weight | None = None) -> tuple[int, ...]:
    """The cut whose heaviest stage is lightest; every stage has a trunk unit.

    `weight(stage, first, after)` of the units first to after - 1 on a stage, which need not be a
    sum over units; by default their parameters. Exact, by dynamic programming over runs of units
    (linear partition; Skiena, The Algorithm Design Manual, §10.5). Of equal cuts the one with the
    earliest starts.
    """
    trunk = [k for k, unit in enumerate(units) if unit.trunk]
    _enough(len(trunk), stages)
    bounds = [0, *trunk[1:], len(units)]  # units before the trunk go with its first, and so on
    n = len(trunk)
    if weight is None:
        sums = [0, *accumulate(unit.params for unit in units)]
        weight = lambda stage, low, high: sums[high] - sums[low]  # noqa: E731
    best = [[0.0] * (n + 1) for _ in range(stages + 1)]
    start = [[0] * (n + 1) for _ in range(stages + 1)]
    for high in range(1, n + 1):
        best[1][high] = weight(0, 0, bounds[high])
    for k in range(2, stages + 1):
        for high in range(k, n + 1):
            options = (
                (max(best[k - 1][low], weight(k - 1, bounds[low], bounds[high])), low)
                for low in range(k - 1, high)
            )
            best[k][high], start[k][high] = min(options)
    places, high = [], n
    for k in range(stages, 1, -1):
        high = start[k][high]
        places.append(bounds[high])
    return _stages(len(units), places[::-1])


REGIONS = {"recompute": "recomputes", "structure": "computes"}


def check_regions(plan: Plan, graph: StageGraph, stage_of: Sequence[int]) -> None:
    """Refuse a cut inside of what a row recomputes or computes as one (S603)."""
    rows = [(a, f) for a in plan.actions for f in REGIONS if f in a.primitive.writes]
    for action, facet in rows:
        for region in action.primitive.together(action.sites):
            inside = [
                k for k, name in enumerate(graph.units)
                if any(name.startswith(f"{site}.") for site in region)
                or len(region) > 1 and name in region
            ]  # fmt: skip
            cuts = [graph.labels[b] for a, b in pairwise(inside) if stage_of[a] != stage_of[b]]
            if cuts:
                does = REGIONS[facet]
                what = "checkpointed" if facet == "recompute" else "replaced"
                ends = dict.fromkeys((region[0], region[-1]))
                one = Label(
                    action.span or NOWHERE, f"{does} {' to '.join(map(_quoted, ends))} as one"
                )
                raise Refusal(
                    Diagnostic(
                        "S603", f"a {what} region cannot span a pipeline cut",
                        Label(text=f"cuts it in two before `{cuts[0]}`"), (one,),
                        helps=(f"cut before `{region[0]}` or after `{region[-1]}`",
                               f"or let `{action.name}` select the modules one by one"),
                    )
                )  # fmt: skip


def _quoted(name: str) -> str:
    return f"`{name}`"


def elements(plan: Plan, cut: Cut) -> tuple[str, ...]:
    """What the lists of a cut hold, before any forward has shown what is called, and how often."""
    unrolled = dict(plan.unrolled)

    def calls(fqn: str) -> int:
        inside = [n for name, n in unrolled.items() if name == fqn or name.startswith(f"{fqn}.")]
        return max(1, sum(inside))

    found = []
    for trunk in cut.trunks:
        site = plan.model.sites[trunk]
        whole = trunk in unrolled or not any(site.is_a(kind) for kind in LISTS)
        names = [trunk] if whole else [f"{trunk}.{child}" for child in site.children]
        found += [name for name in names for _ in range(calls(name))]
    return tuple(found)


def _enough(units: int, stages: int) -> None:
    if stages < 1 or units < stages:
        reason = f"{units} modules of the list cannot be cut into {stages} stages"
        raise refusal("S613", "", reason, f"1 to {units} stages")


def _stages(count: int, starts: Sequence[int]) -> tuple[int, ...]:
    stage, found = 0, []
    for unit in range(count):
        stage += unit in starts
        found.append(stage)
    return tuple(found)
