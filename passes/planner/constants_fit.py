"""Fit of a price's constants to the times of measured runs, as a robust least-squares problem.

`runs` uses this file for `schedlang calibrate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PRIOR = 0.8  # standard deviation of a constant's logarithm about its assumed value
MAX_STEPS = 300  # maximal number of iterations: far more than a fit of hundreds of runs takes
NOISE = 0.03  # standard deviation of the logarithm of a run's time about the model's
HUBER_THRESHOLD = 1.5  # Huber's threshold, in units of NOISE: a run beyond weighs less (Huber 1964)
SLOPE_STEP = 1e-4  # finite difference of a logarithm, for slopes
# logarithms of constants -> predicted seconds of runs, as shares of measured seconds [runs]
Model = Callable[[Array], Array]


@dataclass(frozen=True)
class Fit:
    """The most likely constants.

    logs                 their logarithms; `deviations` the standard deviations of these
    log_errors           logarithm of predicted over measured seconds [runs]
    left_out_log_errors  `log_errors` of each run under a fit without that run, by linearisation at
                         the optimum (PRESS, Allen 1974)
    """

    logs: Array
    deviations: Array
    log_errors: Array
    left_out_log_errors: Array


def fit_constants(model: Model, start: Array) -> Fit:
    """Find the most likely constants, given relative errors of runs and a prior around `start`.

    Levenberg-Marquardt steps in logarithms keep constants above 0.  A constant that no run depends
    on keeps its assumed value.
    """
    logs, damping = start, 1e-2
    predicted = np.maximum(model(logs), MIN_SHARE)
    best_loss, slope = huber_loss(predicted, logs, start), _slope(model, logs, predicted)
    for _ in range(MAX_STEPS):
        if damping > 1e9:
            break
        weight, curve = _curve(slope, predicted)
        gradient = slope.T @ (weight * np.log(predicted) / NOISE) + (logs - start) / PRIOR**2
        step = np.linalg.solve(curve + damping * np.diag(np.diag(curve)), -gradient)
        tried = logs + np.clip(step, -1, 1)
        tried_shares = np.maximum(model(tried), MIN_SHARE)
        loss = huber_loss(tried_shares, tried, start)
        if not loss < best_loss - 1e-6:  # also rejects NaN
            damping *= 4
            continue
        logs, predicted, best_loss, damping = tried, tried_shares, loss, damping / 4
        slope = _slope(model, logs, predicted)
    weight, curve = _curve(slope, predicted)
    spread = np.linalg.inv(curve)
    leverage = weight * ((slope @ spread) * slope).sum(1)  # leverage of each run
    off = np.log(predicted)
    return Fit(logs, np.sqrt(np.diag(spread)), off, off / (1 - np.minimum(leverage, 1 - 1e-9)))


MIN_SHARE = 1e-9  # smallest share of measured seconds: causes that overlap may subtract more


def _slope(model: Model, values: Array, predicted: Array) -> Array:
    """Derivatives of errors by each constant [runs, constants]; by backward differences, since
    shares end at 1."""
    shares = [model(values - SLOPE_STEP * unit) for unit in np.eye(len(values))]
    log_shares = np.log(
        np.maximum(np.array(shares).reshape(len(values), len(predicted)), MIN_SHARE)
    )
    slopes: Array = (np.log(predicted) - log_shares).T / SLOPE_STEP / NOISE
    return slopes


def _curve(slope: Array, predicted: Array) -> tuple[Array, Array]:
    """Weights of runs (smaller for outliers), and the curvature of the negative log likelihood."""
    weight = np.minimum(1, HUBER_THRESHOLD / np.maximum(abs(np.log(predicted)) / NOISE, 1e-9))
    return weight, slope.T @ (weight[:, None] * slope) + np.eye(slope.shape[1]) / PRIOR**2


def huber_loss(predicted: Array, logs: Array, start: Array) -> float:
    """Huber's loss of the logarithms of predicted over measured seconds, plus the prior's
    penalty."""
    errors = abs(np.log(predicted)) / NOISE
    losses = np.where(
        errors < HUBER_THRESHOLD, errors**2 / 2, HUBER_THRESHOLD * errors - HUBER_THRESHOLD**2 / 2
    )
    return float(losses.sum() + (((logs - start) / PRIOR) ** 2).sum() / 2)
