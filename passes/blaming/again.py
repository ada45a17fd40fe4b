"""Again: a failure that was seen, repeated on some rows of the plan, as cheaply as it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostic import Refusal
from schedlang.passes.preparing.reductions import is_lossy
from schedlang.passes.preparing.routing import routings
from schedlang.passes.proving.observe import Condition, Observation
from schedlang.passes.proving.sides import Case, original, prepared, tried
from schedlang.passes.reading.rows import only
from schedlang.plan import Action
from schedlang.report import Row

if TYPE_CHECKING:
    from schedlang.runtime.launching.launch import Pool

# the rows of a whole comparison, state saved and working dtype included
Whole = Callable[[Case, "Case | None", Sequence[Condition], Observation], list[Row]]


@dataclass(frozen=True)
class Failure:
    """What was run and seen in a proof that failed: in float64, and the case in its own dtype."""

    case: Case
    working: Case | None
    told: Sequence[Condition]
    expected: Observation
    actual: Observation
    whole: Whole


@dataclass(frozen=True)
class Trial:
    """One way to look for a failure: a condition cut short, and with what else."""

    condition: Condition
    saved: bool = False  # with a save, and a load by one rank
    working: bool = False  # in the working dtype, too
    kernels: bool = False  # only the trials of kernels

    @property
    def cost(self) -> tuple[int, int]:
        """Training steps, float64 before all else."""
        return len(self.condition.batches), self.saved + 2 * self.working


def trials_of(rows: Sequence[Row], failure: Failure) -> list[Trial]:
    """Ways in which these failing rows may be seen again, the cheapest first."""
    found = [trial for row in rows for trial in _ways(row, failure)]
    unique: list[Trial] = []
    for trial in sorted(found, key=lambda t: t.cost):
        if trial not in unique:
            unique.append(trial)
    return unique


def _ways(row: Row, failure: Failure) -> Iterator[Trial]:
    if row.condition == "kernels":
        yield Trial(replace(failure.told[0], batches=failure.told[0].batches[:1]), kernels=True)
        return
    condition = next((c for c in failure.told if c.name == row.condition), failure.told[0])
    most = len(condition.batches)
    saved, working = row.kind == "saved state", row.kind.endswith(" in working dtype")
    early = saved or working or row.kind.startswith("optimizer ")
    needed = 1 if early or row.step is None else min(row.step + 1, most)
    for count in sorted({needed, most}):
        yield Trial(replace(condition, batches=condition.batches[:count]), saved, working)


class Again:
    """Whether some rows of a plan alone fail as was seen."""

    def __init__(self, failure: Failure, trial: Trial, pool: Pool) -> None:
        self.failure, self.trial, self.pool = failure, trial, pool
        self._right: Observation | None = None

    def __call__(self, rows: Sequence[Action]) -> bool:
        """Does a plan of these rows fail? One that is not legal, or dies, does not fail so."""
        from schedlang.runtime.launching.launch import Hang, RankDied

        try:
            return any(not row.ok for row in self.rows(rows))
        except (Refusal, RankDied, Hang):
            return False

    def rows(self, rows: Sequence[Action]) -> list[Row]:
        """What is compared on a plan of these rows; raises as a proof does."""
        from schedlang.passes.proving.compare import compare
        from schedlang.passes.proving.trials import trials

        failure, trial = self.failure, self.trial
        if trial.kernels:
            assert failure.working is not None
            plan = only(failure.working.plan, rows)
            return trials(replace(failure.working, plan=plan), failure.told)[0]
        case, told = _with(failure.case, rows), self._conditions(rows)
        if self._right is None or _follows(failure.case):
            self._right, _ = original(case, told)
        if trial.saved or trial.working:
            working = _with(failure.working, rows) if trial.working and failure.working else None
            count = len(trial.condition.batches)
            working = working and replace(working, batches=working.batches[:count])
            found = failure.whole(case, working, told, self._right)
            kind = " in working dtype" if trial.working else "saved state"
            return [row for row in found if row.kind.endswith(kind)]
        actual: Any = self.pool.run(tried, case.plan.mesh.world, case, told)[0]
        return list(compare(self._right, actual, exact=not failure.case.plan.gives_up))

    def _conditions(self, rows: Sequence[Action]) -> list[Condition]:
        """The condition; before it, where it is saved, a step of the first, which is to load it."""
        first = self.failure.told[0]
        loads = self.trial.saved and self.trial.condition.name != first.name
        before = [replace(first, batches=first.batches[:1])] if loads else []
        return [*before, self._condition(rows)]

    def _condition(self, rows: Sequence[Action]) -> Condition:
        """The condition; where it has a case of its own, that with these rows."""
        own = getattr(self.trial.condition, "case", None)
        if own is None:
            return self.trial.condition
        other: Any = {"case": _with(own, rows)}
        return replace(self.trial.condition, **other)


def _follows(case: Case) -> bool:
    """Whether the original does as rows say, so that it is another one for other rows."""
    plan = case.plan
    rules = plan.model.changes, plan.kept, any(routings(plan)), is_lossy(plan)
    return case.parted or case.table is not None or any(map(bool, rules))


def _with(case: Case, rows: Sequence[Action]) -> Case:
    return prepared(replace(case, plan=only(case.plan, rows)))
