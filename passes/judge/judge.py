"""Verify a distributed program that was written elsewhere against its original model.

How a verdict is made:

* `load_task` reads the files into a `Task`. `judge` makes a `Trial` of the task: the original in
  float64 or in a low dtype, and the conditions (optimizer, batches, clipping) of all runs.
* The trial runs on ranks (`trial.py`). Each rank makes its `TrainingProgram` (`program.py`) and
  matches its tensors with the original's by value (`layouts.py`, `regions.py`), as well as its
  dropout calls (`dropout_masks.py`, `tensor_search.py`). It trains (`subject.py`),
  saves and loads (`state_loading.py`). Rank 0 returns its observation and what
  ranks recorded besides (`record.py`).
* The original trains under the same conditions, and both are compared: in float64 with the gates of
  `verify`, in a low dtype with the distance that roundings move the original (`low_dtype.py`,
  `discrete_choices.py`). `program_rows.py` makes the rows and gaps that only such programs have.
* Where rows fail, sentences explain them. `explanations.py` names the arithmetic that makes a wrong
  gradient (`gradient_errors.py`), loss or norm from values of ranks or of parts of the batch
  (`batch_parts.py`), or a later loss from earlier weights;
  `low_dtype_errors.py` does so in a low dtype, and `low_dtype_steps.py` examines the optimizer's
  steps there. `first_difference.py` runs one step again on both sides and names the first module
  that differs (`module_calls.py`, `module_comparison.py`). Then it looks for the cause: terms of
  the gradient (`gradient_terms.py`), elements that one rank owns, the module's inputs, the
  positions it depends on (`module_inputs.py`).
* Where all rows hold, further ones are made: of dropout that could not be compared by places
  (`kept_dropout.py`), of ranks' seeds (`step_draws.py`), of the loss that the program reports in
  evaluation (`evaluation_loss.py`), and of the dtype of reductions (`reduction_dtype.py`).
* A program whose steps are no gradients of the batch simulates them (`simulated_step.py`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.model import ModelFacts
from schedlang.ir.modelfile import load_model_file
from schedlang.ir.plan import Plan
from schedlang.ir.pytree import make_picklable
from schedlang.passes.judge import async_collectives
from schedlang.passes.judge.batch_parts import BatchParts
from schedlang.passes.judge.evaluation_loss import evaluation_loss_rows, explain_evaluation
from schedlang.passes.judge.explanations import FirstModule, explain_masks, explain_rows
from schedlang.passes.judge.first_difference import find_first_module
from schedlang.passes.judge.kept_dropout import kept_rows
from schedlang.passes.judge.low_dtype import Comparison, cast_case, compare_low_dtype
from schedlang.passes.judge.low_dtype_errors import explain_low_dtype
from schedlang.passes.judge.program import Make, check_ranks, load_program
from schedlang.passes.judge.program_rows import (
    adopt_optimizer,
    align_observations,
    dropout_gaps,
    dropout_rows,
    evaluation_rows,
    initial_rows,
    saved_gaps,
    saved_rows,
)
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.reduction_dtype import (
    explain_reductions,
    reduction_gaps,
    reduction_rows,
)
from schedlang.passes.judge.simulated_step import add_local_steps, original_loop, simulation_gaps
from schedlang.passes.judge.step_draws import (
    RANDOM,
    SeededSequential,
    describe_extra_draws,
    refuse_unequal_draws,
    seed_rows,
)
from schedlang.passes.judge.trial import Progress, Trial
from schedlang.passes.localize.diagnosis import NO_PATTERN
from schedlang.passes.verify.compare import compare
from schedlang.passes.verify.observe import (
    Batch,
    Condition,
    Observation,
    observe,
    standard_conditions,
)
from schedlang.passes.verify.original import randomise
from schedlang.passes.verify.original_checks import check_finite, check_trainable
from schedlang.passes.verify.proof_case import Case, copy_original
from schedlang.passes.verify.requirements import STEPS
from schedlang.passes.verify.training_runs import (
    HALF_VOCABULARY,
    PADDING,
    BatchSet,
    LabelInput,
    find_gaps,
    missing_kinds,
    non_float_tensors,
    unused_parameters,
    vary_batches,
)
from schedlang.report import Gap, Report, Row
from schedlang.runtime.batch import split_rows
from schedlang.runtime.float64 import Float64, as_float64, to_float64
from schedlang.runtime.launch.forkserver import BASE_MODULES, PROGRAM_MODULES
from schedlang.runtime.launch.pool import Hang, Pool, shared_pool, temporary_folder
from schedlang.runtime.launch.rank_job import lift_limit
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.rng.logical_dropout import ConstantDraws, NoDropout

MOST_RANKS = 8
IGNORE_INDEX = -100  # the default of torch's losses
_CALLERS = ("judge/program.py", "judge/subject.py")  # files that call a user's functions


@dataclass(frozen=True)
class Task:
    """Task of `judge`: a program, its original, and how the two are compared.

    vary   change some batches, so that they show what the given batches all hide
    quiet  print ranks' lines on standard error, because standard output is a document
    dtype  name of the dtype that the program is run in; None: float64
    """

    make: Make
    original: nn.Module
    batches: tuple[Batch, ...]
    world: int
    loss: Any = None
    seed: int = 0
    vary: bool = True
    quiet: bool = False
    dtype: str | None = None


def judge(
    task: Task,
    *,
    pool: Pool | None = None,
    title: str = "",
    command: str = "",
    progress: Progress = lambda stage, done=0, total=0: None,
) -> Report:
    """Compare a program with its original; if they differ, explain the difference.

    Raises Refusal for a program or batch that cannot be run, RankDied or Hang for a run that
    failed.
    """
    start = time.perf_counter()
    _check_world(task.world)
    exact = check_trainable(_float64_case(task))
    progress("the original")
    conditions, batch_set, derived = _conditions(exact, task)
    case = exact
    if task.dtype is not None:
        case, conditions = cast_case(task.dtype, _plain_case(task, task.original), conditions)
    settings = pool or shared_pool(), task.dtype is None, task.quiet
    trial = Trial(case, task.make, task.world, tuple(conditions), *settings)
    try:
        with temporary_folder() as folder:
            report = _Judging(task, trial, exact, batch_set, derived).verdict(folder, progress)
    except Hang as hang:
        raise hang.with_user_calls(_CALLERS) from None
    report = replace(report, title=title, command=command)
    return replace(report, seconds=time.perf_counter() - start)


@dataclass(frozen=True)
class _Judging:
    """Inputs of a verdict.

    trial    the program and its original
    exact    the original in float64
    seen     all batches of the runs
    derived  names of the changes made to the given batches
    """

    task: Task
    trial: Trial
    exact: Case
    seen: BatchSet
    derived: Sequence[str]

    def verdict(self, folder: str, progress: Progress) -> Report:
        """Run both sides, compare them, and explain the differences."""
        trial, actual, record = self.trial.train(folder, progress)
        conditions, actual = adopt_optimizer(trial.conditions, actual, record)
        if self.task.dtype is None:
            result = _in_float64(trial, conditions, actual, record)
        else:
            result = compare_low_dtype(self.task.dtype, trial, conditions, actual, record)
        check_finite(self.exact, conditions, result.own_choices)
        report = Report(
            (
                *initial_rows(trial.case.plan.model.model, record),
                *dropout_rows(trial.drops, record),
                *evaluation_rows(trial, record),
                *async_collectives.unwaited_rows(record.unwaited),
                *result.rows,
                *saved_rows(trial.case, result.actual, record, conditions),
                *(record.loaded.rows(conditions[-1]) if record.loaded else ()),
            ),
            facts=(*self._facts(record), *result.facts),
            gaps=self._gaps(trial, result, record),
            unchecked=tuple(result.undecided),
        )
        if all(row.ok for row in report.rows):
            further, lines = _further_rows(trial, conditions, record)
            reduced = tuple(reduction_rows(conditions, record))
            further, lines = (*further, *reduced), (*lines, *explain_reductions(reduced))
            return replace(report, rows=(*report.rows, *further), localised=lines)
        refuse_unequal_draws(record.unequal_draws, trial.drops.generators)
        progress("the kind of mistake")
        first = FirstModule()
        if record.simulation is None:  # else modules run in other steps
            args = trial, conditions, report, record, self.task.dtype, result.chosen
            first = find_first_module(*args)
        named_trial = replace(trial, conditions=tuple(conditions))
        parts = BatchParts(
            named_trial if trial.float64 else named_trial.in_float64, self.seen.labels, first.rows
        )
        if result.bounds is None:
            explanation = explain_rows(
                report, result.expected, result.actual, record, trial.world, parts, first
            )
        else:
            bounds = result.bounds
            explanation = explain_low_dtype(
                report.rows, bounds, result.actual, record, trial.world, parts, first
            )
        drawn = describe_extra_draws(record.unequal_draws)
        alone = self._explain_step_alone(report.first, conditions, explanation, progress)
        lines = (*(alone or explanation), *drawn)
        return replace(report, localised=add_local_steps(lines, record))

    def _explain_step_alone(
        self,
        row: Row | None,
        conditions: Sequence[Condition],
        explanation: Sequence[tuple[str, str]],
        progress: Progress,
    ) -> list[tuple[str, str]]:
        """Explain a later step that nothing explains, by its batch alone, from the first weights.

        If the batch alone is right, the step before left something wrong.
        """
        if row is None or not row.step or row.kind not in ("loss", "gradients", "replicas"):
            return []
        if self.task.dtype is not None or not all(
            NO_PATTERN.text in text for _, text in explanation
        ):
            return []
        number = [condition.name for condition in conditions].index(row.condition)
        trial = self.trial.of_step(self.trial.conditions[number], row.step)
        with temporary_folder() as folder:
            report = replace(self, trial=trial).verdict(folder, progress)
        if report.ok:
            text = (
                f"step {row.step} is the first wrong one, and its batch is right with the initial "
                f"weights: what step {row.step - 1} leaves is wrong (weights, moments, counts)"
            )
            return [(row.kind, text)]
        return [(head, f"{text} (step {row.step})") for head, text in report.localised]

    def _facts(self, record: RunRecord) -> Iterator[tuple[str, str]]:
        holdings, ranks = record.holdings, self.task.world
        assert holdings is not None
        yield "", f"{ranks} rank{'s' * (ranks > 1)}"
        yield "seed", str(self.task.seed)
        yield "dtype", self.task.dtype or "float64"
        yield "torch", torch.__version__
        if record.simulation is not None:
            yield "original", "its step is simulated by the program's `original`"
        if holdings.axes:
            yield "mesh", ", ".join(f"{k}={n}" for k, n in holdings.axes.items())
        if self.derived:
            yield "derived", ", ".join(self.derived)
        if by_name := sorted(
            {tensor.name for tensor in holdings.all_tensors if tensor.matched_by == "name"}
        ):
            yield "matched by name", ", ".join(by_name[:8])
        for name, count in holdings.padding.items():
            yield "padding", f"{count} elements of {name}"

    def _gaps(self, trial: Trial, comparison: Comparison, record: RunRecord) -> tuple[Gap, ...]:
        assert record.holdings is not None
        parameters = dict(trial.case.plan.model.model.named_parameters())
        sizes = {name: p.numel() for name, p in parameters.items()}
        drop_count = len(trial.drops.sites)
        gaps = find_gaps(self.seen, sizes=record.holdings.axes, drawn=drop_count, parameters=sizes)
        rest = [gap for gap in gaps if gap.condition != "no float inputs"]
        rest += dropout_gaps(trial.drops, record)
        if all(p.requires_grad for p in parameters.values()):
            rest.append(Gap("no frozen parameters", "frozen weights that are updated"))
        rest += saved_gaps(record)
        for name in sorted(record.lost_buffers):
            rest.append(Gap(f"buffer `{name}`: no rank has it by this name", "wrong values in it"))
        return (
            *async_collectives.low_dtype_gaps(record.low_dtypes),
            *rest,
            *simulation_gaps(self.task.dtype, record),
            *reduction_gaps(self.task.dtype, record),
            *unused_parameters(comparison.expected),
            *missing_kinds(comparison.actual),
        )


def _further_rows(
    trial: Trial, conditions: Sequence[Condition], record: RunRecord
) -> tuple[tuple[Row, ...], tuple[tuple[str, str], ...]]:
    """Return rows of what steps do not show, and sentences about those that fail."""
    kept = tuple(kept_rows(trial, conditions[0], record))
    seeds = tuple(seed_rows(record.other_seeds, record.unequal_draws))
    evaluated = tuple(evaluation_loss_rows(trial, record))
    lines = (
        *explain_masks((*kept, *evaluated)),
        *((RANDOM, f"{row.name}: {row.note}") for row in seeds),
        *explain_evaluation(evaluated),
    )
    return (*kept, *seeds, *evaluated), lines


def _in_float64(
    trial: Trial, conditions: Sequence[Condition], observed: Observation, record: RunRecord
) -> Comparison:
    """Train the original under the same conditions, and compare with the gates of `verify`."""

    loop = original_loop(record)

    def make(run: Condition) -> SeededSequential:
        options: dict[str, Any] = {"clip": run.clip, "evaluate": run.evaluate, "follow": False}
        return loop(copy_original(trial.case), run.optimizer, loss=trial.case.loss, **options)

    with enter_modes(*trial.modes):
        original_run = observe(make, conditions, folder=trial.drops.folder)
    expected, actual = align_observations(original_run, observed, record)
    return Comparison(compare(expected, actual), original_run, expected, actual)


@dataclass(frozen=True)
class JudgeTask:
    """A task, and the files (of the program, of the original) that every rank must load."""

    task: Task
    title: str
    files: Mapping[str, Path]

    @contextlib.contextmanager
    def pool(self) -> Iterator[Pool]:
        """Start ranks that can load the files."""
        with Pool(preload=(*BASE_MODULES, *PROGRAM_MODULES), files=dict(self.files)) as pool:
            yield pool
            lift_limit()  # the verdict is made: ending ranks does not count for its timeout


def load_task(
    program: Make | Path, model: str | None, ranks: int | None, **options: Any
) -> JudgeTask:
    """Read the files of a program and of its original; default: the `model.py` beside the program.

    `options` are fields of `Task`. A field that `options` names replaces what the files say.
    """
    files: dict[str, Path] = {}
    name, make, program_path = "a program", program, None
    if isinstance(program, Path):
        written = load_program(program)
        name, make, program_path = program.name, written.program, program
        files |= written.files
        ranks = ranks if ranks is not None else written.world
    check_ranks(ranks)
    assert ranks is not None and not isinstance(make, Path)
    seed = options.get("seed", 0)
    if "original" not in options or "batches" not in options:
        model_file = load_model_file(model, program_path)
        files |= model_file.files
        options.setdefault("original", model_file.model(seed=seed))
        options.setdefault("loss", model_file.loss)
        if "batches" not in options:
            options["batches"] = tuple(model_file.batch(seed + step) for step in range(STEPS))
    return JudgeTask(Task(make, world=ranks, **options), name, files)


def _check_world(world: int) -> None:
    if world <= MOST_RANKS:
        return
    message = f"`verify` starts at most {MOST_RANKS} ranks on one machine, not {world}"
    raise Refusal.of("S702", message, helps=("check the program with fewer ranks: `--ranks 4`",))


def _float64_case(task: Task) -> Case:
    """Return the original in float64 with randomised, distinct weights; the plan has no rows."""
    if any(t.is_meta for t in (*task.original.parameters(), *task.original.buffers())):
        message = "the model has no values: it is on the meta device"
        raise Refusal.of("S623", message, helps=("make a small one with values",))
    _check_weights(task.original)
    module = randomise(as_float64(task.original), task.seed)
    case = _plain_case(task, module)
    return replace(case, batches=tuple(to_float64(dict(batch)) for batch in case.batches))


def _check_weights(module: nn.Module) -> None:
    """Refuse complex weights (S763), and tables with sparse gradients (S868)."""
    for name, p in module.named_parameters():
        if p.is_complex():
            message = f"`{name}` is complex: weights are looked up by real values"
            helps = (
                "keep its real and imaginary parts as a real weight, and call "
                f"`torch.view_as_complex(self.{name.rpartition('.')[2]})` in the forward",
            )
            raise Refusal.of("S763", message, helps=helps)
    for name, submodule in module.named_modules():
        if getattr(submodule, "sparse", False) is True:
            message = f"the gradient of `{name}.weight` would be sparse: dense ones are compared"
            helps = ("make it with `sparse=False` in `model()`: it is the same gradient",)
            raise Refusal.of("S868", message, helps=helps)


def _plain_case(task: Task, module: nn.Module) -> Case:
    make_picklable(module)
    return Case(Plan(ModelFacts(module)), task.batches, task.loss, None, task.seed, "none")


def _conditions(case: Case, task: Task) -> tuple[list[Condition], BatchSet, list[str]]:
    """Return the conditions, the batches that all runs use, and the names of derived changes.

    SGD trains on the batches as given; AdamW, clipped, trains on variants of them.
    """
    batches = case.batches

    def cut(count: int) -> list[range]:
        return [part for part in split_rows(count, task.world) if part]

    norm = _norm(case, batches[0])
    assert norm is not None
    names = [n for n, v in non_float_tensors(batches[0]).items() if "label" in n or "target" in n]
    label_values = {name: _ignored_label(case, batches, name) for name in names}
    labels = [LabelInput(name, value) for name, value in label_values.items() if value is not None]
    batch_set = BatchSet(batches, cut, labels)
    varied, derived = list(batches), []
    if task.vary:
        varied, changes = vary_batches(batch_set, (PADDING, HALF_VOCABULARY))
        for index, change_names in changes.items():
            if _norm(case, varied[index]) is None:
                varied[index] = batches[index]
            else:
                derived += change_names
    made_conditions = [replace(c, follow=False) for c in standard_conditions(batches, norm, varied)]
    return made_conditions, replace(batch_set, all=(*batches, *varied)), derived


def _norm(case: Case, batch: Batch) -> float | None:
    """Return the original's gradient norm for a batch; None if the original rejects the batch."""
    try:
        with enter_modes(Float64(), NoDropout(ConstantDraws())):
            original = SeededSequential(copy_original(case), loss=case.loss, follow=False)
            norm = original.gradient_norm(batch)
    except Refusal:
        raise
    except Exception as error:  # any error of the model for a derived batch
        if batch is not case.batches[0]:
            return None
        text = f"{type(error).__name__}: {error}".split("\n")[0]
        message = f"the original rejects its batch: {text}"
        helps = ("return the keyword arguments of the model's forward from `batch(seed)`",)
        raise Refusal.of("S604", message, helps=helps) from error
    return norm if math.isfinite(norm) or batch is case.batches[0] else None


def _ignored_label(case: Case, batches: Sequence[Batch], name: str) -> int | None:
    """Return the label that the loss ignores: -100 if accepted, else a negative one."""
    smallest = min(int(batch[name].min()) for batch in batches if batch[name].numel())
    for value in (IGNORE_INDEX, smallest):
        changed = batches[0][name].clone().reshape(-1)
        changed[-1:] = value
        batch = {**batches[0], name: changed.reshape(batches[0][name].shape)}
        if value < 0 and _norm(case, batch) is not None:
            return value
    return None
