"""Cut points to the stage of every unit: by name, evenly, or by the smallest largest stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from schedlang.diagnostic import closest
from schedlang.plan import Cut, Plan
from schedlang.runtime.graph import refusal

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
    for start in starts:
        if start not in names:
            guess = closest(start, names)
            helps = (f"did you mean `{guess}`?",) if guess else (", ".join(names),)
            raise refusal("S613", start, "is no unit at which a stage can start", *helps)
    places = [names.index(start) for start in starts]
    if places != sorted(set(places)) or 0 in places:
        raise refusal(
            "S613",
            "",
            "stages start in the order in which units are called, after the first unit",
            ", ".join(sorted({*starts} - {names[0]}, key=names.index)),
        )
    return _stages(len(units), places)


def at_indices(units: Sequence[Unit], starts: Sequence[int]) -> tuple[int, ...]:
    """A new stage starts at each trunk unit of these numbers (from 0)."""
    trunk = [unit.name for unit in units if unit.trunk]
    for start in starts:
        if not 0 < start < len(trunk):
            reason = f"there is no cut before unit {start} of the {len(trunk)} of the trunk"
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


def balanced(units: Sequence[Unit], stages: int) -> tuple[int, ...]:
    """The cut whose largest stage has the fewest parameters; every stage has a trunk unit.

    Exact, by dynamic programming over runs of units (linear partition; Skiena, The Algorithm
    Design Manual, §10.5). Of equal cuts the one with the earliest starts.
    """
    trunk = [k for k, unit in enumerate(units) if unit.trunk]
    _enough(len(trunk), stages)
    sums = [0, *accumulate(unit.params for unit in units)]
    bounds = [0, *trunk[1:], len(units)]  # units before the trunk go with its first, and so on
    n = len(trunk)

    def weight(low: int, high: int) -> int:
        return sums[bounds[high]] - sums[bounds[low]]

    best = [[0] * (n + 1) for _ in range(stages + 1)]
    start = [[0] * (n + 1) for _ in range(stages + 1)]
    for high in range(1, n + 1):
        best[1][high] = weight(0, high)
    for k in range(2, stages + 1):
        for high in range(k, n + 1):
            options = (
                (max(best[k - 1][low], weight(low, high)), low) for low in range(k - 1, high)
            )
            best[k][high], start[k][high] = min(options)
    places, high = [], n
    for k in range(stages, 1, -1):
        high = start[k][high]
        places.append(bounds[high])
    return _stages(len(units), places[::-1])


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


def placement(stages: int, ranks: int) -> tuple[int, ...]:
    """The rank of every stage: stage s on rank s modulo ranks, so chunks go round in a loop."""
    if stages % ranks:
        low, high = stages // ranks * ranks, (stages // ranks + 1) * ranks
        reason = f"{stages} stages do not spread evenly over {ranks} ranks"
        raise refusal("S613", "", reason, *(f"{n} stages" for n in (low, high) if n))
    return tuple(stage % ranks for stage in range(stages))


def _enough(units: int, stages: int) -> None:
    if stages < 1 or units < stages:
        reason = f"{units} units of the trunk cannot be cut into {stages} stages"
        raise refusal("S613", "", reason, f"1 to {units} stages")


def _stages(count: int, starts: Sequence[int]) -> tuple[int, ...]:
    stage, found = 0, []
    for unit in range(count):
        stage += unit in starts
        found.append(stage)
    return tuple(found)
