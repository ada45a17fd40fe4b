"""Random walk over plans (Metropolis-Hastings): better plans are accepted, worse ones rarely."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class WalkResult(Generic[Plan]):
    """The best plan of a walk, and its cost."""

    plan: Plan
    cost: float


def walk(
    start: Plan,
    propose: Callable[[Plan, random.Random], Plan],
    cost: Callable[[Plan], float],
    steps: int,
    heat: float = 0.05,
    seed: int = 0,
) -> WalkResult[Plan]:
    """Return the best plan that a Metropolis-Hastings walk visits.

    propose  a neighbour; the probabilities of either direction between two plans must be equal
    cost     seconds; infinite for a plan that does not fit
    heat     a plan that is worse by this share of the cost is accepted with probability 1/e
    FlexFlow (Jia et al., MLSys 2019) walks over strategies of operators in this way.
    """
    chance = random.Random(seed)
    current, current_cost = start, cost(start)
    best, best_cost = current, current_cost
    for _ in range(steps):
        proposed = propose(current, chance)
        proposed_cost = cost(proposed)
        if _accepted(current_cost, proposed_cost, heat, chance):
            current, current_cost = proposed, proposed_cost
            if current_cost < best_cost:
                best, best_cost = current, current_cost
    return WalkResult(best, best_cost)


def _accepted(current: float, proposed: float, heat: float, chance: random.Random) -> bool:
    if proposed <= current:
        return True
    return chance.random() < math.exp((current - proposed) / (heat * current))
