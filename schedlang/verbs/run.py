"""run: train a few steps under a schedule, and report loss, speed and memory."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.job_refusals import is_in_job, print_once
from schedlang.diagnostics.tables import message_columns
from schedlang.verbs.exits import FAILS, REFUSED, bad_option, show_json
from schedlang.verbs.options import AsJson, Common, Seed, Timeout, exit_unchecked, verb

if TYPE_CHECKING:
    from schedlang.ir.modelfile import ModelFile
    from schedlang.ir.plan import Plan
    from schedlang.passes.lower.train import MeasuredStep, TrainingResult, TrainingRun
    from schedlang.passes.simulate.step_time import StepSeconds

Run = Annotated[
    Path | None,
    typer.Option(
        "--timeline",
        metavar="OUT.svg|html|json",
        help="Draw the planned and the measured pipeline; json is for Perfetto or Chrome.",
    ),
]
WATCHED = 5  # last steps of a run, whose operations are timed; the median one is drawn


@dataclass(frozen=True)
class Training:
    """The length of a training, its optimizer, and its seed."""

    steps: Annotated[int, typer.Option(metavar="N", help="Number of steps.")] = 20
    lr: Annotated[float | None, typer.Option(help="Learning rate; default 0.003, for sgd 0.1.")] = (
        None
    )
    optimizer: Annotated[str, typer.Option(help="Optimizer: adamw or sgd.")] = "adamw"
    seed: Seed = 0


@verb
def run(
    file: Annotated[Path | None, typer.Argument(help="A schedule.", metavar="FILE")] = None,
    *,
    common: Common,
    training: Training,
    plan: Annotated[
        Path | None, typer.Option(metavar="P.json", help="A saved plan, instead of FILE.")
    ] = None,
    timeline: Run = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Train a few steps under a schedule on the model file's batches; report speed and memory.

    Starts local ranks, or joins the job under torchrun.  Tokens count the full batch, with padding.
    """
    from schedlang.passes.lower.train import TrainingRun, check_run
    from schedlang.verbs.inputs import check_folders

    first = not _under_torchrun() or os.environ["RANK"] == "0"
    bar = _ProgressBar(training.steps, quiet=as_json or not first)
    try:
        check_folders(timeline=timeline)
        with exit_unchecked(timeout, as_json and first, bar.close):
            model_file, planned = _load_plan(file, plan, common, training.seed)
            check_timeline(timeline, planned)
            training_run = TrainingRun(
                planned,
                model_file.batch,
                model_file.loss,
                model_file.weight,
                training.steps,
                training.optimizer.lower(),
                training.lr,
                training.seed,
                WATCHED if timeline is not None else 0,
            )
            check_run(training_run)
            _check_costs(training_run)
            title = file or plan
            assert title is not None
            trained = (
                _train_in_job(training_run, bar)
                if _under_torchrun()
                else _train_locally(training_run, model_file, bar)
            )
    except Refusal as refusal:
        if not is_in_job() or (as_json and first):
            raise
        if not as_json:
            print_once(refusal)
        raise typer.Exit(REFUSED) from None
    if timeline is not None and first and trained.measured is not None:
        write_measured(timeline, trained.measured, title.name, training_run.plan.cuts[0].axis)
    if first:
        _print_results(title.name, training_run, trained, as_json)


def check_timeline(path: Path | None, plan: Plan) -> None:
    """Refuse a picture of a run that has no pipeline (S609), or of another form (S109)."""
    if path is None:
        return
    if path.suffix not in (".svg", ".html", ".json"):
        title = f"the format of `--timeline {path.name}` is not known"
        bad_option(title, "name it *.svg, *.html or *.json")
    if not plan.cuts:
        title = "this plan has no pipeline, so there is no timeline to draw"
        raise Refusal.of("S609", title, helps=("leave out `--timeline`",))


def write_measured(path: Path, measured: MeasuredStep, title: str, axis: str) -> None:
    """Write a measured step beside its simulated one, in the format of the file's suffix.

    `axis` is the pipeline's axis; the lanes are its positions.
    """
    from schedlang.verbs.inputs import write_output
    from schedlang.viz.timeline_page import measured_page, measured_svg, measured_trace

    if path.suffix == ".json":
        write_output(path, measured_trace(measured))
    else:
        make = measured_svg if path.suffix == ".svg" else measured_page
        write_output(path, make(measured, title, f"{axis}="))


def _print_results(
    name: str, training: TrainingRun, trained: TrainingResult, as_json: bool
) -> None:
    """Print the results of a training; exit 1 if it took longer than the schedule expects."""
    from schedlang.passes.simulate.expectations import check_times
    from schedlang.verbs.costs import check_expected_time

    plan, seconds = training.plan, _median_step(trained)
    if as_json:
        show_json(_facts(training, trained, FAILS if list(check_times(plan, seconds)) else 0))
    else:
        print(_report_text(name, training, trained))
        for call in trained.declined_calls:
            print(call.warning.render(message_columns(sys.stderr)), file=sys.stderr)
    check_expected_time(plan, seconds)


def _facts(training: TrainingRun, trained: TrainingResult, code: int) -> dict[str, Any]:
    mesh = training.plan.mesh
    facts = {
        "exit": code,
        "mesh": dict(mesh.sizes),
        "world": mesh.world,
        "steps": training.steps,
        "optimizer": training.optimizer,
        "lr": training.lr,
    }
    return facts | trained.to_json()


def _check_costs(training: TrainingRun) -> None:
    """Refuse rows that gain nothing (S888), and exit 1 for unexpected costs, before any rank
    starts."""
    from schedlang.passes.simulate.expectations import cost_expectations, count_costs
    from schedlang.passes.simulate.kernel_gains import count_step_gains
    from schedlang.verbs.costs import check_expected_costs

    count_step_gains(training.plan, training.batch(training.seed))
    if cost_expectations(training.plan):
        batch = training.batch(training.seed)
        check_expected_costs(
            training.plan, count_costs(training.plan, batch, training.loss, training.weight)
        )


def _median_step(trained: TrainingResult) -> StepSeconds:
    """Return the median step, as rank 0 measured it."""
    from schedlang.passes.simulate.step_time import StepSeconds

    count = len(trained.steps_after_warmup)
    return StepSeconds(trained.median, (f"measured: the median of {count} steps on this machine",))


def _under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _load_plan(
    file: Path | None, record: Path | None, common: Common, seed: int
) -> tuple[ModelFile, Any]:
    """Return the model file and the plan, from a schedule or from a saved plan."""
    from schedlang.ir.model import ModelFacts
    from schedlang.ir.modelfile import load_model_file
    from schedlang.language.syntax import parse, read
    from schedlang.passes.elaborate.plan_record import plan_from_record
    from schedlang.schedule import Schedule
    from schedlang.verbs.inputs import parse_settings, read_saved_plan

    settings = parse_settings(common.knob, common.mesh)
    if (file is None) == (record is None):
        title = "`run` needs either a schedule or a saved plan"
        bad_option(title, "`schedlang run FILE`, or `--plan p.json`")
    if record is not None:
        if settings.knobs or settings.mesh:
            title = "a saved plan has its own settings: `--knob` and `--mesh` are for schedules"
            bad_option(title, "run the schedule, or save a new plan")
        saved, model_file = read_saved_plan(record, common.model)
        return model_file, plan_from_record(saved, ModelFacts(model_file.model(seed=seed)))
    assert file is not None
    source = read(file)
    model_file = load_model_file(common.model, file)
    return model_file, Schedule(model_file.model(seed=seed), parse(source), settings).plan()


def _train_in_job(training: TrainingRun, bar: _ProgressBar) -> TrainingResult:
    """Train as one rank of the job that torchrun started."""
    from functools import partial

    from schedlang.passes.lower.train import train
    from schedlang.passes.verify.probe import check_if_cheap
    from schedlang.runtime.comm.agreement import leave_world
    from schedlang.runtime.launch.hang_watch import waits_for_ranks

    check = partial(check_if_cheap, loss=training.loss, weight=training.weight)
    with waits_for_ranks(), bar:
        trained = train(replace(training, check=check), bar.step)
    leave_world()
    return trained


def _train_locally(
    training: TrainingRun, model_file: ModelFile, bar: _ProgressBar
) -> TrainingResult:
    """Train on ranks started here."""
    from schedlang.passes.lower.train import train
    from schedlang.passes.prove import check_world
    from schedlang.runtime.launch.pool import Pool

    check_world(training.plan, "run")
    training = trace_course(training)
    with Pool(files=model_file.files) as pool, bar:
        world = training.plan.mesh.world
        return pool.run(train, world, training, on_progress=bar.on_message)[0]  # type: ignore[no-any-return]


def trace_course(training: TrainingRun) -> TrainingRun:
    """Return the course with its plan traced once for all ranks; refuses what `verify` refuses."""
    from schedlang.passes.verify import probe
    from schedlang.passes.verify.proof_case import Case

    batch = training.batch(training.seed)
    case = probe.prepare_checked(
        Case(training.plan, (batch,), training.loss, training.weight, training.seed)
    )
    return replace(training, plan=case.plan, prepared=case.prepared)


class _ProgressBar:
    """The progress of a training: a bar on a terminal, else a line now and then."""

    def __init__(self, steps: int, quiet: bool) -> None:
        self.total, self.quiet, self.live = steps, quiet, sys.stderr.isatty()
        self.every = max(1, steps // 10)
        self.bar: Any = None

    def __enter__(self) -> _ProgressBar:
        if self.live and not self.quiet:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
            )
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.start()
            self.task = self.bar.add_task("starting the ranks", total=self.total)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def on_message(self, rank: int, step: Any) -> None:
        """Handle a message of a local rank; only the first rank's are shown."""
        if rank == 0:
            self.step(step)

    def step(self, step: Any) -> None:
        """Show that one step is done."""
        text = f"loss {step.loss:.4f}  {step.work / step.seconds:,.0f} {step.unit}/s"
        if self.bar is not None:
            self.bar.update(self.task, advance=1, description=text)
        elif not self.quiet and step.number % self.every == 0:
            print(f"step {step.number:>4}  {text}", file=sys.stderr, flush=True)


def _report_text(name: str, training: TrainingRun, trained: TrainingResult) -> str:
    """Return the final report of a training as text."""
    mesh, steps = training.plan.mesh, trained.steps
    ranks_text = f"{mesh} ({mesh.world} ranks)" if mesh.axes else "one rank"
    padded = " (padding included)" if steps[0].unit == "tokens" else ""
    lines = [
        f"{name} · {ranks_text} · {len(steps)} steps of {training.optimizer}, lr {training.lr:g}",
        f"  loss    {steps[0].loss:.4f} -> {steps[-1].loss:.4f}",
        f"  speed   {trained.per_second:,.0f} {steps[0].unit}/s{padded}",
        f"  step    {trained.median * 1e3:,.1f} ms (median)",
        *([f"  pipe    {trained.measured.text()}"] if trained.measured is not None else []),
        "  memory  parameters   gradients   optimizer"
        + ("" if _on_cpu(trained) else "        peak"),
        *_memory_lines(trained),
    ]
    rest = "activations are not measured on a CPU" if _on_cpu(trained) else "the peak is all of it"
    return "\n".join([*lines, f"  held between steps, without gathered copies; {rest}"])


def _on_cpu(trained: TrainingResult) -> bool:
    return trained.memory[0].peak is None


def _memory_lines(trained: TrainingResult) -> list[str]:
    """Return one line for the ranks that hold equally much."""
    ranks_by_memory: dict[Any, list[int]] = {}
    for memory in trained.memory:
        ranks_by_memory.setdefault(replace(memory, rank=0), []).append(memory.rank)
    lines = []
    for memory, ranks in ranks_by_memory.items():
        sizes = [memory.parameters, memory.gradients, memory.optimizer]
        sizes += [memory.peak] if memory.peak is not None else []
        ranks_text = f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}"
        lines.append(
            f"        {''.join(f'{_format_size(value):>12}' for value in sizes)}   {ranks_text}"
        )
    return lines


def _format_size(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.2f} GiB"
