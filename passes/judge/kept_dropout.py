"""Dropout whose part of the whole is not known: both sides keep every element, and only scale.

Keeping every element is one of the draws of a dropout, and needs no places. So a program whose
dropout is elsewhere than the original's, but has the same effect, has the original's gradients
then. Other gradients show that dropout is at another place, has another rate, or is missing.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from schedlang.passes.judge.dropout_masks import DropoutByMasks
from schedlang.passes.judge.explanations import DROPOUT
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.simulated_step import original_loop
from schedlang.passes.judge.step_draws import SeededSequential
from schedlang.passes.judge.subject import ProgramSubject
from schedlang.passes.judge.trial import RankTask, Trial
from schedlang.passes.verify.observe import Condition, Observation, observe
from schedlang.passes.verify.proof_case import copy_original
from schedlang.report import Row
from schedlang.runtime.comm import world as comm
from schedlang.runtime.modes import enter_modes

RTOL = 1e-6
ELSEWHERE = (
    "if both sides keep every element, and only scale by 1 / (1 - p), {} are not the original's: "
    "dropout is at another place, has another rate, or is missing"
)


class KeptDropout(DropoutByMasks):
    """Mode that keeps every element of each dropout, and scales it."""

    def next_place(self, tensors: Sequence[Tensor]) -> tuple[str, int, Tensor | None] | None:
        """See `DropoutByMasks`."""
        return "", 0, None

    def keep(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        """See Draw."""
        return torch.ones(tuple(shape), dtype=torch.bool, device=device)


def kept_rows(trial: Trial, condition: Condition, record: RunRecord) -> Iterator[Row]:
    """Yield a failing row for each module of ranks with dropout of an unknown part, if a step in
    which nothing is dropped, but all of it is scaled, has other gradients than the original's.

    `condition` is the first one with the program's own optimizer.
    """
    sites, others = record.dropout_sites, {site for site, _ in trial.drops.others}
    if not trial.float64 or not sites.unknown or sites.others - others:
        return
    run = trial.of_step(trial.conditions[0], 0)
    actual: Observation = run.run_on_ranks(_step_kept)[0]

    def make(run: Condition) -> SeededSequential:
        return original_loop(record)(
            copy_original(trial.case), run.optimizer, loss=trial.case.loss, follow=False
        )

    with enter_modes(*trial.modes[:-1], KeptDropout(trial.drops.seed, frozenset())):
        batches = run.conditions[0].batches
        expected = observe(make, [Condition(condition.name, condition.optimizer, batches)])
    off = [kind for kind in ("loss", "gradients") if not _equal(actual, expected, kind)]
    if off:
        note = ELSEWHERE.format(" and ".join(off))
        for site in sorted(sites.unknown):
            yield Row("", DROPOUT, site or "the model", 1.0, 0.0, False, None, note)


def _equal(actual: Observation, expected: Observation, kind: str) -> bool:
    """Return whether all values of a kind together are equal but for roundings."""
    values = {key.name: value for key, value in actual.tensors.items() if key.kind == kind}
    off = size = 0.0
    for key, right in expected.tensors.items():
        value = values.get(key.name)
        if key.kind == kind and right is not None and value is not None:
            off += float((value.double() - right.double()).square().sum())
            size += float(right.double().square().sum())
    return math.isnan(off) or off <= RTOL**2 * size


def _step_kept(task: RankTask) -> Observation | None:
    """Train one step on a rank, in which each dropout keeps everything."""
    lines = contextlib.redirect_stdout(sys.stderr) if task.quiet else contextlib.nullcontext()
    mode = KeptDropout(task.drops.seed, frozenset())
    with lines, torch.compiler.set_stance("force_eager"), enter_modes(*task.modes, mode):
        seen = observe(
            lambda condition: ProgramSubject(task.make, task.original, condition, RunRecord()),
            task.conditions,
            keep=comm.rank() == 0,
        )
    return seen if comm.rank() == 0 else None
