"""Find the fewest rows of a schedule, at the fewest modules, that make a failed proof fail again.

`add_suspects` adds to a report where the difference arose, its pattern and the rows to blame.
`locate_refusal` finds the row for which ranks refuse in the middle of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from schedlang.diagnostics.diagnostic import Refusal, quote_names
from schedlang.ir.model import are_nested
from schedlang.ir.plan import Action
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze.expert_capacity import find_capacities
from schedlang.passes.analyze.holdings import is_lossy
from schedlang.passes.elaborate.rows import describe_row, plan_of_rows_only
from schedlang.passes.localize.diagnosis import describe_failure
from schedlang.passes.localize.module_search import Failure, Location, find_module
from schedlang.passes.verify.compare import OUTPUTS, RTOL, compare
from schedlang.passes.verify.forward_state import restored_buffers
from schedlang.passes.verify.kernel_trials import run_trials
from schedlang.passes.verify.linear_backward import nonlinear_backward
from schedlang.passes.verify.observe import DISTINCT_DRAWS, Batch, Condition, Observation
from schedlang.passes.verify.original import count_rows, repeat_first_rows
from schedlang.passes.verify.proof_case import (
    Case,
    observe_on_rank,
    original_subject,
    prepare_case,
    run_original,
)
from schedlang.report import Report, Row
from schedlang.runtime.launch.pool import Hang, Pool, RankDied


@dataclass(frozen=True)
class RepeatTrial:
    """A cheap way to see a failure again: one condition with few steps, and extra checks."""

    condition: Condition
    saved: bool = False  # also save, and load on one rank
    working: bool = False  # also in the working dtype
    kernels: bool = False  # only the trials of kernels

    @property
    def cost(self) -> tuple[int, int]:
        """The number of training steps, then the cost of extra checks."""
        return len(self.condition.batches), self.saved + 2 * self.working


def plan_trials(rows: Sequence[Row], failure: Failure) -> list[RepeatTrial]:
    """Return trials in which these failing rows may fail again, the cheapest first."""
    trials = [trial for row in rows for trial in _trials_of_row(row, failure)]
    unique: list[RepeatTrial] = []
    for trial in sorted(trials, key=lambda t: t.cost):
        if trial not in unique:
            unique.append(trial)
    return unique


def _trials_of_row(row: Row, failure: Failure) -> Iterator[RepeatTrial]:
    if row.condition == "kernels":
        yield RepeatTrial(
            replace(failure.conditions[0], batches=failure.conditions[0].batches[:1]), kernels=True
        )
        return
    condition = next(
        (c for c in failure.conditions if c.name == row.condition), failure.conditions[0]
    )
    max_count = len(condition.batches)
    saved, working = row.kind == "saved state", row.kind.endswith(" in working dtype")
    is_last_step = saved or working or row.kind.startswith("optimizer ")
    min_count = 1 if is_last_step or row.step is None else min(row.step + 1, max_count)
    for count in sorted({min_count, max_count}):
        yield RepeatTrial(replace(condition, batches=condition.batches[:count]), saved, working)


class Repetition:
    """Predicate: whether a plan of some rows fails as the proof did."""

    def __init__(self, failure: Failure, trial: RepeatTrial, pool: Pool) -> None:
        self.failure, self.trial, self.pool = failure, trial, pool
        self._right: Observation | None = None

    def __call__(self, rows: Sequence[Action]) -> bool:
        """Return whether a plan of these rows fails; False for illegal plans and ranks that die."""
        try:
            return any(not row.ok for row in self.rows(rows))
        except (Refusal, RankDied, Hang):
            return False

    def rows(self, rows: Sequence[Action]) -> list[Row]:
        """Compare a plan of these rows with the original; raises as a proof does."""
        failure, trial = self.failure, self.trial
        if trial.kernels:
            assert failure.working is not None
            plan = plan_of_rows_only(failure.working.plan, rows)
            return run_trials(replace(failure.working, plan=plan), failure.conditions)[0]
        case, conditions = _case_of_rows(failure.case, rows), self._conditions(rows)
        if self._right is None or _original_depends_on_rows(failure.case):
            self._right, _ = run_original(case, conditions)
        if trial.saved or trial.working:
            working = (
                _case_of_rows(failure.working, rows) if trial.working and failure.working else None
            )
            count = len(trial.condition.batches)
            working = working and replace(working, batches=working.batches[:count])
            compared = failure.compare_all(case, working, conditions, self._right)
            kind = " in working dtype" if trial.working else "saved state"
            return [row for row in compared if row.kind.endswith(kind)]
        actual: Any = self.pool.run(observe_on_rank, case.plan.mesh.world, case, conditions)[0]
        return list(compare(self._right, actual, exact=not failure.case.plan.gives_up))

    def _conditions(self, rows: Sequence[Action]) -> list[Condition]:
        """Return the trial's condition with these rows.

        Before a trial of saved state, one step of the first condition makes the program that loads
        it.
        """
        first, condition = self.failure.conditions[0], self.trial.condition
        loads_state = self.trial.saved and condition.name != first.name
        earlier = [replace(first, batches=first.batches[:1])] if loads_state else []
        row_case = condition.case and _case_of_rows(condition.case, rows)
        return [*earlier, replace(condition, case=row_case)]


def _original_depends_on_rows(case: Case) -> bool:
    """Return whether the original depends on rows of the plan, so that fewer rows change it."""
    plan = case.plan
    rules = plan.model.changes, plan.activation_codings, any(find_capacities(plan)), is_lossy(plan)
    return case.by_parts or case.table is not None or any(map(bool, rules))


def _case_of_rows(case: Case, rows: Sequence[Action]) -> Case:
    return prepare_case(replace(case, plan=plan_of_rows_only(case.plan, rows)))


T = TypeVar("T")


@dataclass(frozen=True)
class Blame(Generic[T]):
    """Rows that fail together, none of which can be left out; empty if no row is needed."""

    rows: tuple[T, ...]
    prefix: int  # length of the shortest failing prefix found
    runs: int  # calls of the predicate


def find_rows(rows: Sequence[T], fails: Callable[[tuple[T, ...]], bool]) -> Blame[T]:
    """Find the rows to blame: bisect prefixes, then apply delta debugging.

    `fails(subset)` receives rows in their order and must return False for an illegal subset. All
    rows together must fail. A single culprit takes about log2(n) runs. Delta debugging is from
    Zeller, Hildebrandt: Simplifying and isolating failure-inducing input, TSE 2002.
    """
    test = _CachedPredicate(rows, fails)
    indices = tuple(range(len(rows)))
    if not indices or test(()):
        return Blame((), 0, test.runs)
    # the prefix of `passing` rows passes, that of `failing` rows fails
    passing, failing = 0, len(rows)
    while failing - passing > 1:
        middle = (passing + failing) // 2
        passing, failing = (passing, middle) if test(indices[:middle]) else (middle, failing)
    culprit = failing - 1
    culprits = (culprit,) if test((culprit,)) else _minimise(indices[:failing], culprit, test)
    culprits = _without_pairs(culprits, test)
    return Blame(tuple(rows[i] for i in culprits), failing, test.runs)


def _without_pairs(
    failing: tuple[int, ...], predicate: Callable[[tuple[int, ...]], bool]
) -> tuple[int, ...]:
    """Leave out one or two rows at a time, because two rows may be legal only together."""
    if len(failing) < 2:
        return failing
    for count in (1, 2):
        for removed in itertools.combinations(failing, count):
            remaining = tuple(i for i in failing if i not in removed)
            if remaining and predicate(remaining):
                return _without_pairs(remaining, predicate)
    return failing


class _CachedPredicate(Generic[T]):
    """The predicate on sets of indices, with cached results."""

    def __init__(self, rows: Sequence[T], fails: Callable[[tuple[T, ...]], bool]) -> None:
        self.rows, self.fails = rows, fails
        self.known: dict[tuple[int, ...], bool] = {tuple(range(len(rows))): True}
        self.runs = 0

    def __call__(self, subset: tuple[int, ...]) -> bool:
        if subset not in self.known:
            self.runs += 1
            self.known[subset] = self.fails(tuple(self.rows[i] for i in subset))
        return self.known[subset]


def _minimise(
    failing: tuple[int, ...], culprit: int, test: Callable[[tuple[int, ...]], bool]
) -> tuple[int, ...]:
    """Return a failing subset from which no row except the culprit can be left out."""
    remaining = tuple(i for i in failing if i != culprit)
    chunk_count = 2
    while remaining:
        chunk_count = min(chunk_count, len(remaining))
        size = -(-len(remaining) // chunk_count)
        chunks = [remaining[i : i + size] for i in range(0, len(remaining), size)]
        smaller = _smaller_failing(remaining, chunks, lambda subset: test((*subset, culprit)))
        if smaller is not None:
            remaining, chunk_count = smaller, max(2, chunk_count - 1)
        elif chunk_count < len(remaining):
            chunk_count = min(2 * chunk_count, len(remaining))
        else:
            break
    return (*remaining, culprit)


def _smaller_failing(
    candidates: tuple[int, ...],
    chunks: list[tuple[int, ...]],
    fails: Callable[[tuple[int, ...]], bool],
) -> tuple[int, ...] | None:
    """Return one chunk, or all rows without one chunk, that still fails."""
    single_chunks = [chunk for chunk in chunks if len(chunk) < len(candidates)]
    complements = [tuple(i for i in candidates if i not in chunk) for chunk in chunks]
    return next((subset for subset in (*single_chunks, *complements) if fails(subset)), None)


MOST_RUNS = 24  # of a search for fewer modules


def find_suspect_rows(
    rows: Sequence[Action], repetition: Repetition, hints: Sequence[str]
) -> Blame[Action]:
    """Find the rows to blame, first at suspected modules. All rows together must fail."""
    run_count = 0
    for nearby_rows in _rows_near(rows, hints):
        run_count += 1
        if repetition(nearby_rows):
            blame = find_rows(nearby_rows, repetition)
            return replace(blame, runs=blame.runs + run_count)
    blame = find_rows(rows, repetition)
    return replace(blame, runs=blame.runs + run_count)


def _rows_near(rows: Sequence[Action], hints: Sequence[str]) -> Iterator[tuple[Action, ...]]:
    """Yield rows near suspected modules: each alone, all of them, those of enclosing modules."""
    tried: set[tuple[int, ...]] = set()
    for hint in hints:
        for outer in _enclosing(hint):
            inside = [row for row in rows if _changes_computation(row) and _acts_on(row, outer)]
            for group in (*((row,) for row in inside if outer == hint), tuple(inside)):
                numbers = tuple(row.row for row in group)
                if group and len(group) < len(rows) and numbers not in tried:
                    tried.add(numbers)
                    yield group


def _enclosing(fqn: str) -> Iterator[str]:
    """Yield a module and the two around it."""
    for _ in range(3):
        if fqn:
            yield fqn
        fqn = fqn.rpartition(".")[0]


def _changes_computation(row: Action) -> bool:
    return row.changes(Facet.PLACEMENT, Facet.STRUCTURE, Facet.SHAPE)


def _acts_on(row: Action, fqn: str) -> bool:
    return any(site and fqn and are_nested(site, fqn) for site in row.sites)


def minimise_sites(
    rows: Sequence[Action], repetition: Repetition, hints: Sequence[str]
) -> tuple[Action, ...]:
    """Return the rows at the fewest modules that still fail; empty if each row has one module.

    Suspected modules are tried first.
    """
    row_sites = [replace(row, sites=group) for row in rows for group in row.groups]
    if len(row_sites) == len(rows):
        return ()
    fails = _limit_runs(MOST_RUNS, repetition)
    numbers = {row.row for row in rows}
    for hint in hints:
        for ancestor in _enclosing(hint):
            nearby = [part for part in row_sites if _acts_on(part, ancestor)]
            if (
                len(nearby) < len(row_sites)
                and {part.row for part in nearby} == numbers
                and fails(nearby)
            ):
                return tuple(_join_rows(nearby))
    site_order = {name: k for k, name in enumerate(repetition.failure.case.plan.model.sites)}
    row_sites.sort(key=lambda part: (site_order[part.sites[0]], part.row))
    return tuple(_join_rows(find_rows(row_sites, fails).rows))


def _limit_runs(runs: int, repetition: Repetition) -> Callable[[Sequence[Action]], bool]:
    """Limit the runs of a predicate; after the last run it returns False."""
    runs_left = [runs]

    def fails(rows: Sequence[Action]) -> bool:
        runs_left[0] -= 1
        return runs_left[0] >= 0 and repetition(_join_rows(rows))

    return fails


def _join_rows(rows: Sequence[Action]) -> list[Action]:
    """Join actions of one row, in the order of rows."""
    joined: dict[int, Action] = {}
    for action in rows:
        earlier = joined.get(action.row)
        joined[action.row] = (
            action if earlier is None else replace(earlier, sites=earlier.sites + action.sites)
        )
    return [joined[number] for number in sorted(joined)]


def locate_refusal(
    refusal: Refusal, case: Case, conditions: Sequence[Condition], pool: Pool
) -> Refusal:
    """Return the refusal with the place of the last of the fewest rows that cause it.

    A refusal while a model runs has no row. The refusal is returned unchanged if it has a place, or
    if the first step of the first condition does not cause it.
    """
    if any(diagnostic.primary.span for diagnostic in refusal.diagnostics):
        return refusal
    step = replace(conditions[0], batches=conditions[0].batches[:1])
    code = refusal.diagnostic.code

    def stops(rows: Sequence[Action]) -> bool:
        try:
            subset_case = _case_of_rows(case, rows)
        except Refusal:
            return False  # these rows alone are not legal
        try:
            pool.run(observe_on_rank, subset_case.plan.mesh.world, subset_case, [step])
        except Refusal as rank_refusal:
            return rank_refusal.diagnostic.code == code
        except (RankDied, Hang):
            pass
        return False

    rows = tuple(action for action in case.plan.actions if action.has_effect)
    if not stops(rows):
        return refusal
    culprits = find_rows(rows, stops).rows
    span = culprits[-1].span if culprits else None
    return refusal if span is None else refusal.at(span)


Lines = Iterator[tuple[str, str]]
MOST_SUSPECTS = 4  # printed
MOST_HINTS = 3


def add_suspects(report: Report, failure: Failure, pool: Pool) -> Report:
    """Add to a report where its first difference arose, the pattern, and the rows to blame."""
    failed = [row for row in report.rows if not row.ok and row.kind != DISTINCT_DRAWS]
    if not failed:  # both sides share the function that draws: no row is to blame
        return report
    rows = tuple(a for a in failure.case.plan.actions if a.has_effect)
    repeat = _find_trial(failed, failure, rows, pool)
    batch = repeat.trial.condition.batches[-1] if repeat is not None else failure.case.batches[0]
    location = (
        None if failed[0].condition == "kernels" else _locate(failed[0], failure, batch, pool)
    )
    blame: Blame[Action] = Blame((), 0, 0)
    smallest: tuple[Action, ...] = ()
    if repeat is not None:
        hints = _hints(
            failure, [n for n, _ in location.guilty] if location is not None else [], failed
        )
        blame = find_suspect_rows(rows, repeat, hints)
        smallest = minimise_sites(blame.rows, repeat, hints)
    lines = [
        *_describe_first(failed, failure.expected),
        *(_describe_location(location, failed[0]) if location is not None else ()),
    ]
    lines += _describe_number(failed, failure)
    lines += _describe_nonlinear(failed[0], failure, batch)
    lines += _describe_kept(failure, batch)
    lines += _describe_rows(rows, blame, smallest, report.command)
    return replace(
        report,
        blamed=tuple(describe_row(action) for action in blame.rows),
        diagnosis=describe_failure(failed[0], failure, location, batch),
        localised=tuple(lines),
    )


def _hints(failure: Failure, guilty: Sequence[str], bad_rows: Sequence[Row]) -> list[str]:
    """Return modules to try first: those that are wrong alone, else owners of wrong gradients."""
    model = failure.case.plan.model
    if guilty:
        return list(guilty[:MOST_HINTS])
    names = {row.name for row in bad_rows if row.kind == "gradients"}
    if 0 < len(names) <= MOST_HINTS:
        return [model.owner(name).fqn for name in sorted(names) if name in model.parameters]
    return []


def _find_trial(
    bad_rows: Sequence[Row], failure: Failure, rows: tuple[Action, ...], pool: Pool
) -> Repetition | None:
    """Return the cheapest trial in which all rows together fail again; None if there is none."""
    for trial in plan_trials(bad_rows, failure):
        repetition = Repetition(failure, trial, pool)
        if repetition(rows):
            return repetition
    return None


def _locate(first_row: Row, failure: Failure, batch: Batch, pool: Pool) -> Location | None:
    """Find the wrong module; None if modules cannot be run separately or ranks fail."""
    if failure.case.plan.context_axes:
        return None  # ranks split the sequence: no rank has a call of the original by itself
    try:
        name = first_row.name if first_row.kind == "gradients" else ""
        return find_module(failure.case, batch, pool, name)
    except (Refusal, RankDied, Hang, RuntimeError):
        return None


# -- in words ----------------------------------------------------------------------------------


def _describe_first(bad_rows: Sequence[Row], expected: Observation) -> Lines:
    """Yield the first wrong gradient in backward order, and the last right one before it."""
    first_row = bad_rows[0]
    if first_row.kind != "gradients":
        return
    row_key = (first_row.condition, first_row.kind, first_row.step)
    wrong_names = {row.name for row in bad_rows if (row.condition, row.kind, row.step) == row_key}
    order = expected.order
    yield (
        "gradients",
        f"{len(wrong_names)} of {len(order)} differ, in backward first {first_row.name}",
    )
    earlier = order[: order.index(first_row.name)] if first_row.name in order else ()
    yield "last good before", earlier[-1] if earlier else "none: it is the first"


def _describe_location(location: Location, first_row: Row) -> Lines:
    if location.first:
        yield "first activation", f"{location.first}   error {location.error:.1e}"
        yield "last good before", location.before or "none: it is the first"
    else:
        after_forward = "in backward, or after it"
        before_modules = "where the parts of the batch are put together, or in the loss"
        origin = before_modules if first_row.kind in ("outputs", "loss") else after_forward
        yield "activations", f"all are equal in a step: the difference arises {origin}"
    for name, symptom in location.guilty[:MOST_SUSPECTS]:
        yield "suspect", f"{name or 'the model itself'}: given what is right, {symptom}"
    if len(location.guilty) > MOST_SUSPECTS:
        yield "suspect", f"and {len(location.guilty) - MOST_SUSPECTS} more modules"
    if not location.guilty:
        yield (
            "suspect",
            f"no module: {location.modules_tried} got right inputs, and all results are right",
        )
    if location.unknown:
        yield (
            "not tried",
            f"{len(location.unknown)} modules of unknown layout: {location.unknown[0]} ...",
        )


def _describe_number(failed: Sequence[Row], failure: Failure) -> Lines:
    """Yield that parts of the batch have one number each, if nothing but such outputs differs."""
    parts = failure.case.plan.shares * failure.case.plan.micro
    if parts > 1 and all(row.kind in OUTPUTS and row.shape == () for row in failed):
        yield "suspect", f"{failed[0].name}: one number for each of {parts} parts of the batch"
        yield (
            "",
            "they are averaged by the weights of the loss; values of rows stay as they are",
        )


def _describe_nonlinear(first: Row, failure: Failure, batch: Batch) -> Lines:
    """Yield what in the original's backward is not linear, if gradients differ first."""
    if first.kind != "gradients":
        return
    with original_subject(failure.case) as subject:
        nonlinear = nonlinear_backward(subject, batch)
    if nonlinear:
        yield "suspect", f"{nonlinear}: it is not linear"
        yield "", "a rank has a shard of its gradient, or a part of a sum, and changes it alone"


def _describe_kept(failure: Failure, batch: Batch) -> Lines:
    """Yield the attributes through which a forward depends on an earlier one, if parts do."""
    if failure.case.plan.shares * failure.case.plan.micro == 1:
        return
    rows = range(count_rows(batch))
    other = repeat_first_rows(batch, [rows]) or batch
    try:
        with original_subject(failure.case) as subject:
            with restored_buffers(subject):
                first = float(subject.forward_backward(batch, rows))
            with restored_buffers(subject):
                subject.forward_backward(other, rows)
                second = float(subject.forward_backward(batch, rows))
    except (Refusal, RuntimeError):  # of rows that are all alike, say: the report stands without
        return
    if subject.changed and abs(second - first) > RTOL * abs(first):
        names = quote_names(sorted(subject.changed), MOST_HINTS)
        yield "suspect", f"{names}: the loss depends on what an earlier forward left there"
        yield "", "a rank has what its own rows left, and a microbatch what the one before it left"


def _describe_rows(
    rows: Sequence[Action], blame: Blame[Action], smallest: Sequence[Action], command: str
) -> Lines:
    if not blame.rows:
        if blame.runs:  # it failed again, also without any row
            yield "bisected", "no row is needed: a plan without rows differs, too"
        return
    yield "bisected", f"{len(blame.rows)} of {len(rows)} rows are needed, {blame.runs} runs"
    for action in smallest:
        yield "smallest", describe_row(action)
    lines = sorted({a.span.line for a in blame.rows if a.span.line})
    if command and lines and "--only" not in command:
        yield "repeat these", f"{command} --only {','.join(map(str, lines))}"
