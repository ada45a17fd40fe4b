"""Constants of a price, fitted to measured runs: any of which times of runs follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

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
    least, slope = unlike(told, found, start), _slope(model, found, told)
    for _ in range(STEPS):
        if damping > 1e9:
            break
        weight, curve = _curve(slope, told)
        down = slope.T @ (weight * np.log(told) / NOISE) + (found - start) / PRIOR**2
        step = np.linalg.solve(curve + damping * np.diag(np.diag(curve)), -down)
        tried = found + np.clip(step, -1, 1)
        new = np.maximum(model(tried), LEAST)
        now = unlike(new, tried, start)
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


def unlike(told: Array, found: Array, start: Array) -> float:
    """Huber's loss of the logarithms of told over taken, and what weights are off the assumed."""
    off = abs(np.log(told)) / NOISE
    far = np.where(off < FAR, off**2 / 2, FAR * off - FAR**2 / 2)
    return float(far.sum() + (((found - start) / PRIOR) ** 2).sum() / 2)
