"""Constants of a price, fitted to measured runs.

* Any constants of which times of runs follow.
* Weights of causes of time, from runs that were timed.
* Weights of what fills a rank, from runs that fitted and runs that did not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schedlang.passes.planner.price import NONE, Causes

Array = NDArray[np.float64]

# -- time ------------------------------------------------------------------------------------------


Timed = tuple[Causes, float]  # seconds of a step by cause, as priced, and as measured
PRIOR = 0.8  # standard deviation of the logarithm of a weight about what was assumed
STEPS = 300  # at most, that are tried: far more than a fit of hundreds of runs takes
NOISE = 0.03  # and of a run about the model
FAR = 1.5  # in those of NOISE, from where on a run weighs less (Huber 1964)
STEP = 1e-4  # of a logarithm, over which slopes are taken
# from logarithms of constants to seconds of runs, as shares of what they took [runs]
Model = Callable[[Array], Array]


@dataclass(frozen=True)
class Fit:
    """Constants that make runs most likely.

    logs    their logarithms; `wide` how far off these may be: standard deviations
    off     logarithms of told over taken [runs]; `alone` the same of each run where it is left out
            (Allen 1974: as a straight line through the best has it)
    """

    logs: Array
    wide: Array
    off: Array
    alone: Array


def most_likely(model: Model, start: Array) -> Fit:
    """Most likely constants: of relative errors of runs, about those of `start`.

    Levenberg and Marquardt's steps in logarithms, so that constants stay above 0; one that no run
    tells of stays as it was assumed.
    """
    found, damping = start, 1e-2
    told = np.maximum(model(found), LEAST)
    least, slope = _unlike(told, found, start), _slope(model, found, told)
    for _ in range(STEPS):
        if damping > 1e9:
            break
        weight, curve = _curve(slope, told)
        down = slope.T @ (weight * np.log(told) / NOISE) + (found - start) / PRIOR**2
        step = np.linalg.solve(curve + damping * np.diag(np.diag(curve)), -down)
        tried = found + np.clip(step, -1, 1)
        new = np.maximum(model(tried), LEAST)
        now = _unlike(new, tried, start)
        if not now < least - 1e-6:  # not where it is no number either
            damping *= 4
            continue
        found, told, least, damping = tried, new, now, damping / 4
        slope = _slope(model, found, told)
    weight, curve = _curve(slope, told)
    spread = np.linalg.inv(curve)
    own = weight * ((slope @ spread) * slope).sum(1)  # what a run tells of itself
    off = np.log(told)
    return Fit(found, np.sqrt(np.diag(spread)), off, off / (1 - np.minimum(own, 1 - 1e-9)))


LEAST = 1e-9  # of what a run took, where causes that overlap take more away


def _slope(model: Model, found: Array, told: Array) -> Array:
    """Growth of errors with each constant [runs, constants]; downwards, for shares end at 1."""
    less = [model(found - STEP * one) for one in np.eye(len(found))]
    logs = np.log(np.maximum(np.array(less).reshape(len(found), len(told)), LEAST))
    slopes: Array = (np.log(told) - logs).T / STEP / NOISE
    return slopes


def _curve(slope: Array, told: Array) -> tuple[Array, Array]:
    """Weights of runs, less where they are far off, and the curvature of how unlikely they are."""
    weight = np.minimum(1, FAR / np.maximum(abs(np.log(told)) / NOISE, 1e-9))
    return weight, slope.T @ (weight[:, None] * slope) + np.eye(slope.shape[1]) / PRIOR**2


def _unlike(told: Array, found: Array, start: Array) -> float:
    """Huber's loss of the logarithms of told over taken, and what weights are off the assumed."""
    off = abs(np.log(told)) / NOISE
    far = np.where(off < FAR, off**2 / 2, FAR * off - FAR**2 / 2)
    return float(far.sum() + (((found - start) / PRIOR) ** 2).sum() / 2)


# -- weights of causes -----------------------------------------------------------------------------


def fitted(runs: Sequence[Timed], priors: Causes = NONE) -> dict[str, float]:
    """Most likely weights given runs: of relative errors, about `priors` (1 where none is given).

    Raises ValueError without a run, or where one took no time.
    """
    if not runs or min(took for _, took in runs) <= 0:
        raise ValueError(
            "there is nothing to fit to: runs that took more than 0 seconds are needed"
        )
    names, matrix = shares(runs)
    found = most_likely(lambda logs: matrix @ np.exp(logs), _start(names, priors))
    return dict(zip(names, np.exp(found.logs).tolist()))


def unlikelihood(runs: Sequence[Timed], weights: Causes, priors: Causes = NONE) -> float:
    """Negative logarithm of how likely runs are under weights, but for a number."""
    names, matrix = shares(runs)
    at = _start(names, weights)
    return _unlike(np.maximum(matrix @ np.exp(at), LEAST), at, _start(names, priors))


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
