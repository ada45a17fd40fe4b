"""Judge one random schedule: plan it and, unless it is refused, compare it with the original."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.prove import prove
from schedlang.passes.verify.compare import compare
from schedlang.passes.verify.observe import standard_conditions
from schedlang.passes.verify.original import Sequential
from schedlang.passes.verify.probe import check_parts
from schedlang.passes.verify.proof_case import (
    Case,
    copy_original,
    observe_on_rank,
    own_float64,
    prepare_case,
    proof_modes,
    randomised_float64,
    run_original,
)
from schedlang.passes.verify.requirements import STEPS
from schedlang.report import Row
from schedlang.runtime.launch.rank_job import Hang
from schedlang.runtime.modes import enter_modes
from schedlang.schedule import Schedule
from tests.drawn.models import NAMES, Subject, load_subject
from tests.drawn.rows import draw_schedule

PASSED, REFUSED, FAILED = "passed", "refused", "failed"
BROKEN, LATE, ABSENT = "traceback", "time-out", "not installed"
LIMIT = 300.0  # time limit of ranks in seconds
INTERNAL_CODES = ("S999",)  # refusals that report an internal error


@dataclass(frozen=True)
class Outcome:
    """The outcome of a drawn schedule; `why`: the code of a refusal, a difference or an error."""

    number: int
    seed: int
    model: str
    kind: str
    why: str = ""
    form: str = ""
    seconds: float = 0.0
    text: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def model_of(number: int) -> str:
    """Return the model name of a number: all models in turn."""
    return NAMES[number % len(NAMES)]


def case_of(tested_model: Subject, text: str, seed: int) -> Case:
    """Return the proof case of a schedule text."""
    plan = Schedule(tested_model.model(), parse(Source("drawn.sched", text)), Settings()).plan()
    batches = tuple(tested_model.batch(seed + step) for step in range(STEPS))
    return Case(plan, batches, tested_model.loss, tested_model.weight, seed)


def checked_case(tested_model: Subject, text: str, seed: int) -> Case:
    """Return the proof case in float64, traced, with the original checked; raises Refusal."""
    return check_parts(own_float64(prepare_case(case_of(tested_model, text, seed))))


def one_step_proof(case: Case, ranks: Any) -> Sequence[Row]:
    """Compare everything in float64 after one step of one optimizer on one batch."""
    case = randomised_float64(prepare_case(replace(case, batches=case.batches[:1], dtype="none")))
    case = check_parts(case)
    modes, _ = proof_modes(case)
    with enter_modes(*modes):
        norm = Sequential(copy_original(case), loss=case.loss).gradient_norm(case.batches[0])
    conditions = standard_conditions(case.batches, norm)[:1]
    expected, _ = run_original(case, conditions)
    actual = ranks.run(observe_on_rank, case.plan.mesh.world, case, conditions, timeout=LIMIT)[0]
    return compare(expected, actual, exact=not case.plan.gives_up and not case.by_parts)


def full_proof(case: Case, ranks: Any) -> Sequence[Row]:
    """Run the full proof of `verify`."""
    return prove(case, pool=ranks).rows


def judge_schedule(
    number: int, seed: int, ranks: Any, form: str = "quick", text: str = "", name: str = ""
) -> Outcome:
    """Return the outcome of a number's schedule, or of another text or model; raises nothing."""
    name, start = name or model_of(number), time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = text or draw_schedule(name, number, seed)
            kind, reason = _compare(load_subject(name), text, seed, ranks, form)
    except ImportError as error:
        kind, reason = ABSENT, str(error)
    except Exception as error:
        kind, reason = _error_outcome(error)
    seconds = round(time.perf_counter() - start, 2)
    return Outcome(number, seed, name, kind, reason, form, seconds, text)


def _compare(tested_model: Subject, text: str, seed: int, ranks: Any, form: str) -> tuple[str, str]:
    rows = (full_proof if form == "whole" else one_step_proof)(
        case_of(tested_model, text, seed), ranks
    )
    failed = [row for row in rows if not row.ok]
    if not failed:
        return PASSED, ""
    summary = "; ".join(
        f"{r.condition}: {r.kind} {r.name} (step {r.step}) {r.error:.1e} {r.note}"
        for r in failed[:3]
    )
    return FAILED, f"{len(failed)} of {len(rows)}: {summary}"


def _error_outcome(error: Exception) -> tuple[str, str]:
    if isinstance(error, Refusal):
        code, title = error.diagnostic.code, error.diagnostic.title
        return BROKEN if code in INTERNAL_CODES else REFUSED, f"{code} {title}"
    if isinstance(error, Hang):
        return LATE, str(error)[:2000]
    return BROKEN, "".join(traceback.format_exception(error))[-4000:]
