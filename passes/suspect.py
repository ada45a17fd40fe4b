"""Suspect: after a proof has failed, say where the difference arose and which rows made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from schedlang.diagnostic import Refusal
from schedlang.passes.blame import blame
from schedlang.passes.observe import Condition, Observation
from schedlang.passes.rows import only, shown
from schedlang.passes.sides import Case, original, prepared, tried
from schedlang.plan import Action
from schedlang.report import Report

if TYPE_CHECKING:
    from schedlang.runtime.launch import Pool


@dataclass(frozen=True)
class Failure:
    """What was run and seen in a proof that failed: in float64, and the case in its own dtype."""

    case: Case
    working: Case | None
    told: Sequence[Condition]
    expected: Observation
    actual: Observation


def suspected(report: Report, failure: Failure, pool: Pool) -> Report:
    """The report with the pattern of its first difference and the rows to blame."""
    if all(row.ok for row in report.rows):
        return report
    return replace(
        report, blamed=tuple(_blamed(failure, pool)), diagnosis=_diagnosis(report, failure)
    )


def _diagnosis(report: Report, failure: Failure) -> str:
    from schedlang.passes.diagnose import explain

    bad = next(row for row in report.rows if not row.ok)
    sizes = dict(failure.case.plan.mesh.axes)
    return explain(bad, failure.expected, failure.actual, sizes)


def _blamed(failure: Failure, pool: Pool) -> list[str]:
    """The rows that fail together, as lines of the schedule."""
    case = failure.case
    rows = [action for action in case.plan.actions if action.name != "verify"]
    quick = replace(case, batches=case.batches[:1])
    told = [replace(condition, batches=quick.batches) for condition in failure.told[:1]]

    def fails(subset: tuple[Action, ...]) -> bool:
        from schedlang.passes.compare import compare

        try:
            small = prepared(replace(quick, plan=only(case.plan, subset)))
            expected, _ = original(small, told)
            actual = pool.run(tried, small.plan.mesh.world, small, told)[0]
        except Refusal:
            return False
        return any(not row.ok for row in compare(expected, actual))

    found = blame(rows, fails)
    return [shown(action) for action in found.rows]
