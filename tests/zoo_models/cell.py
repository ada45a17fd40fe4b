"""One cell of the table: a model under a schedule, on ranks that are threads, and the original."""

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

_NAMED = re.compile(r"[\w.]+(Error|Exception|Mismatch|Deadlock|Hang)\b")  # ends a traceback
STATISTICS = ("S668", "S703", "S708")  # refusals that `relax(batch_stats)` answers


@dataclass(frozen=True)
class Verdict:
    """What came of a cell: `verified`, `refused` or `failed`; why, its rows and seconds."""

    kind: str
    mesh: str
    status: str
    why: str = ""
    rows: int = 0
    seconds: float = 0.0
    worst: float = 0.0
    schedule: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def judged(subject: Subject, mesh: str, pool: Any = None) -> Verdict:
    """The verdict of a cell; nothing is raised but what ends the process."""
    start, text = time.perf_counter(), ""
    try:
        text = meshes.schedule(subject.model, subject.batches[0], mesh)
        status, why, worst, text = _proven(subject, text, pool)
    except Exception as error:
        status, why, worst = *reason(error), 0.0
    spent = round(time.perf_counter() - start, 2)
    rows = meshes.rows(text) if text else 0
    return Verdict(subject.kind, mesh, status, why, rows, spent, worst, text)


def _proven(subject: Subject, text: str, pool: Any) -> tuple[str, str, float, str]:
    """Status, why, the largest error, and the schedule as it was proven."""
    try:
        found = compared(subject.model, text, subject.batches, pool)
    except Refusal as refusal:
        if refusal.diagnostics[0].code not in STATISTICS:
            raise
        text = meshes.relaxed(text)
        found = compared(subject.model, text, subject.batches, pool)
    bad = [row for row in found if not row.ok]
    worst = max((row.error for row in found if row.ok), default=0.0)
    if not bad:
        return "verified", "relax(batch_stats)" if "relax(" in text else "", worst, text
    first = bad[0]
    said = f"{first.kind} {first.name} {first.error:.1e} {first.note}".strip()
    return "failed", f"{len(bad)} of {len(found)} differ: {said}", bad[0].error, text


def compared(
    model: nn.Module, text: str, batches: tuple[Mapping[str, Any], ...], pool: Any = None
) -> tuple[Row, ...]:
    """Outputs, loss, every gradient, and parameters after a step for each batch, in float64."""
    plan = Schedule(model, parse(Source("init.sched", text)), Settings()).plan()
    case = randomised_float64(prepare_case(Case(plan, tuple(batches), dtype="none")))
    case = check_parts(case)
    modes, _ = proof_modes(case)
    with enter_modes(*modes):
        norm = Sequential(copy_original(case)).gradient_norm(case.batches[0])
    # clipped: one rank's norm in place of the whole one would show
    told = [replace(standard_conditions(case.batches, norm)[0], clip=norm / 2)]
    expected, _ = run_original(case, told)
    with nullcontext(pool) if pool else Threads() as ranks:
        seen = ranks.run(observe_on_rank, plan.mesh.world, case, told)[0]
    return compare(expected, seen)


def reason(error: Exception) -> tuple[str, str]:
    """Status and reason of what ended a cell."""
    if isinstance(error, Refusal):
        first = error.diagnostics[0]
        notes = "; ".join(first.notes)
        return "refused", _line(
            f"{first.code} {first.title} ({notes})" if notes else f"{first.code} {first.title}"
        )
    if isinstance(error, Hang):
        return "failed", _line(f"hang: {error}")
    if isinstance(error, RankDied):
        lines = [line for line in str(error).split("\n") if _NAMED.match(line)]
        return "failed", _line(f"rank died: {lines[-1] if lines else error}")
    frames = traceback.extract_tb(error.__traceback__)
    at = next((f for f in reversed(frames) if "schedlang" in f.filename), frames[-1])
    name = at.filename.rpartition("/")[2]
    return "failed", _line(f"{type(error).__name__}: {error} (at {name}:{at.lineno})")


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
