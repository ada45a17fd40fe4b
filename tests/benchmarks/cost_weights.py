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


def fit_weights(runs: Sequence[Timed], priors: Causes = NO_WEIGHTS) -> dict[str, float]:
    """Return the most likely weights for runs, with `priors` (default 1), by relative errors.

    Raises ValueError without a run, or if a run took no time.
    """
    if not runs or min(seconds for _, seconds in runs) <= 0:
        raise ValueError(
            "there is nothing to fit to: runs that took more than 0 seconds are needed"
        )
    names, matrix = shares(runs)
    result = fit_constants(lambda logs: matrix @ np.exp(logs), _start(names, priors))
    return dict(zip(names, np.exp(result.logs).tolist()))


def neg_log_prob(runs: Sequence[Timed], weights: Causes, priors: Causes = NO_WEIGHTS) -> float:
    """Return the negative log likelihood of runs under weights, up to a constant."""
    names, matrix = shares(runs)
    logs = _start(names, weights)
    return huber_loss(np.maximum(matrix @ np.exp(logs), MIN_SHARE), logs, _start(names, priors))


def weighted_time(causes: Causes, weights: Causes) -> float:
    """Return the weighted seconds of a step."""
    return sum(weights.get(name, 1.0) * seconds for name, seconds in causes.items())


def shares(runs: Sequence[Timed]) -> tuple[tuple[str, ...], Array]:
    """Return the names of causes, and their shares of each run's time [runs, causes]."""
    names = tuple(sorted({name for causes, _ in runs for name in causes}))
    costs: Array = np.array([[causes.get(name, 0.0) for name in names] for causes, _ in runs])
    return names, costs / np.array([[seconds] for _, seconds in runs])


def _start(names: Sequence[str], priors: Causes) -> Array:
    return np.log([priors.get(name, 1.0) for name in names])


# -- memory ----------------------------------------------------------------------------------------


MEMORY_PRIOR = 0.4  # standard deviation of the log of a weight around its prior
EDGE = 0.03  # scale of the logistic function: width of the uncertain range near the limit
OUTLIER = 15.0  # cap of a run's penalty, so that outliers do not dominate


def fit_memory(
    state: Array, parts: Array, ran: Sequence[bool], limit: float, priors: Mapping[str, float]
) -> dict[str, float]:
    """Return the most likely weights for runs that fitted into `limit` bytes or not, with `priors`.

    `state` [runs, places] is unweighted, `parts` [runs, places, weights] is in the order of
    `priors`.  A run's chance to fit is a logistic function of log(limit / need).
    Coordinate search in logarithms keeps weights above 0.
    """
    side = np.where(np.array(ran), 1, -1) / EDGE
    start = np.log(list(priors.values()))

    def loss(logs: Array) -> float:
        room = side * np.log(limit / (state + parts @ np.exp(logs)).max(1))
        unlike = np.logaddexp(0, -np.maximum(room, -OUTLIER)).sum()
        return float(unlike + (((logs - start) / MEMORY_PRIOR) ** 2).sum() / 2)

    logs, step = start.copy(), 0.5
    best_loss = loss(logs)
    while step > 0.005:
        improved = False
        for index in range(len(start)):
            for change in (step, -step):
                tried = logs.copy()
                tried[index] += change
                if (new_loss := loss(tried)) < best_loss - 1e-6:
                    logs, best_loss, improved = tried, new_loss, True
        step = step if improved else step / 2
    return dict(zip(priors, np.exp(logs).tolist(), strict=True))
