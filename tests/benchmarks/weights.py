"""Weights of the price's causes, fitted to published runs.

* Weights of causes of time, from runs that were timed.
* Weights of what fills a rank, from runs that fitted and runs that did not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from schedlang.passes.planner.constants_fit import MIN_SHARE, Array, fit_constants, huber_loss
from schedlang.passes.planner.price import NO_WEIGHTS, Causes

Timed = tuple[Causes, float]  # seconds of a step by cause, as priced, and as measured

# -- weights of causes -----------------------------------------------------------------------------


def fitted(runs: Sequence[Timed], priors: Causes = NO_WEIGHTS) -> dict[str, float]:
    """Most likely weights given runs: of relative errors, about `priors` (1 where none is given).

    Raises ValueError without a run, or where one took no time.
    """
    if not runs or min(took for _, took in runs) <= 0:
        raise ValueError(
            "there is nothing to fit to: runs that took more than 0 seconds are needed"
        )
    names, matrix = shares(runs)
    found = fit_constants(lambda logs: matrix @ np.exp(logs), _start(names, priors))
    return dict(zip(names, np.exp(found.logs).tolist()))


def unlikelihood(runs: Sequence[Timed], weights: Causes, priors: Causes = NO_WEIGHTS) -> float:
    """Negative logarithm of how likely runs are under weights, but for a number."""
    names, matrix = shares(runs)
    at = _start(names, weights)
    return huber_loss(np.maximum(matrix @ np.exp(at), MIN_SHARE), at, _start(names, priors))


def told(causes: Causes, weights: Causes) -> float:
    """Seconds of a step under weights."""
    return sum(weights.get(name, 1.0) * took for name, took in causes.items())


def shares(runs: Sequence[Timed]) -> tuple[tuple[str, ...], Array]:
    """Names of causes, and what share of each run's time each is [runs, causes]."""
    names = tuple(sorted({name for causes, _ in runs for name in causes}))
    costs: Array = np.array([[causes.get(name, 0.0) for name in names] for causes, _ in runs])
    return names, costs / np.array([[took] for _, took in runs])


def _start(names: Sequence[str], priors: Causes) -> Array:
    return np.log([priors.get(name, 1.0) for name in names])


# -- memory ----------------------------------------------------------------------------------------


MEMORY_PRIOR = 0.4  # standard deviation of the logarithm of a weight about what was assumed
EDGE = 0.03  # scale of a logistic law: how near the limit a run may end either way
OUTLIER = 15.0  # at most so many of these count against the weights, that one odd run may be


def chance(need: float) -> float:
    """Chance to fit of a run that is told to need so much of the limit, by the law of the fit."""
    return float(1 / (1 + need ** (1 / EDGE)))


def fitted_memory(
    state: Array, parts: Array, ran: Sequence[bool], limit: float, priors: Mapping[str, float]
) -> dict[str, float]:
    """Most likely weights given what ran and what did not fit into `limit` bytes, about `priors`.

    `state` [runs, places] counts as it is, `parts` [runs, places, weights] in the order of
    `priors`.  A run's chance to fit is a logistic function of the logarithm of limit over need.
    Coordinates are searched in turn, in logarithms, so that weights stay above 0.
    """
    side = np.where(np.array(ran), 1, -1) / EDGE
    start = np.log(list(priors.values()))

    def loss(found: Array) -> float:
        room = side * np.log(limit / (state + parts @ np.exp(found)).max(1))
        unlike = np.logaddexp(0, -np.maximum(room, -OUTLIER)).sum()
        return float(unlike + (((found - start) / MEMORY_PRIOR) ** 2).sum() / 2)

    found, step = start.copy(), 0.5
    least = loss(found)
    while step > 0.005:
        moved = False
        for index in range(len(start)):
            for way in (step, -step):
                tried = found.copy()
                tried[index] += way
                if (now := loss(tried)) < least - 1e-6:
                    found, least, moved = tried, now, True
        step = step if moved else step / 2
    return dict(zip(priors, np.exp(found).tolist(), strict=True))
