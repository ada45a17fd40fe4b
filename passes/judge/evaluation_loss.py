"""The loss that a program reports in evaluation, against the original's in eval mode."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Refusal, kind_of
from schedlang.passes.judge.dropout_masks import IN_EVALUATION, DropoutByMasks, WithoutDropout
from schedlang.passes.judge.explanations import DROPOUT
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.step_draws import SeededSequential
from schedlang.passes.judge.subject import ProgramSubject
from schedlang.passes.judge.trial import RankTask, Trial
from schedlang.passes.verify.observe import Batch, Condition
from schedlang.passes.verify.original import count_rows
from schedlang.passes.verify.proof_case import copy_original
from schedlang.report import Row
from schedlang.runtime.comm import world as comm
from schedlang.runtime.modes import enter_modes

EVALUATION = "evaluation loss"
RTOL = 1e-9
_NONE_REPORTED = "no rank reports one"


def evaluation_loss_rows(trial: Trial, record: RunRecord) -> Iterator[Row]:
    """Yield a row for each batch: whether ranks report the original's loss in eval mode.

    Only in float64, with the initial weights.
    """
    if not trial.float64 or "evaluate_loss" not in record.offers:
        return
    batches = _batches(trial.conditions)
    results: list[tuple[Sequence[float | None], set[str]]] = trial.run_on_ranks(_evaluate)
    by_rank = [losses for losses, _ in results]
    dropping = sorted({name for _, sites in results for name in sites})
    if dropping and not trial.drops_in_evaluation():
        note = IN_EVALUATION.replace("`evaluate`", "`evaluate_loss`")
        yield from (Row("", DROPOUT, n, math.inf, 0.0, False, None, note) for n in dropping)
    for number, (batch, *values) in enumerate(zip(batches, *by_rank)):
        reported = {rank: v for rank, v in enumerate(values) if v is not None}
        right = _original_loss(trial, batch)
        errors = [abs(value - right) for value in reported.values()]
        error = max(errors, default=math.inf) / max(abs(right), 1e-300)
        ok = error <= RTOL
        note = "" if ok else _describe(trial, batch, reported, right)
        yield Row("", EVALUATION, f"batch {number}", error, RTOL, ok, None, note)


def explain_evaluation(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Describe the first wrong loss."""
    for row in [row for row in rows if row.kind == EVALUATION and not row.ok][:1]:
        yield EVALUATION, f"{row.name}: {row.note}"


def _batches(conditions: Sequence[Condition]) -> list[Batch]:
    """Return the batches of all conditions, each once."""
    return list({id(batch): batch for run in conditions for batch in run.batches}.values())


def _original_loss(trial: Trial, batch: Batch) -> float:
    with enter_modes(*trial.modes[:-1], WithoutDropout()):
        original = SeededSequential(
            copy_original(trial.case), loss=trial.case.loss, evaluate=True, follow=False
        )
        return float(original.forward_backward(batch, range(count_rows(batch))))


def _describe(trial: Trial, batch: Batch, reported: Mapping[int, float], right: float) -> str:
    """Describe wrong losses: the plain mean of those of ranks' rows, or their numbers."""
    values = {f"{value:.6g}" for value in reported.values()}
    if not values:
        return _NONE_REPORTED
    text = f"{', '.join(sorted(values))} instead of {right:.6g}"
    if len(values) == 1 and count_rows(batch) >= trial.world:
        parts = [_original_loss(trial, part) for part in _parts(batch, trial.world)]
        if math.isclose(math.fsum(parts) / len(parts), next(iter(reported.values())), rel_tol=1e-6):
            text += (
                ": the plain mean of what the ranks' rows give by themselves; divide the sum of all"
                " losses by the count of all labels (or rows)"
            )
    return text


def _parts(batch: Batch, world: int) -> Iterator[Batch]:
    """Yield the rows of each rank, as `chunk` splits them."""
    count = count_rows(batch)
    for rows in torch.arange(count).chunk(world):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        yield {
            name: v[part] if isinstance(v, Tensor) and v.dim() and len(v) == count else v
            for name, v in batch.items()
        }


def _evaluate(task: RankTask) -> tuple[list[float | None], set[str]]:
    """Return the losses that this rank reports, by batch, and the modules that would drop."""
    lines = contextlib.redirect_stdout(sys.stderr) if task.quiet else contextlib.nullcontext()
    dropout = DropoutByMasks(task.drops.seed, task.drops.off)
    modes = enter_modes(*task.modes, dropout)
    with lines, torch.compiler.set_stance("force_eager"), modes:
        subject = ProgramSubject(task.make, task.original, task.conditions[0], RunRecord())
        losses = [
            _number(subject.evaluate("evaluate_loss", batch), comm.rank())
            for batch in _batches(task.conditions)
        ]
    return losses, {subject.original_module(site) or site for site in dropout.evaluated}


def _number(value: object, rank: int) -> float | None:
    """Return a reported loss; refuse (S766) what is no number."""
    if value is None:
        return None
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    if isinstance(value, int | float) or getattr(value, "numel", lambda: 0)() == 1:
        return float(value)  # type: ignore[arg-type]
    message = f"`evaluate_loss` returns {kind_of(value)} on rank {rank}, not a number"
    helps = ("return the loss of the full batch, or None where the rank has none",)
    raise Refusal.of("S766", message, helps=helps)
