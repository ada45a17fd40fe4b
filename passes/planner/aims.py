"""Aims other than the time of a step: money within a deadline, and energy.

* The cheapest number of ranks, or some of unlike nodes, that meet a deadline (lambda-DNN).
* Batch and power limit by energy and time, known or found while training (Zeus).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from schedlang.ir.limits import Limits
from schedlang.passes.planner.fill import Filled
from schedlang.passes.planner.search import ANY, Profiles, search
from schedlang.passes.planner.space import Job
from schedlang.passes.simulate.nodes import Nodes

# -- money -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cheapest:
    """The number of ranks whose training is cheapest: money and seconds of all steps."""

    ranks: int
    money: float
    seconds: float
    filled: Filled


def cheapest(
    profiles: Profiles,
    job: Callable[[int], Job],
    counts: Iterable[int],
    steps: int,
    deadline: float,
    rate: Callable[[int], float],
    limits: Limits = ANY,
) -> Cheapest | None:
    """The cheapest of some numbers of ranks that ends all steps within the deadline.

    job   for a number of ranks; `rate` money for a second of so many
    Returns None where none meets the deadline, or fits.  Of two that cost the same the quicker one.
    Numbers are provisioned so by lambda-DNN (Xu et al., IEEE Transactions on Computers 2022).
    """
    found: list[Cheapest] = []
    for ranks in counts:
        *_, last = search(profiles, job(ranks), limits)
        if last.best is None or last.best.priced is None:
            continue
        seconds = steps * last.best.priced.seconds
        if seconds <= deadline:
            found.append(Cheapest(ranks, seconds * rate(ranks), seconds, last.best))
    return min(found, key=lambda one: (one.money, one.seconds), default=None)


def cheapest_nodes(
    profiles: Profiles,
    job: Job,
    steps: int,
    deadline: float,
    rate: Callable[[Nodes], float] = lambda nodes: nodes.rate(nodes.ranks),
    limits: Limits = ANY,
) -> tuple[Nodes, Cheapest] | None:
    """The cheapest of a cluster's nodes that together end all steps within the deadline.

    rate  money for a second of some nodes; or their watts, and it is energy that is least
    Raises TypeError for a cluster that is no `Nodes`.
    """
    nodes = job.cluster
    if not isinstance(nodes, Nodes):
        raise TypeError("nodes are chosen of a cluster that says which it has")
    every = range(len(nodes.nodes))
    some = (one for count in every for one in combinations(every, count + 1))
    offers = list({nodes.ordered(one) for one in some})
    found = cheapest(
        profiles,
        lambda at: replace(job, ranks=offers[at].ranks, cluster=offers[at]),
        range(len(offers)),
        steps,
        deadline,
        lambda at: rate(offers[at]),
        limits,
    )
    if found is None:
        return None
    return offers[found.ranks], replace(found, ranks=offers[found.ranks].ranks)


# -- energy ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Training to a target, as it was measured or is expected: seconds, and mean watts."""

    seconds: float
    watts: float


def energy_cost(run: Run, most: float, eta: float = 0.5) -> float:
    """Cost of a run in joules: eta of its energy, and the rest of its time at the `most` watts.

    Zeus (You et al., NSDI 2023).
    """
    return eta * run.seconds * run.watts + (1 - eta) * run.seconds * most


Knobs = tuple[int, int]  # batch, watts that a device may take


def by_energy(runs: Mapping[Knobs, Run], eta: float = 0.5) -> Knobs:
    """Batch and power limit of the least cost; the largest limit stands for a device's own."""
    most = max(limit for _, limit in runs)
    return min(runs, key=lambda knobs: (energy_cost(runs[knobs], most, eta), knobs))


def found_while_training(
    train: Callable[[int, random.Random], float],
    batches: Sequence[int],
    runs: int,
    seed: int = 0,
) -> list[int]:
    """The batches of so many recurring runs, chosen by Thompson sampling over their costs.

    train  a run of this batch, at the best power limit, returning its cost
    Every batch is tried twice; then each run takes the batch whose mean, drawn from what is known
    of it, is least.  Zeus explores so, and stops a run early that costs too much, which is left to
    `train`.
    """
    chance = random.Random(seed)
    seen: dict[int, list[float]] = {batch: [] for batch in batches}
    chosen: list[int] = []
    for at in range(runs):
        if at < 2 * len(batches):
            batch = batches[at % len(batches)]
        else:
            batch = min(batches, key=lambda one: _drawn(seen[one], chance))
        seen[batch].append(train(batch, chance))
        chosen.append(batch)
    return chosen


def _drawn(costs: Sequence[float], chance: random.Random) -> float:
    """Draw a mean that may lie behind these costs, by a normal belief in it."""
    mean = sum(costs) / len(costs)
    spread = sum((cost - mean) ** 2 for cost in costs) / (len(costs) - 1)
    return chance.gauss(mean, math.sqrt(spread / len(costs)))
