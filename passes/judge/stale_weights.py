"""Explain a wrong loss of a later step: it is the loss of weights from before an optimizer's step.

Weights that are gathered, cast or copied once, and not again after a step, give such a loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import quote_names
from schedlang.passes.judge.dropout_masks import DropoutByMasks
from schedlang.passes.judge.step_draws import SeededSequential
from schedlang.passes.judge.trial import Trial
from schedlang.passes.verify.observe import Condition, Key, Observation
from schedlang.passes.verify.original import count_rows
from schedlang.passes.verify.proof_case import copy_original
from schedlang.report import Row
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes

MOST_TRIED = 64  # weights that are tried one by one
RTOL = 1e-9
Weights = Mapping[str, Tensor]


def explain_stale_weights(
    first_row: Row | None, expected: Observation, actual: Observation, trial: Trial
) -> Iterator[tuple[str, str]]:
    """Name the weights that a step computes with as they were before an earlier step.

    Nothing is said unless the first wrong thing is the loss of a later step, and the original with
    these weights gives this loss.
    """
    if first_row is None or first_row.kind != "loss" or not first_row.step:
        return
    value = actual.tensors.get(Key(*_moment(first_row), first_row.name))
    run = next(run for run in trial.conditions if run.name == first_row.condition)
    *earlier, current = _weights_by_step(first_row, expected, trial)
    if value is None or not current:
        return
    for step, weights in reversed([*enumerate(earlier)]):
        for names in _candidates(weights):
            stale = {name: weights[name] for name in names}
            loss = _loss(trial, run, first_row.step, {**current, **stale})
            if math.isclose(loss, float(value), rel_tol=RTOL):
                whole = len(names) == len(weights)
                what = "all weights" if whole else quote_names(names)
                text = (
                    f"step {first_row.step} computes with {what} as before step {step}: what is "
                    "gathered or copied is not renewed after the optimizer's step"
                )
                yield "loss", text
                return


def _moment(row: Row) -> tuple[str, str, int]:
    return row.condition, row.kind, row.step or 0


def _weights_by_step(row: Row, expected: Observation, trial: Trial) -> Iterator[Weights]:
    """Yield the original's weights before each step up to the row's."""
    module = trial.case.plan.model.model
    yield {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    for step in range(row.step or 0):
        moment = row.condition, "parameters", step
        values = {k.name: v for k, v in expected.tensors.items() if k[:3] == moment}
        yield {name: value for name, value in values.items() if value is not None}


def _candidates(weights: Weights) -> Iterator[Sequence[str]]:
    """Yield names of weights that may be stale: all, then each."""
    yield [*weights]
    if len(weights) <= MOST_TRIED:
        yield from ([name] for name in weights)


def _loss(trial: Trial, run: Condition, step: int, weights: Weights) -> float:
    """Return the original's loss in a step, computed with the given weights."""
    module = copy_original(trial.case)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(weights.get(name, p))
    loss = trial.case.loss
    original = SeededSequential(module, loss=loss, evaluate=run.evaluate, follow=False, step=step)
    batch = run.batches[step]
    with enter_modes(Float64(), DropoutByMasks(trial.drops.seed, trial.drops.off)):
        return float(original.forward_backward(batch, range(count_rows(batch))))
