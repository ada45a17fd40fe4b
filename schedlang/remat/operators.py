"""Choice of operators whose results a recomputed module saves: bytes saved against work repeated.

A saved result spares its own operator in the recomputation, and no other.  So the candidates are
the sets of operators on the Pareto front, found by adding one operator after another and dropping
dominated sets (Nemhauser and Ullmann, Discrete dynamic programming and capital allocation, 1969).
Saving operators with much work per byte, and repeating those with little: Yuan et al., Accelerating
the training of large language models using efficient activation rematerialization and optimal
hybrid parallelism (ATC 2024).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from schedlang.remat import decisions_of
from schedlang.remat.rotor import ModuleCost

MAX_POINTS = 128  # maximal points of a frontier; of more, one for each of as many steps of bytes

Key = tuple[str, int]  # the name of an operator, and which of its calls in the module


@dataclass(frozen=True)
class Operator:
    """One call of an operator in the forward of a module.

    work   operations
    bytes  of its result
    saved  bytes of the result that autograd saves anyway, in a forward or in a recomputation
    """

    key: Key
    work: float
    bytes: int
    saved: int = 0


@dataclass(frozen=True)
class ModuleChoice:
    """The treatment of one module.

    kept    operators whose results are saved; None: the module is not recomputed at all
    held    bytes between forward and backward
    during  additional bytes while it is recomputed
    again   work of the recomputation
    """

    kept: tuple[Key, ...] | None
    held: int
    during: int
    again: float


def pareto_front(operators: Sequence[Operator]) -> list[tuple[int, float, tuple[int, ...]]]:
    """Return the Pareto front: bytes saved, work repeated and indices of the saved operators.

    In the order of bytes, beginning with nothing saved.
    """
    total = sum(one.work for one in operators)
    points: list[tuple[int, float, tuple[int, ...]]] = [(0, total, ())]
    for place, one in enumerate(operators):
        more = [(size + one.bytes, work - one.work, (*kept, place)) for size, work, kept in points]
        points = _undominated([*points, *more])
    return points


@cache
def module_choices(cost: ModuleCost) -> tuple[ModuleChoice, ...]:
    """Return the choices for a module in the order of their bytes: the frontier, and no
    recomputation."""
    found = [ModuleChoice(None, cost.saved, 0, 0.0)]
    for size, work, kept in pareto_front(cost.operators):
        inside = sum(cost.operators[place].saved for place in kept)
        keys = tuple(cost.operators[place].key for place in kept)
        held, again = cost.input + size, cost.fixed + work
        if held < cost.saved:
            found.append(ModuleChoice(keys, held, max(0, cost.saved - inside), again))
    return tuple(sorted(found, key=lambda one: (one.held, one.again)))


@dataclass(frozen=True)
class PartialPlan:
    """A plan of the first modules: bytes held by all, the work repeated, and the last choice."""

    held: int
    again: float
    last: ModuleChoice | None = None
    before: PartialPlan | None = None

    @property
    def chosen(self) -> tuple[ModuleChoice, ...]:
        """The choice of each module, in order."""
        return decisions_of(self)


EMPTY_PLANS: tuple[PartialPlan, ...] = (PartialPlan(0, 0.0),)


def extend_plans(
    before: Iterable[PartialPlan], cost: ModuleCost, memory: int
) -> tuple[PartialPlan, ...]:
    """Extend plans by one module: all that fit and that no other plan dominates."""
    found = [
        (one.held + choice.held, one.again + choice.again, one, choice)
        for one in before
        for choice in module_choices(cost)
        if one.held + choice.held + choice.during <= memory
    ]
    return tuple(
        PartialPlan(size, work, last, one) for size, work, one, last in _undominated(found)
    )


def choose_saved(chain: Sequence[ModuleCost], memory: int) -> tuple[ModuleChoice, ...] | None:
    """Choose what each module saves so that the least is recomputed within `memory`; None: nothing
    fits."""
    found = EMPTY_PLANS
    for cost in chain:
        found = extend_plans(found, cost, memory)
    return found[-1].chosen if found else None


def describe_choices(chosen: Sequence[ModuleChoice]) -> str:
    """Describe how many modules save what, and what they recompute."""
    found = []
    for one, count in Counter(chosen).items():
        if one.kept is None:
            found.append(f"{count} kept whole ({one.held} bytes each)")
            continue
        names = Counter(name.rpartition("::")[2] for name, _ in one.kept)
        kept = ", ".join(f"{often} {name}" for name, often in names.items()) or "nothing"
        found.append(
            f"{count} recomputed, of which are kept: {kept} ({one.held} bytes each,"
            f" {one.again:.3g} operations again)"
        )
    return "; ".join(found)


def min_memory(chain: Sequence[ModuleCost]) -> int:
    """Return the fewest bytes in which `choose_saved` finds a plan."""
    most = sum(one.saved for one in chain)
    return bisect_left(range(most), True, key=lambda memory: _fits(chain, memory))


def _fits(chain: Sequence[ModuleCost], memory: int) -> bool:
    """Return whether any choice fits: holding as little as possible is never worse later."""
    before = 0
    for cost in chain:
        fitting = (c for c in module_choices(cost) if before + c.held + c.during <= memory)
        least = next(fitting, None)  # choices are in the order of their bytes
        if least is None:
            return False
        before += least.held
    return True


def _undominated(points: list[tuple]) -> list[tuple]:  # type: ignore[type-arg]
    """Return the tuples (bytes, work, ...) that no other dominates."""
    found: list[tuple] = []  # type: ignore[type-arg]
    for point in sorted(points, key=lambda one: one[:2]):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    if len(found) <= MAX_POINTS:
        return found
    step = -(
        -(found[-1][0] - found[0][0]) // (MAX_POINTS - 1)
    )  # the last of each step has the least work
    steps = {(point[0] - found[0][0]) // step: point for point in found}
    return [found[0], *(point for point in steps.values() if point is not found[0])]


class RunCosts:
    """The least recomputation of runs of modules; equal runs are computed once."""

    def __init__(self, chain: Sequence[ModuleCost], memory: Sequence[int]) -> None:
        numbers: dict[ModuleCost, int] = {}
        self._kinds = [numbers.setdefault(cost, len(numbers)) for cost in chain]
        self._costs = list(numbers)
        self.memory = tuple(memory)  # by stage, for one microbatch
        self._known: dict[tuple[int, tuple[int, ...]], tuple[PartialPlan, ...]] = {}

    def of(self, stage: int, low: int, high: int) -> float:
        """Return the least repeated work of modules low to high - 1 on a stage; inf: nothing
        fits."""
        found = self._fitted(self.memory[stage], tuple(self._kinds[low:high]))
        return found[-1].again if found else math.inf

    def _fitted(self, memory: int, kinds: tuple[int, ...]) -> tuple[PartialPlan, ...]:
        if not kinds:
            return EMPTY_PLANS
        known = next(
            k for k in range(len(kinds), -1, -1) if k == 0 or (memory, kinds[:k]) in self._known
        )
        found = self._known[memory, kinds[:known]] if known else EMPTY_PLANS
        for end in range(known, len(kinds)):
            found = extend_plans(found, self._costs[kinds[end]], memory)
            self._known[memory, kinds[: end + 1]] = found
        return found
