"""What a job is to be best at: the cheapest in time, or least energy and time under power limits.

* Provision: how many ranks are rented, so that a run ends before its deadline and costs least.
* Energy: the batch and the power limit under which a run to a target costs least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

HOUR = 3600.0

# -- provision -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Provision:
    """So many ranks for a whole run: its seconds, and what it costs."""

    ranks: int
    seconds: float
    cost: float


def provisions(
    sizes: Iterable[int], step: Callable[[int], float | None], steps: int, price: float
) -> list[Provision]:
    """Every number of ranks that a model fits on, as a run of so many steps.

    `step` gives the seconds of the best step on so many ranks, None where none fits; `price` is
    that of a rank for an hour.
    """
    found = []
    for ranks in sizes:
        seconds = step(ranks)
        if seconds is not None:
            whole = steps * seconds
            found.append(Provision(ranks, whole, ranks * price * whole / HOUR))
    return found


def cheapest(found: Iterable[Provision], deadline: float = math.inf) -> Provision | None:
    """The one of least cost that ends in time; of equal costs the quickest (lambda-DNN, Xu et al.
    2021)."""
    fit = [one for one in found if one.seconds <= deadline]
    return min(fit, key=lambda one: (one.cost, one.seconds), default=None)


# -- energy ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Power:
    """Watts of a rank: idle, at most, and the limits that may be set.

    A limit slows computing alone: the clock falls with the cube root of the power that is left
    above idle, since power grows with clock times the square of voltage, and voltage with clock.
    """

    idle: float
    most: float
    limits: tuple[float, ...]

    def slowed(self, limit: float) -> float:
        """Factor by which computing takes longer under a limit, 1 without one."""
        if not self.idle < limit <= self.most:
            raise ValueError(f"a limit lies above {self.idle} W and up to {self.most} W")
        return float(((self.most - self.idle) / (limit - self.idle)) ** (1 / 3))


@dataclass(frozen=True)
class Run:
    """A run to a target under one batch and limit: its seconds, joules of a rank, its cost."""

    batch: int
    limit: float
    seconds: float
    joules: float
    cost: float


@dataclass(frozen=True)
class Work:
    """A step with one batch: seconds that a rank computes, and others; steps to the target."""

    computing: float
    other: float
    steps: float


def runs(work: Mapping[int, Work], power: Power, eta: float) -> list[Run]:
    """Every batch under every limit, with Zeus' cost: eta E + (1 - eta) P T (You et al. 2023).

    E are joules, T seconds, P the most that a rank draws: eta = 1 asks for energy alone, 0 for time
    alone.  A rank draws its limit while it computes, and what it draws idle in all other seconds.
    """
    if not 0 <= eta <= 1:
        raise ValueError(f"eta lies between 0 and 1, not {eta}")
    found = []
    for batch, one in work.items():
        for limit in power.limits:
            computing = one.computing * power.slowed(limit) * one.steps
            other = one.other * one.steps
            joules = computing * limit + other * power.idle
            seconds = computing + other
            cost = eta * joules + (1 - eta) * power.most * seconds
            found.append(Run(batch, limit, seconds, joules, cost))
    return found


@dataclass
class Bandit:
    """Chooses batches from what earlier runs cost, as Zeus does while a job comes again and again.

    Thompson sampling with normal costs: each batch has tried costs; the next is that whose drawn
    mean is least.  Each is tried twice first.  The limit needs no search: it is measured within one
    run.
    """

    batches: tuple[int, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        self.costs: dict[int, list[float]] = {batch: [] for batch in self.batches}
        self._draws = np.random.default_rng(self.seed)

    def next(self) -> int:
        """The batch to run with now."""
        few = [batch for batch, costs in self.costs.items() if len(costs) < 2]
        if few:
            return min(few, key=lambda batch: len(self.costs[batch]))
        pooled = float(np.mean([np.var(costs, ddof=1) for costs in self.costs.values()]))
        drawn = {
            batch: self._draws.normal(np.mean(costs), math.sqrt(pooled / len(costs)))
            for batch, costs in self.costs.items()
        }
        return min(drawn, key=drawn.__getitem__)

    def told(self, batch: int, cost: float) -> None:
        """Take up what a run with a batch cost."""
        self.costs[batch].append(cost)

    @property
    def best(self) -> int:
        """The batch that costs least so far, by its mean."""
        tried = {batch: np.mean(costs) for batch, costs in self.costs.items() if costs}
        return min(tried, key=tried.__getitem__)
