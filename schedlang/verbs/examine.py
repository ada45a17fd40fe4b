"""The examinations of one schedule in CI: check, lock, static proofs, verification.

Used by `schedlang ci` and the pytest plugin.
"""

from __future__ import annotations

import math
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.annotate import Note, table
from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.diagnostics.tables import DEFAULT_COLUMNS
from schedlang.verbs.exits import FAILS, HOLDS, REFUSED, UNCHECKED

if TYPE_CHECKING:
    from schedlang.ir.modelfile import ModelFile
    from schedlang.report import Report
    from schedlang.runtime.launch.pool import Pool
    from schedlang.verbs.lockfile import LockComparison


CHECK, LOCK, STATIC, VERIFY = "check", "lock", "static", "verify"
WORDS = {HOLDS: "holds", FAILS: "fails", REFUSED: "refused", UNCHECKED: "could not be checked"}
_MARKS = {HOLDS: "", FAILS: "❌ ", REFUSED: "❌ ", UNCHECKED: "⚠️ "}


@dataclass(frozen=True)
class ProofTerms:
    """The terms of an examination of a schedule; see the options of `verify`.

    world    the maximal number of ranks to start; a larger mesh is skipped, with a message
    shrink   reduce model and mesh where the mesh is larger, instead of skipping
    refused  the code with which the schedule must be refused; "" if it must not be
    timeout  seconds for a proof that runs; a longer one counts as not checked
    """

    model: str | None = None
    knobs: tuple[str, ...] = ()
    mesh: str | None = None
    seed: int = 0
    dtype: str | None = None
    world: int = 8
    shrink: bool = False
    refused: str = ""
    timeout: float | None = None


@dataclass(frozen=True)
class Outcome:
    """The answer to one question about one schedule.

    code     an exit code: 0 holds, 1 does not hold, 2 refused, 3 could not be checked
    skipped  why the question was skipped, if it was; then `code` has no meaning
    """

    file: Path
    question: str
    code: int = HOLDS
    text: str = ""
    line: int = 0  # of `place`
    place: str = ""  # the file of the line, where it is not the schedule itself
    skipped: str = ""
    report: Report | None = field(default=None, repr=False)
    facts: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0

    @property
    def word(self) -> str:
        """The outcome in a word or two."""
        return "left out" if self.skipped else WORDS[self.code]

    @property
    def where(self) -> str:
        """The place as `file:line`."""
        return f"{self.place or self.file}:{self.line or 1}"

    @property
    def note(self) -> Note | None:
        """The annotation for the schedule's line; None if the schedule holds."""
        if self.skipped or self.code == HOLDS:
            return None
        title = "schedlang equivalence" if self.question == VERIFY else f"schedlang {self.question}"
        return Note(self.place or str(self.file), self.line or 1, title, self.text)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "file": str(self.file),
            "question": self.question,
            "outcome": self.word,
            "exit": UNCHECKED if self.skipped else self.code,
            "where": self.where,
            "text": self.skipped or self.text,
            "seconds": round(self.seconds, 2),
            "note": None if self.note is None else asdict(self.note),
            **dict(self.facts),
        }


def summary(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Format outcomes (as JSON values) as a Markdown table."""
    head = ("schedule", "", "outcome", "largest relative error", "mesh", "where", "seconds")
    rows = [
        (
            f"`{outcome['file']}`",
            outcome["question"],
            _MARKS[outcome["exit"]] + outcome["outcome"],
            outcome.get("max_rel_err", ""),
            outcome.get("mesh", ""),
            "" if outcome["exit"] == HOLDS else f"`{outcome['where']}`",
            f"{outcome['seconds']:.1f}",
        )
        for outcome in outcomes
    ]
    return f"### schedlang\n\n{table(head, rows)}\n"


_PLACE = re.compile(r"(.+?):(\d+): ")


class RankPool:
    """Warm local ranks for one model file at a time, shared by consecutive schedules."""

    def __init__(self) -> None:
        self._key: object = None
        self._found: ModelFile | None = None
        self._pool: Pool | None = None

    def model_file(self, model: str | None, schedule: Path) -> ModelFile:
        """Return the model file of a schedule; import it anew unless it was the last one."""
        from schedlang.ir.modelfile import load_model_file, model_beside

        key = model or str(model_beside(schedule).resolve())
        if key != self._key or self._found is None:
            self.close()
            self._found = load_model_file(model, schedule)
            self._key = key
        sys.modules[self._found.name] = self._found.module  # another module may have taken the name
        return self._found

    def pool(self) -> Pool:
        """Return ranks that have loaded the model file."""
        from schedlang.runtime.launch.forkserver import BASE_MODULES, PROGRAM_MODULES
        from schedlang.runtime.launch.pool import Pool

        assert self._found is not None, "the ranks belong to a model file"
        if self._pool is None:
            self._pool = Pool(preload=(*BASE_MODULES, *PROGRAM_MODULES), files=self._found.files)
        return self._pool

    def end_ranks(self) -> None:
        """End the ranks, but keep the model file."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def close(self) -> None:
        """End the ranks and drop the model file."""
        self.end_ranks()
        self._key = self._found = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def is_library(file: Path) -> bool:
    """Return whether a file only defines what others use, and so has nothing to verify; may
    refuse."""
    return first_row(file) == 0


def first_row(file: Path) -> int:
    """Return the line of the first step or row of a schedule, 0 if there is none; may refuse."""
    from schedlang.language import nodes as n
    from schedlang.language.syntax import parse, read
    from schedlang.passes.elaborate.base_schedules import is_base

    rows = (n.Step, n.At, n.When, n.Rule, n.Do)
    lines = (
        item.span.line
        for item in parse(read(file)).items
        if isinstance(item, rows) or isinstance(item, n.Use) and is_base(item)
    )
    return next(lines, 0)


def check(file: Path, terms: ProofTerms) -> Outcome:
    """Check syntax, names, domains and arguments without a model; the text has the warnings."""

    def ask(outcome: Outcome) -> Outcome:
        from schedlang.verbs.inputs import parse_settings
        from schedlang.verbs.quick_check import collect_warnings

        warnings = collect_warnings([file], parse_settings(terms.knobs, terms.mesh))
        return replace(
            outcome, text="\n\n".join(diagnostic.render(DEFAULT_COLUMNS) for diagnostic in warnings)
        )

    outcome = _answer(Outcome(file, CHECK), ask)
    # most mistakes show only with the model: a check that holds is no answer yet
    return _check_refusal(outcome, terms.refused) if terms.refused and outcome.code else outcome


def lock(file: Path, terms: ProofTerms) -> Outcome:
    """Compare the model and the schedule with the lock file."""

    def ask(outcome: Outcome) -> Outcome:
        from schedlang.verbs.lockfile import compare_lock

        compared: LockComparison = compare_lock(file, terms.model)
        code = FAILS if compared.changes else HOLDS
        return replace(outcome, code=code, text=str(compared))

    return _answer(Outcome(file, LOCK), ask)


def static(file: Path, terms: ProofTerms) -> Outcome:
    """Plan the schedule for its model, and prove what can be proven without running."""

    def ask(outcome: Outcome) -> Outcome:
        from schedlang.passes.static_checks.static import static as proofs
        from schedlang.verbs.inputs import plan_schedule

        planned = plan_schedule(file, terms.model, terms.knobs, terms.mesh)
        batch = planned.model.batch(terms.seed)
        proven = proofs(planned.plan, batch, planned.model.loss, planned.model.weight)
        lines = [f"{claim.name}: {claim.description}: {claim.verdict}" for claim in proven.claims]
        if proven.problems:
            return _refused_outcome(
                outcome, proven.problems, Refusal(*proven.problems).render(DEFAULT_COLUMNS)
            )
        code = HOLDS if all(claim.checked for claim in proven.claims) else UNCHECKED
        return replace(outcome, code=code, text="\n".join(lines))

    outcome = _answer(Outcome(file, STATIC), ask)
    return _check_refusal(outcome, terms.refused) if terms.refused and outcome.code else outcome


def verify(file: Path, terms: ProofTerms, ranks: RankPool) -> Outcome:
    """Prove that the schedule computes what its model computes, or is refused as required."""

    def ask(outcome: Outcome) -> Outcome:
        from schedlang.runtime.launch.pool import Hang, RankDied
        from schedlang.runtime.launch.rank_job import limit_time

        try:
            with limit_time(terms.timeout):
                return _run_verify(outcome, terms, ranks)
        except (RankDied, Hang) as failure:
            return replace(outcome, code=UNCHECKED, text=str(failure))

    outcome = _answer(Outcome(file, VERIFY), ask)
    return _check_refusal(outcome, terms.refused) if terms.refused else outcome


def _run_verify(outcome: Outcome, terms: ProofTerms, ranks: RankPool) -> Outcome:
    from schedlang.passes.prove import prove
    from schedlang.passes.reduce_model.shrink import with_reduction
    from schedlang.verbs.inputs import make_proof_case, parse_settings

    file, settings = outcome.file, parse_settings(terms.knobs, terms.mesh)
    model_file = ranks.model_file(terms.model, file)
    options: dict[str, Any] = {"model": terms.model, "seed": terms.seed, "dtype": terms.dtype}
    case = make_proof_case(file, model_file, settings, **options)
    if case.case.plan.mesh.world > terms.world and terms.shrink:
        case = make_proof_case(file, model_file, settings, **options, shrink=True)
    mesh = case.case.plan.mesh
    if mesh.world > terms.world:
        limit_text = f"the mesh {mesh} has {mesh.world} ranks, at most {terms.world} are started"
        return replace(outcome, skipped=limit_text)
    proof = prove(case.case, pool=ranks.pool(), title=file.name, command=case.command)
    report = with_reduction(proof, case.small)
    path, line = _first_blamed(report)
    reduced = (("reduced", case.small.description),) if case.small is not None else ()
    return replace(
        outcome,
        code=report.exit_code,
        text=str(report),
        report=report,
        line=line,
        place=path,
        facts=(*_report_facts(report, terms, str(mesh)), *reduced),
    )


def _first_blamed(report: Report) -> tuple[str, int]:
    """Return file and line of the first row to blame."""
    match = _PLACE.match(report.blamed[0]) if report.blamed else None
    return (match[1], int(match[2])) if match else ("", 0)


def _report_facts(report: Report, terms: ProofTerms, mesh: str) -> list[tuple[str, str]]:
    """Return the facts of a report for the JSON output."""
    path, line = _first_blamed(report)
    worst_row = max(
        (row.error for row in report.rows if row.gate < 1), key=_error_size, default=math.nan
    )
    return [
        ("max_rel_err", f"{worst_row:.3e}"),
        ("first_divergence", report.first.place if report.first is not None else ""),
        ("suspect_line", f"{path}:{line}" if line else ""),
        ("seed", str(terms.seed)),
        ("equivalence", report.equivalence),
        ("mesh", mesh),
    ]


def _error_size(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _check_refusal(outcome: Outcome, code: str) -> Outcome:
    """Return the outcome of a schedule that must be refused with `code`: if not, it fails."""
    if outcome.skipped or outcome.code == UNCHECKED:
        return outcome
    if outcome.code == REFUSED:
        if f"[{code}]" in outcome.text.split("\n")[0]:
            return replace(outcome, code=HOLDS, text=f"refused, as it is meant to be: {code}")
        return replace(outcome, text=f"meant to be refused with {code}, not so:\n{outcome.text}")
    return replace(outcome, code=FAILS, text=f"meant to be refused with {code}, and it is not")


def _answer(outcome: Outcome, ask: Callable[[Outcome], Outcome]) -> Outcome:
    """Run one examination; a refusal, or an error of schedlang, is an outcome, too."""
    start = time.perf_counter()
    try:
        answer = ask(outcome)
    except Refusal as refusal:
        answer = _refused_outcome(outcome, refusal.diagnostics, refusal.render(DEFAULT_COLUMNS))
    except Exception:
        answer = replace(outcome, code=UNCHECKED, text=traceback.format_exc().rstrip())
    return replace(answer, seconds=time.perf_counter() - start)


def _refused_outcome(outcome: Outcome, diagnostics: Sequence[Diagnostic], text: str) -> Outcome:
    span: Any = diagnostics[0].primary.span
    path, line = (span.source.name, span.line) if span else ("", 0)
    return replace(outcome, code=REFUSED, text=text, place=path, line=line)
