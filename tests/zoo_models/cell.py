"""One cell of the table: a model under a schedule on rank threads, compared with the original."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.verify.compare import compare
from schedlang.passes.verify.observe import standard_conditions
from schedlang.passes.verify.original import Sequential
from schedlang.passes.verify.probe import check_parts
from schedlang.passes.verify.proof_case import (
    Case,
    copy_original,
    observe_on_rank,
    prepare_case,
    proof_modes,
    randomised_float64,
    run_original,
)
from schedlang.report import Row
from schedlang.runtime.launch.rank_job import Hang, RankDied
from schedlang.runtime.modes import enter_modes
from schedlang.schedule import Schedule
from tests.engine import Threads
from tests.zoo_models import meshes
from tests.zoo_models.cases import Subject

_ERROR_LINE = re.compile(
    r"[\w.]+(Error|Exception|Mismatch|Deadlock|Hang)\b"
)  # last line of a traceback
STATISTICS = ("S668", "S703", "S708")  # refusals that `relax(batch_stats)` avoids


@dataclass(frozen=True)
class Verdict:
    """The result of a cell: `verified`, `refused` or `failed`, the reason, rows and seconds."""

    kind: str
    mesh: str
    status: str
    why: str = ""
    rows: int = 0
    seconds: float = 0.0
    worst: float = 0.0
    schedule: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


def judge_cell(subject: Subject, mesh: str, pool: Any = None) -> Verdict:
    """Return the verdict of a cell; exceptions become verdicts."""
    start, text = time.perf_counter(), ""
    try:
        text = meshes.schedule(subject.model, subject.batches[0], mesh)
        status, why, worst, text = _run_proof(subject, text, pool)
    except Exception as error:
        status, why, worst = *failure_reason(error), 0.0
    seconds = round(time.perf_counter() - start, 2)
    rows = meshes.count_rows(text) if text else 0
    return Verdict(subject.kind, mesh, status, why, rows, seconds, worst, text)


def _run_proof(subject: Subject, text: str, pool: Any) -> tuple[str, str, float, str]:
    """Return status, reason, largest error, and the schedule that was proven."""
    try:
        rows = compare_to_original(subject.model, text, subject.batches, pool)
    except Refusal as refusal:
        if refusal.diagnostics[0].code not in STATISTICS:
            raise
        text = meshes.relax_statistics(text)
        rows = compare_to_original(subject.model, text, subject.batches, pool)
    failed = [row for row in rows if not row.ok]
    worst = max((row.error for row in rows if row.ok), default=0.0)
    if not failed:
        return "verified", "relax(batch_stats)" if "relax(" in text else "", worst, text
    failure = failed[0]
    summary = f"{failure.kind} {failure.name} {failure.error:.1e} {failure.note}".strip()
    return "failed", f"{len(failed)} of {len(rows)} differ: {summary}", failed[0].error, text


def compare_to_original(
    model: nn.Module, text: str, batches: tuple[Mapping[str, Any], ...], pool: Any = None
) -> tuple[Row, ...]:
    """Compare outputs, loss, gradients and updated parameters for each batch, in float64."""
    plan = Schedule(model, parse(Source("init.sched", text)), Settings()).plan()
    case = randomised_float64(prepare_case(Case(plan, tuple(batches), dtype="none")))
    case = check_parts(case)
    modes, _ = proof_modes(case)
    with enter_modes(*modes):
        norm = Sequential(copy_original(case)).gradient_norm(case.batches[0])
    # with clipping, a local norm in place of the global one becomes visible
    conditions = [replace(standard_conditions(case.batches, norm)[0], clip=norm / 2)]
    expected, _ = run_original(case, conditions)
    with nullcontext(pool) if pool else Threads() as ranks:
        actual = ranks.run(observe_on_rank, plan.mesh.world, case, conditions)[0]
    return compare(expected, actual)


def failure_reason(error: Exception) -> tuple[str, str]:
    """Return status and reason for the error that ended a cell."""
    if isinstance(error, Refusal):
        diagnostic = error.diagnostics[0]
        notes = "; ".join(diagnostic.notes)
        return "refused", _one_line(
            f"{diagnostic.code} {diagnostic.title} ({notes})"
            if notes
            else f"{diagnostic.code} {diagnostic.title}"
        )
    if isinstance(error, Hang):
        return "failed", _one_line(f"hang: {error}")
    if isinstance(error, RankDied):
        lines = [line for line in str(error).split("\n") if _ERROR_LINE.match(line)]
        return "failed", _one_line(f"rank died: {lines[-1] if lines else error}")
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if "schedlang" in f.filename), frames[-1])
    name = frame.filename.rpartition("/")[2]
    return "failed", _one_line(f"{type(error).__name__}: {error} (at {name}:{frame.lineno})")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
