"""Prove that a plan computes what its model computes: run ranks, run the original, compare."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.expert_capacity import find_capacities
from schedlang.passes.analyze.holdings import is_lossy
from schedlang.passes.localize.blame import add_suspects, locate_refusal
from schedlang.passes.localize.module_search import Failure
from schedlang.passes.simulate.expectations import list_bounds
from schedlang.passes.simulate.kernel_gains import RowGain, count_step_gains
from schedlang.passes.verify.changed_model import compare_changed_model
from schedlang.passes.verify.compare import compare
from schedlang.passes.verify.conditioning import CANCELS, MAGNIFIED
from schedlang.passes.verify.kernel_trials import run_trials
from schedlang.passes.verify.observe import NATIVE_DRAWS, Condition, Key, Observation
from schedlang.passes.verify.original_checks import check_finite, check_trainable
from schedlang.passes.verify.probe import check_own_parts, check_parts
from schedlang.passes.verify.proof_case import (
    Case,
    observe_on_rank,
    observe_programs,
    prepare_case,
    randomised_float64,
    run_original,
    working_case,
)
from schedlang.passes.verify.randomness import check_native_draws
from schedlang.passes.verify.requirements import (
    IN_ORACLE,
    STEPS,
    Requirements,
    compare_exact,
    inexact_rules,
    requirements_of,
    without_exact_rows,
)
from schedlang.passes.verify.saved_state import (
    NO_OUTPUTS,
    STATISTICS_GAP,
    Outputs,
    archive_rows,
    load_on_one_rank,
    load_on_ranks,
    saved_condition,
)
from schedlang.passes.verify.stage_state import add_stage_outputs
from schedlang.passes.verify.training_runs import (
    TrainingRuns,
    find_gaps,
    missing_kinds,
    plan_runs,
    repeating_blocks,
    separate_rows,
    unused_parameters,
)
from schedlang.passes.verify.working_dtype import (
    CHOICES_NOTE,
    ROUNDED_NOTE,
    SCALE_NOTE,
    WorkingRun,
    check_cast,
    curve_rows,
    float64_bounds,
    observe_original,
    observe_ranks,
    split_undecided,
)
from schedlang.report import Report, Row
from schedlang.runtime.comm import world
from schedlang.runtime.declined_calls import DeclinedCalls, declined_in, merge_declined
from schedlang.runtime.float64 import Float64
from schedlang.runtime.global_state import restore_global_state
from schedlang.runtime.launch.forkserver import report_progress
from schedlang.runtime.launch.pool import Pool, shared_pool, temporary_folder, use_threads_of_ranks
from schedlang.runtime.launch.rank_job import Hang, TimeIsUp, current_limit, lift_limit
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.program import Program

MOST_RANKS = 8
Progress = Callable[..., None]  # progress(stage), and progress(stage, done, total) of its steps
# observations in float64 and in the working dtype, saved state, calls that kernels declined, and
# the baseline's first step
_Ran = tuple[Observation, Observation, dict[str, Any], tuple["DeclinedCalls", ...], Observation]
_SAVED = "saved"  # message of a rank: its state is saved
_BASELINE = "_schedlang_baseline"  # attribute that marks a refusal of the baseline


def prove(
    case: Case,
    *,
    pool: Pool | None = None,
    title: str = "",
    command: str = "",
    progress: Progress = lambda stage, done=0, total=0: None,
) -> Report:
    """Compare a plan with its original in float64; if they differ, name the rows to blame.

    Raises Refusal for a plan or batch that cannot be run, RankDied or Hang for a run that failed.
    """
    check_world(case.plan)
    with (
        restore_global_state(case.plan.model.model, case.loss),
        use_threads_of_ranks(case.plan.mesh.world),
    ):
        return _prove(case, pool, title, command, progress)


def _prove(case: Case, pool: Pool | None, title: str, command: str, progress: Progress) -> Report:
    start = time.perf_counter()
    pool = pool or shared_pool()
    requirements = requirements_of(case.plan)
    bound_plan, bound_batch = case.expected_for or (case.plan, case.batches[0])
    bounds = list_bounds(bound_plan, bound_batch, case.loss, case.weight)
    case = check_trainable(replace(case, expected_for=None))
    case = prepare_case(_repeat_batches(case, requirements.steps))
    given_case, working, case = case, working_case(case), randomised_float64(case)
    check_cast(working)
    fusion_gains = () if working is None else count_step_gains(working.plan, working.batches[0])
    progress("the original")
    case = check_parts(case)
    working = working and replace(working, by_parts=case.by_parts)
    runs = plan_runs(case, requirements.evaluate)
    conditions = runs.conditions
    original_run = _OriginalRun(given_case, case, working, conditions)
    baseline, run_meanwhile = _make_baseline(given_case, case), original_run.begin
    try:
        observed, baseline_used = _with_baseline(
            case, working, conditions, pool, baseline, progress, run_meanwhile
        )
    except Refusal as refusal:
        if refusal is original_run.refused:
            raise
        progress("the row to blame")
        raise locate_refusal(refusal, case, conditions, pool) from refusal.__cause__
    (expected, draws), actual = original_run.seen, observed[0]
    rows = _compare(case, working, conditions, expected, observed, pool, original_run.plain)
    rows, undecided = split_undecided(rows)
    exact_rows, unchecked = _baseline_rows(
        case, baseline_used, observed[4], replace(actual, order=expected.order, ties=expected.ties)
    )
    working_rows, untried = _check_working_dtype(working, conditions, requirements, pool)
    kernel_facts = _kernel_facts(fusion_gains, observed[3])
    report = Report(
        (*rows, *exact_rows, *working_rows, *compare_changed_model(case)),
        title=title,
        facts=(*_facts(case, runs), *kernel_facts, *_rounding_facts(rows)),
        command=command,
        equivalence=_equivalence_class(case),
        unchecked=(*undecided, *unchecked, *untried),
        gaps=(
            *_gaps(case, runs, expected, actual, draws),
            *separate_rows(case.plan, working is not None),
        ),
        bounds=bounds,
    )
    if any(not row.ok for row in report.rows):
        progress("the row to blame")
        failure = Failure(
            case,
            working,
            conditions,
            expected,
            actual,
            lambda c, w, t, right: _compare(c, w, t, right, _run_ranks(c, w, t, pool), pool),
        )
        report = _add_blame(report, failure, pool)
    return replace(report, seconds=time.perf_counter() - start)


def _add_blame(report: Report, failure: Failure, pool: Pool) -> Report:
    """Find the rows to blame; a search that fails or takes too long does not change the verdict."""
    try:
        return add_suspects(report, failure, pool)
    except Refusal:
        raise
    except (Hang, TimeIsUp):  # the difference itself is known
        if (limit := current_limit()) is None or limit.remaining > 0:
            raise
        lift_limit()
        reason = "out of time"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
    return replace(report, unchecked=(*report.unchecked, f"the row to blame: {reason}"))


def _repeat_batches(case: Case, steps: int) -> Case:
    """Return the case with at least `steps` batches; the given batches are repeated."""
    batches = case.batches
    repeats = max(0, steps - len(batches)) if steps > STEPS else 0
    return replace(case, batches=(*batches, *(batches[k % len(batches)] for k in range(repeats))))


def _equivalence_class(case: Case) -> str:
    """Return the equivalence class of a schedule."""
    names = ["batch_stats"] * case.by_parts + ["staleness"] * (case.table is not None)
    names += ["routing"] * any(find_capacities(case.plan)) + ["lossy"] * is_lossy(case.plan)
    names += ["dtype"] * ("dtype" in case.plan.gives_up)
    names += sorted(case.plan.gives_up & IN_ORACLE)
    if names:
        return f"relaxed ({', '.join(names)})"
    return "algebraic" if inexact_rules(case.plan) else "exact"


def _check_working_dtype(
    working: Case | None, conditions: Sequence[Condition], requirements: Requirements, pool: Pool
) -> tuple[list[Row], list[str]]:
    """Return rows of kernel trials and loss curves, and what of them could not be run."""
    if working is None:
        lost = ["the `rtol` of `verify`"] if requirements.rtol else []
        lost += [f"the loss curve of {curve.place}" for curve in requirements.curves]
        return [], [f"{gap}: nothing was run in a working dtype" for gap in lost]
    rows, untried = run_trials(working, conditions)
    return [*rows, *curve_rows(working, requirements.curves, pool)], untried


def check_world(plan: Plan, verb: str = "verify") -> None:
    """Refuse (S702) more ranks than a laptop runs; suggest a mesh that keeps every row."""
    if plan.mesh.world <= MOST_RANKS:
        return
    sizes = dict(plan.mesh.axes)
    for axis in sizes:  # two ranks along an axis show the same as more
        sizes[axis] = min(sizes[axis], 2)
    for axis in list(sizes):
        if math.prod(sizes.values()) > MOST_RANKS:
            sizes[axis] = 1
    small = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    raise Refusal.of(
        "S702",
        f"`{verb}` starts at most {MOST_RANKS} ranks on one machine, not {plan.mesh.world}",
        notes=(f"the mesh is {plan.mesh}",),
        helps=(f"{verb} the same rows on a smaller mesh: `--mesh {small}`",),
    )


# -- the two sides -----------------------------------------------------------------------------


class _OriginalRun:
    """The original, observed once while the ranks run; refused if its numbers say nothing.

    `own_case` has the model's own parameters, `case` those of the proof.
    """

    refused: Refusal | None = None
    plain: Observation | None = None  # in the working dtype

    def __init__(
        self, own_case: Case, case: Case, working: Case | None, conditions: Sequence[Condition]
    ) -> None:
        self.own_case = own_case
        self.case = case
        self.working = working
        self.conditions = conditions

    def begin(self) -> None:
        """Observe the original; ranks report errors of the model in the working dtype."""
        try:
            check_own_parts(self.own_case)
        except Refusal as refusal:
            self.refused = refusal
            raise
        expected, _ = self.seen
        if self.working is not None:
            with suppress(Exception):
                self.plain = observe_original(self.working, self.conditions, expected)

    @cached_property
    def seen(self) -> tuple[Observation, int]:
        """The observation of the original, and the number of masks drawn."""
        try:
            expected, draws = run_original(self.case, self.conditions)
            check_finite(self.case, self.conditions, expected)
        except Refusal as refusal:
            self.refused = refusal
            raise
        return expected, draws


def _run_ranks(
    case: Case,
    working: Case | None,
    conditions: Sequence[Condition],
    pool: Pool,
    progress: Progress | None = None,
    baseline: Case | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> _Ran:
    """Run the ranks; return their observations (float64, working dtype) and the loaded state.

    `baseline` is the case without its exact rows; one step of it runs at the end. `meanwhile` is
    called while the ranks run, as in `Pool.run`.
    """
    world = case.plan.mesh.world
    steps = sum(len(condition.batches) for condition in conditions)
    steps += 0 if working is None else len(working.batches)
    step_count, archive = itertools.count(1), list[dict[str, Any]]()

    def heard(rank: int, message: object) -> None:
        if rank == 0 and message == _SAVED:
            with suppress(Exception):  # ranks load the state too, and report its errors first
                archive.append(load_on_one_rank(case, conditions, folder))
        elif rank == 0 and progress is not None:  # progress of the first rank only
            progress(stage, min(next(step_count), steps), steps)

    stage = f"{world} rank{'s' * (world > 1)}"
    if progress is not None:
        progress(stage, 0, steps)
    with temporary_folder() as folder:
        traced_case = add_stage_outputs(case, working, conditions)
        step = None if baseline is None else _first_step(baseline, conditions)
        rank_args = (*traced_case, folder, step)
        results = pool.run(_run_rank, world, *rank_args, on_progress=heard, meanwhile=meanwhile)
        observed, working_run, reloaded, _, baseline_run = results[0]
        outputs = NO_OUTPUTS if case.by_parts else reloaded  # each replica has its own statistics
        declined = merge_declined(calls for result in results for calls in result[3])
        state = archive[0] if archive else load_on_one_rank(case, conditions, folder)
        return observed, working_run, state | {"outputs": outputs}, declined, baseline_run


def _compare(
    case: Case,
    working: Case | None,
    conditions: Sequence[Condition],
    expected: Observation,
    result: _Ran,
    pool: Pool,
    original_working: Observation | None = None,
) -> list[Row]:
    """Return the rows of one run of the ranks; `original_working` as in `WorkingRun`."""
    actual, working_run, archive, *_ = result
    exact = not inexact_rules(case.plan) and not case.by_parts
    rows = [*compare(expected, actual, exact=exact)]
    if not exact and any(not row.ok for row in rows):
        rows = float64_bounds(case, conditions, expected).widen_gates(rows, actual)
    rows += archive_rows(conditions[saved_condition(conditions)].name, archive, actual)
    if working is None:
        return rows
    mismatch, world = any(not row.ok for row in rows), case.plan.mesh.world

    def again(changed: Case) -> Observation:
        observed: Observation = pool.run(observe_ranks, world, changed, tuple(conditions), [])[0]
        return observed

    working_check = WorkingRun(
        case, working, conditions, expected, working_run, again, original_working
    )
    return rows + working_check.rows(wrong=mismatch)


@dataclass(frozen=True)
class _Baseline:
    """The case without its exact rows, and what was removed, or why it does not run."""

    case: Case | None = None
    words: str = ""
    refused: str = ""


def _make_baseline(own_case: Case, case: Case) -> _Baseline:
    """Return the case without its exact rows; empty if there are none, or if all of it is exact.

    The plan is traced on the model of `own_case`, because some facts of that model are known.
    """
    assert own_case.prepared is not None
    inexact = without_exact_rows(own_case.plan, own_case.prepared.staged.timeline.replicas)
    if inexact is None or (not inexact_rules(case.plan) and not case.by_parts):
        return _Baseline()  # no exact rows, or the original itself is compared bitwise
    plan, label = inexact
    try:
        traced = prepare_case(replace(own_case, plan=plan))
        plan = replace(traced.plan, model=case.plan.model)
        return _Baseline(replace(case, plan=plan, prepared=traced.prepared), label)
    except Refusal as refusal:
        return _Baseline(None, label, refusal.diagnostics[0].title)


def _first_step(
    baseline: Case, conditions: Sequence[Condition]
) -> tuple[Case, Sequence[Condition]]:
    """Return the baseline, and the condition of its first step."""
    condition = replace(conditions[0], batches=conditions[0].batches[:1], final=False)
    case, _, conditions_sent = add_stage_outputs(baseline, None, [condition])
    return case, conditions_sent


def _with_baseline(
    case: Case,
    working: Case | None,
    conditions: Sequence[Condition],
    pool: Pool,
    baseline: _Baseline,
    progress: Progress,
    meanwhile: Callable[[], object],
) -> tuple[_Ran, _Baseline]:
    """Run the ranks; if they refuse the baseline, run them again without it."""
    try:
        return _run_ranks(
            case, working, conditions, pool, progress, baseline.case, meanwhile
        ), baseline
    except Refusal as refusal:
        if not getattr(refusal, _BASELINE, False):
            raise
        refused = replace(baseline, case=None, refused=refusal.diagnostics[0].title)
        return _run_ranks(case, working, conditions, pool, progress), refused


def _baseline_rows(
    case: Case, baseline: _Baseline, expected: Observation, actual: Observation
) -> tuple[list[Row], list[str]]:
    """Compare the first step with the baseline's; or return why the baseline did not run."""
    if baseline.case is None:
        return [], [f"bits {baseline.words}: {baseline.refused}"] if baseline.words else []
    assert case.prepared is not None
    return list(compare_exact(expected, actual, baseline.words, case.prepared.traced.partial)), []


def _run_rank(
    case: Case,
    working: Case | None,
    conditions: Sequence[Condition],
    folder: str,
    baseline: tuple[Case, Sequence[Condition]] | None = None,
) -> tuple[
    Observation, Observation, tuple[Outputs, Outputs], tuple[DeclinedCalls, ...], Observation
]:
    """Run one rank's part of the proof.

    Only rank 0 returns observations; each rank returns the calls that its kernels declined.
    """
    programs: list[Program] = []
    with restore_global_state(case.plan.model.model, case.loss), enter_modes(Float64()):
        observed = observe_programs(case, conditions, programs)
        programs[saved_condition(conditions)].save(f"{folder}/state")
        report_progress(_SAVED)
        reloaded = load_on_ranks(programs, case, conditions, folder)
        reloaded = reloaded if world.rank() == 0 else NO_OUTPUTS
        native_draws = check_native_draws(programs[0], case.batches[0])
        if native_draws is not None and observed.tensors:
            observed.streams[Key(conditions[0].name, NATIVE_DRAWS, 0, "")] = native_draws

    def left() -> tuple[DeclinedCalls, ...]:
        return merge_declined(
            calls for program in programs for calls in declined_in(program.assembly.module)
        )

    working_run = Observation() if working is None else observe_ranks(working, conditions, programs)
    declined = left()
    programs.clear()
    return observed, working_run, reloaded, declined, _run_baseline(baseline)


def _run_baseline(baseline: tuple[Case, Sequence[Condition]] | None) -> Observation:
    """Observe the baseline's first step; mark a refusal, so that the case is not refused for it."""
    if baseline is None:
        return Observation()
    try:
        return observe_on_rank(*baseline, True)
    except Refusal as refusal:
        setattr(refusal, _BASELINE, True)
        raise


# -- facts and gaps of the report ---------------------------------------------------------------


def _facts(case: Case, runs: TrainingRuns) -> tuple[tuple[str, str], ...]:
    mesh = case.plan.mesh
    derived = (("derived", ", ".join(runs.derived)),) if runs.derived else ()
    return (
        ("mesh", f"{mesh} ({mesh.world} ranks)" if mesh.axes else "one rank"),
        ("seed", str(case.seed)),
        ("dtype", "float64"),
        ("torch", torch.__version__),
        *derived,
    )


def _kernel_facts(
    gains: Sequence[RowGain], declined: Sequence[DeclinedCalls]
) -> Iterator[tuple[str, str]]:
    """Yield what fused rows gain, and calls that kernels declined."""
    yield from (("fused", str(one)) for one in gains)
    yield from (("W703", str(one)) for one in declined)


def _rounding_facts(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield facts of codes and choices as ranks had them, a lower loss scale, and wider gates."""
    yield from {("choices", row.note) for row in rows if row.note.startswith(CHOICES_NOTE)}
    yield from {("working dtype", row.note) for row in rows if row.note.startswith(SCALE_NOTE)}
    rounded_count = sum(row.note == ROUNDED_NOTE for row in rows)
    if rounded_count:
        yield ("in fewer bits", f"{ROUNDED_NOTE} ({rounded_count} rows in the working dtype)")
    yield from _conditioning_facts(rows)


def _conditioning_facts(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield the widest float64 gate, if the original magnifies roundings, or losses cancel."""
    magnified = [row for row in rows if row.note == MAGNIFIED]
    if magnified:
        widest = max(magnified, key=lambda row: row.gate)
        description = (
            f"{len(magnified)} rows have wider gates, at most {widest.gate:.0e} ({widest.place})"
        )
        yield ("conditioning", f"steps of the original magnify roundings: {description}")
    if any(row.note == CANCELS for row in rows):
        yield ("the loss", CANCELS)


def _gaps(
    case: Case, runs: TrainingRuns, expected: Observation, actual: Observation, draws: int
) -> tuple[Any, ...]:
    plan = case.plan
    sizes_by_name = {name: fact.numel for name, fact in plan.model.unique_parameters.items()}
    gaps = find_gaps(
        runs.batches, sizes=dict(plan.mesh.axes), drawn=draws, parameters=sizes_by_name
    )
    statistics = (STATISTICS_GAP,) if case.by_parts else ()
    return (
        *gaps,
        *runs.gaps,
        *statistics,
        *repeating_blocks(plan),
        *unused_parameters(expected),
        *missing_kinds(actual),
    )
