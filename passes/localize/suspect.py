"""Suspect: after a proof has failed, say where the difference arose and which rows made it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Action
from schedlang.passes.elaborate.rows import only, shown
from schedlang.passes.localize.culprits import (
    Again,
    Blame,
    Failure,
    blame,
    culprits,
    fewest_sites,
    trials_of,
)
from schedlang.passes.localize.diagnose import pattern
from schedlang.passes.localize.localise import Location, localise
from schedlang.passes.verify.observe import DISTINCT, Batch, Condition, Observation
from schedlang.passes.verify.sides import Case, prepared, tried
from schedlang.report import Report, Row
from schedlang.runtime.launch.pool import Hang, Pool, RankDied

# ---- Stopped: the row for which ranks refuse to go on in the middle of a step.


def placed(refusal: Refusal, case: Case, told: Sequence[Condition], pool: Pool) -> Refusal:
    """The refusal at the last of the fewest rows that are refused alike.

    What is found out while a model runs is found where no row is known.  As it is, if it has a
    place, or if the first step of the first run alone is not refused so.
    """
    if any(one.primary.span for one in refusal.diagnostics):
        return refusal
    step = replace(told[0], batches=told[0].batches[:1])
    code = refusal.diagnostic.code

    def stops(rows: Sequence[Action]) -> bool:
        try:
            some = prepared(replace(case, plan=only(case.plan, rows)))
        except Refusal:
            return False  # these rows alone are not legal
        try:
            pool.run(tried, some.plan.mesh.world, some, [step])
        except Refusal as other:
            return other.diagnostic.code == code
        except (RankDied, Hang):
            pass
        return False

    rows = tuple(action for action in case.plan.actions if action.acts)
    if not stops(rows):
        return refusal
    found = blame(rows, stops).rows
    span = found[-1].span if found else None
    return refusal if span is None else refusal.at(span)


# ---- Suspect: after a proof has failed, say where the difference arose and which rows made it.


Lines = Iterator[tuple[str, str]]
MOST_SUSPECTS = 4  # that are printed
MOST_HINTS = 3


def suspected(report: Report, failure: Failure, pool: Pool) -> Report:
    """The report with where its first difference arose, its pattern and the rows to blame."""
    bad = [row for row in report.rows if not row.ok and row.kind != DISTINCT]
    if not bad:  # what both sides draw by is no row's
        return report
    rows = tuple(a for a in failure.case.plan.actions if a.acts)
    again = _seen_again(bad, failure, rows, pool)
    batch = again.trial.condition.batches[-1] if again is not None else failure.case.batches[0]
    where = None if bad[0].condition == "kernels" else _location(bad[0], failure, batch, pool)
    found: Blame[Action] = Blame((), 0, 0)
    least: tuple[Action, ...] = ()
    if again is not None:
        hints = _hints(failure, [n for n, _ in where.guilty] if where is not None else [], bad)
        found = culprits(rows, again, hints)
        least = fewest_sites(found.rows, again, hints)
    lines = [
        *_first_bad(bad, failure.expected),
        *(_told(where, bad[0]) if where is not None else ()),
    ]
    lines += _minimal(rows, found, least, report.command)
    return replace(
        report,
        blamed=tuple(shown(action) for action in found.rows),
        diagnosis=pattern(bad[0], failure, where, batch),
        localised=tuple(lines),
    )


def _hints(failure: Failure, guilty: Sequence[str], bad: Sequence[Row]) -> list[str]:
    """Modules at which to look first: those that are wrong alone, else those of wrong gradients."""
    model = failure.case.plan.model
    if guilty:
        return list(guilty[:MOST_HINTS])
    names = {row.name for row in bad if row.kind == "gradients"}
    if 0 < len(names) <= MOST_HINTS:
        return [model.owner(name).fqn for name in sorted(names) if name in model.parameters]
    return []


def _seen_again(
    bad: Sequence[Row], failure: Failure, rows: tuple[Action, ...], pool: Pool
) -> Again | None:
    """The cheapest way in which all rows together fail once more; None if none does."""
    for trial in trials_of(bad, failure):
        again = Again(failure, trial, pool)
        if again(rows):
            return again
    return None


def _location(first: Row, failure: Failure, batch: Batch, pool: Pool) -> Location | None:
    """Where among the modules; None where they cannot be cut apart or the ranks do not get on."""
    if failure.case.plan.context_axes:
        return None  # a call of the original is no part's alone
    try:
        name = first.name if first.kind == "gradients" else ""
        return localise(failure.case, batch, pool, name)
    except (Refusal, RankDied, Hang, RuntimeError):
        return None


# -- in words ----------------------------------------------------------------------------------


def _first_bad(bad: Sequence[Row], expected: Observation) -> Lines:
    """Of gradients the first bad one in the order of backward, and the last good one before it."""
    first = bad[0]
    if first.kind != "gradients":
        return
    same = (first.condition, first.kind, first.step)
    wrong = {row.name for row in bad if (row.condition, row.kind, row.step) == same}
    order = expected.order
    yield "gradients", f"{len(wrong)} of {len(order)} differ, in backward first {first.name}"
    before = order[: order.index(first.name)] if first.name in order else ()
    yield "last good before", before[-1] if before else "none: it is the first"


def _told(where: Location, first: Row) -> Lines:
    if where.first:
        yield "first activation", f"{where.first}   error {where.error:.1e}"
        yield "last good before", where.before or "none: it is the first"
    else:
        late = "in backward, or after it"
        early = "where the parts of the batch are put together, or in the loss"
        arose = early if first.kind in ("outputs", "loss") else late
        yield "activations", f"all are equal in a step: the difference arises {arose}"
    for name, what in where.guilty[:MOST_SUSPECTS]:
        yield "suspect", f"{name or 'the model itself'}: given what is right, {what}"
    if len(where.guilty) > MOST_SUSPECTS:
        yield "suspect", f"and {len(where.guilty) - MOST_SUSPECTS} more modules"
    if not where.guilty:
        yield "suspect", f"no module: {where.judged} were fed what is right, and all are right"
    if where.unknown:
        yield "not tried", f"{len(where.unknown)} modules of unknown layout: {where.unknown[0]} ..."


def _minimal(
    rows: Sequence[Action], found: Blame[Action], least: Sequence[Action], command: str
) -> Lines:
    if not found.rows:
        if found.runs:  # it was seen again, and once more without any row
            yield "bisected", "no row is needed: it is so in the plan of none, too"
        return
    yield "bisected", f"{len(found.rows)} of {len(rows)} rows are needed, {found.runs} runs"
    for action in least:
        yield "smallest", shown(action)
    lines = sorted({a.span.line for a in found.rows if a.span is not None and a.span.line})
    if command and lines and "--only" not in command:
        yield "repeat these", f"{command} --only {','.join(map(str, lines))}"
