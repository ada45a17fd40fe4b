"""One drawn schedule, planned and, where it is not refused, compared with its original."""

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
from tests.drawn.models import NAMES, Subject, subject
from tests.drawn.rows import drawn

PASSED, REFUSED, FAILED = "passed", "refused", "failed"
BROKEN, LATE, ABSENT = "traceback", "time-out", "not installed"
LIMIT = 300.0  # seconds until nobody waits for the ranks any longer
OURS = ("S999",)  # refusals that speak of a mistake of our own


@dataclass(frozen=True)
class Outcome:
    """What came of a drawn schedule; `why` is the code of a refusal, or what differs or broke."""

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
    """The model of this number: all of them in turn."""
    return NAMES[number % len(NAMES)]


def case_of(one: Subject, text: str, seed: int) -> Case:
    """The plan of a text, and the batches of a proof."""
    plan = Schedule(one.model(), parse(Source("drawn.sched", text)), Settings()).plan()
    batches = tuple(one.batch(seed + step) for step in range(STEPS))
    return Case(plan, batches, one.loss, one.weight, seed)


def checked_case(one: Subject, text: str, seed: int) -> Case:
    """The same in float64, traced, with the original checked alone; raises Refusal."""
    return check_parts(own_float64(prepare_case(case_of(one, text, seed))))


def quick(case: Case, ranks: Any) -> Sequence[Row]:
    """Every comparison of float64 after one step of one optimizer, on one batch."""
    case = randomised_float64(prepare_case(replace(case, batches=case.batches[:1], dtype="none")))
    case = check_parts(case)
    modes, _ = proof_modes(case)
    with enter_modes(*modes):
        norm = Sequential(copy_original(case), loss=case.loss).gradient_norm(case.batches[0])
    told = standard_conditions(case.batches, norm)[:1]
    expected, _ = run_original(case, told)
    actual = ranks.run(observe_on_rank, case.plan.mesh.world, case, told, timeout=LIMIT)[0]
    return compare(expected, actual, exact=not case.plan.gives_up and not case.by_parts)


def whole(case: Case, ranks: Any) -> Sequence[Row]:
    """The whole proof, as `verify` makes it."""
    return prove(case, pool=ranks).rows


def judged(
    number: int, seed: int, ranks: Any, form: str = "quick", text: str = "", name: str = ""
) -> Outcome:
    """What comes of the schedule of this number, or of another text or model; raises nothing."""
    name, start = name or model_of(number), time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = text or drawn(name, number, seed)
            kind, why = _compared(subject(name), text, seed, ranks, form)
    except ImportError as error:
        kind, why = ABSENT, str(error)
    except Exception as error:
        kind, why = _raised(error)
    spent = round(time.perf_counter() - start, 2)
    return Outcome(number, seed, name, kind, why, form, spent, text)


def _compared(one: Subject, text: str, seed: int, ranks: Any, form: str) -> tuple[str, str]:
    rows = (whole if form == "whole" else quick)(case_of(one, text, seed), ranks)
    bad = [row for row in rows if not row.ok]
    if not bad:
        return PASSED, ""
    said = "; ".join(
        f"{r.condition}: {r.kind} {r.name} (step {r.step}) {r.error:.1e} {r.note}" for r in bad[:3]
    )
    return FAILED, f"{len(bad)} of {len(rows)}: {said}"


def _raised(error: Exception) -> tuple[str, str]:
    if isinstance(error, Refusal):
        code, title = error.diagnostic.code, error.diagnostic.title
        return BROKEN if code in OURS else REFUSED, f"{code} {title}"
    if isinstance(error, Hang):
        return LATE, str(error)[:2000]
    return BROKEN, "".join(traceback.format_exception(error))[-4000:]
