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
    total = sum(op.work for op in operators)
    points: list[tuple[int, float, tuple[int, ...]]] = [(0, total, ())]
    for index, op in enumerate(operators):
        extended = [
            (size + op.bytes, work - op.work, (*kept, index)) for size, work, kept in points
        ]
        points = _undominated([*points, *extended])
    return points


@cache
def module_choices(cost: ModuleCost) -> tuple[ModuleChoice, ...]:
    """Return the choices for a module in the order of their bytes: the frontier, and no
    recomputation."""
    choices = [ModuleChoice(None, cost.saved, 0, 0.0)]
    for size, work, kept in pareto_front(cost.operators):
        inside = sum(cost.operators[index].saved for index in kept)
        keys = tuple(cost.operators[index].key for index in kept)
        held, again = cost.input + size, cost.fixed + work
        if held < cost.saved:
            choices.append(ModuleChoice(keys, held, max(0, cost.saved - inside), again))
    return tuple(sorted(choices, key=lambda choice: (choice.held, choice.again)))


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
    extended = [
        (plan.held + choice.held, plan.again + choice.again, plan, choice)
        for plan in before
        for choice in module_choices(cost)
        if plan.held + choice.held + choice.during <= memory
    ]
    return tuple(
        PartialPlan(size, work, last, plan) for size, work, plan, last in _undominated(extended)
    )


def choose_saved(chain: Sequence[ModuleCost], memory: int) -> tuple[ModuleChoice, ...] | None:
    """Choose what each module saves so that the least is recomputed within `memory`; None: nothing
    fits."""
    plans = EMPTY_PLANS
    for cost in chain:
        plans = extend_plans(plans, cost, memory)
    return plans[-1].chosen if plans else None


def describe_choices(choices: Sequence[ModuleChoice]) -> str:
    """Describe how many modules save what, and what they recompute."""
    lines = []
    for choice, count in Counter(choices).items():
        if choice.kept is None:
            lines.append(f"{count} kept whole ({choice.held} bytes each)")
            continue
        names = Counter(name.rpartition("::")[2] for name, _ in choice.kept)
        kept = ", ".join(f"{times} {name}" for name, times in names.items()) or "nothing"
        lines.append(
            f"{count} recomputed, of which are kept: {kept} ({choice.held} bytes each,"
            f" {choice.again:.3g} operations again)"
        )
    return "; ".join(lines)


def min_memory(chain: Sequence[ModuleCost]) -> int:
    """Return the fewest bytes in which `choose_saved` finds a plan."""
    total = sum(cost.saved for cost in chain)
    return bisect_left(range(total), True, key=lambda memory: _fits(chain, memory))


def _fits(chain: Sequence[ModuleCost], memory: int) -> bool:
    """Return whether any choice fits: holding as little as possible is never worse later."""
    before = 0
    for cost in chain:
        fitting = (c for c in module_choices(cost) if before + c.held + c.during <= memory)
        smallest = next(fitting, None)  # choices are in the order of their bytes
        if smallest is None:
            return False
        before += smallest.held
    return True


def _undominated(points: list[tuple]) -> list[tuple]:  # type: ignore[type-arg]
    """Return the tuples (bytes, work, ...) that no other dominates."""
    front: list[tuple] = []  # type: ignore[type-arg]
    for point in sorted(points, key=lambda entry: entry[:2]):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    if len(front) <= MAX_POINTS:
        return front
    # the last of each step has the least work
    step = -(-(front[-1][0] - front[0][0]) // (MAX_POINTS - 1))
    steps = {(point[0] - front[0][0]) // step: point for point in front}
    return [front[0], *(point for point in steps.values() if point is not front[0])]


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
        plans = self._fitted(self.memory[stage], tuple(self._kinds[low:high]))
        return plans[-1].again if plans else math.inf

    def _fitted(self, memory: int, kinds: tuple[int, ...]) -> tuple[PartialPlan, ...]:
        if not kinds:
            return EMPTY_PLANS
        length = next(
            k for k in range(len(kinds), -1, -1) if k == 0 or (memory, kinds[:k]) in self._known
        )
        plans = self._known[memory, kinds[:length]] if length else EMPTY_PLANS
        for end in range(length, len(kinds)):
            plans = extend_plans(plans, self._costs[kinds[end]], memory)
            self._known[memory, kinds[: end + 1]] = plans
        return plans
