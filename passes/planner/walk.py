"""A random walk over plans: better ones are taken, worse ones seldom."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class Walked(Generic[Plan]):
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
) -> Walked[Plan]:
    """The best plan that a walk of Metropolis and Hastings meets.

    propose  a neighbour; as likely to come from one of two plans to the other as back
    cost     seconds; infinite for a plan that does not fit
    heat     share of the cost by which a worse plan is taken once in e times
    FlexFlow (Jia et al., MLSys 2019) walks so over strategies of operators.
    """
    chance = random.Random(seed)
    here, now = start, cost(start)
    best, least = here, now
    for _ in range(steps):
        there = propose(here, chance)
        then = cost(there)
        if _accepted(now, then, heat, chance):
            here, now = there, then
            if now < least:
                best, least = here, now
    return Walked(best, least)


def _accepted(now: float, then: float, heat: float, chance: random.Random) -> bool:
    if then <= now:
        return True
    return chance.random() < math.exp((now - then) / (heat * now))
