"""plan: show what a schedule does and costs, on the meta device, before anything runs."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlang.verbs.exits import bad_option, show_json
from schedlang.verbs.options import AsJson, Common, verb

if TYPE_CHECKING:
    from schedlang.verbs.inputs import PlannedSchedule
    from schedlang.viz.show import View

Cost = Annotated[
    str | None,
    typer.Option(
        "--cost",
        metavar="F=18,B=37,step=4|T.json",
        help="Milliseconds of a microbatch on one rank's share, or a file of what `run` "
        "printed as JSON beside a timeline: an expected `time(step)` is compared with their step.",
    ),
]


@dataclass(frozen=True)
class OutputFiles:
    """Output files: pictures, and the plan itself; None: not requested."""

    svg: Annotated[Path | None, typer.Option("--svg", help="Draw a picture into this file.")] = None
    html: Annotated[Path | None, typer.Option("--html", help="Draw a page into this file.")] = None
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the timeline for Perfetto or Chrome.")
    ] = None
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Save the plan, for `run --plan` and `diff`.")
    ] = None


@dataclass(frozen=True)
class Locks:
    """The options about the lock file beside the schedule."""

    lock: Annotated[bool, typer.Option("--lock", help="Write FILE.lock.")] = False
    locked: Annotated[
        bool, typer.Option("--locked", help="Only compare with FILE.lock; exit 1 if it differs.")
    ] = False


@dataclass(frozen=True)
class TransferOptions:
    """The other layout of `--transfer`; None: not requested."""

    transfer: Annotated[
        Path | None,
        typer.Option(
            "--transfer",
            metavar="B",
            help="Only show what `schedlang.transfer` sends from this layout into that of another "
            "schedule of the same model.",
        ),
    ] = None
    apart: Annotated[
        bool, typer.Option("--apart", help="The other layout is on other ranks of the job.")
    ] = False


@dataclass(frozen=True)
class RankOptions:
    """The rank whose program is built without values; None: not requested."""

    rank: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Only show what this rank would build: modules, shards, groups, slices of files.",
        ),
    ] = None
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Safetensors files that the rank would read. Only their headers are read."
        ),
    ] = None


@verb
def plan(
    file: Annotated[Path, typer.Argument(help="A schedule.", metavar="FILE")],
    *,
    common: Common,
    cost: Cost = None,
    rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rows of a step, all with the shape of the first row of the model file's batch.",
        ),
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="Print one line for each module.")] = False,
    written: OutputFiles,
    locks: Locks,
    moved: TransferOptions,
    alone: RankOptions,
    as_json: AsJson = False,
) -> None:
    """Show what a schedule does to its model and what this costs, without running anything.

    It prints bytes per rank by class at the peak of a step, the collectives of one step, and the
    timeline at unit cost.  Exit 1 if an `expect` does not hold.
    """
    from schedlang.verbs.inputs import account_costs, check_folders, plan_schedule, use_one_thread

    use_one_thread()  # before numpy is imported
    from schedlang.diagnostics.tables import message_columns, terminal_columns
    from schedlang.verbs.costs import check_expectations, simulate_step
    from schedlang.verbs.lockfile import check_lock, write_lock
    from schedlang.viz.show import format_view, make_view

    start = time.perf_counter()
    check_folders(**vars(written))
    if rows is not None and (locks.lock or locks.locked or moved.transfer is not None):
        title = "`--rows` goes with neither `--lock`, `--locked` nor `--transfer`"
        bad_option(title, "leave it out: these take the model file's batch")
    if locks.locked:
        _check_lock_alone(common, locks)
        check_lock(file, common.model, as_json, show=True)
        return
    if moved.transfer is not None:
        _show_transfer((file, moved.transfer), common, moved.apart, as_json)
        return
    if alone.rank is not None or alone.weights is not None:
        _show_rank(file, common, alone, rows, as_json)
        return
    planned = plan_schedule(file, common.model, common.knob, common.mesh, rows)
    for warning in () if as_json else planned.warnings:
        print(warning.render(message_columns(sys.stderr)) + "\n", file=sys.stderr)
    step_time = simulate_step(planned.plan, cost)
    view = make_view(planned.plan, account_costs(planned, memory=True), file.name, each=each)
    _write_pictures(view, written)
    value = view.to_json() | ({} if step_time is None else {"step_seconds": step_time.seconds})
    if written.out is not None:
        _save_plan(written.out, planned)
    if locks.lock:
        write_lock(planned, view.account, common.knob, common.mesh)
    if as_json:
        show_json({**value, "warnings": [entry.to_json() for entry in planned.warnings]})
    else:
        print(format_view(view, each=each, width=terminal_columns()))
        if step_time is not None:
            print(f"\na step takes {step_time.seconds * 1e3:.4g} ms, {step_time.how[0]}")
        spent = time.perf_counter() - start - planned.imports
        print(f"planned in {spent:.1f} s, imports {planned.imports:.1f} s", file=sys.stderr)
    check_expectations(planned.plan, view.account, step_time)


def _show_transfer(files: tuple[Path, Path], common: Common, apart: bool, as_json: bool) -> None:
    """Print what is sent from the layout of one schedule to that of another."""
    from schedlang.passes.simulate.transfer_traffic import count_transfer
    from schedlang.verbs.inputs import plan_schedule

    first, second = (plan_schedule(file, common.model, common.knob, common.mesh) for file in files)
    report = count_transfer(first.plan, second.plan, first.batch(), first.model.loss, apart=apart)
    show_json(report.to_json()) if as_json else print(report.text(*(file.name for file in files)))


def _show_rank(
    file: Path, common: Common, rank_options: RankOptions, rows: int | None, as_json: bool
) -> None:
    """Print what one rank would build."""
    from schedlang.passes.simulate.one_rank import describe_rank
    from schedlang.verbs.inputs import plan_schedule

    if rank_options.rank is None:
        bad_option("`--weights` shows what a rank reads of them", "say which: `--rank 0`")
    planned = plan_schedule(file, common.model, common.knob, common.mesh, rows)
    batch = planned.batch() or planned.model.batch(0)  # refuses a file without a batch
    report = describe_rank(
        planned.plan, batch, rank_options.rank, planned.model.loss, rank_options.weights
    )
    show_json({"exit": 0, **report.to_json()}) if as_json else print(report.text())


def _check_lock_alone(common: Common, locks: Locks) -> None:
    """Refuse (S109) settings beside `--locked`, which plans with the lock's own settings."""
    if common.knob or common.mesh or locks.lock:
        title = (
            "`--locked` uses the settings of the lock: leave out `--knob`, `--mesh` and `--lock`"
        )
        bad_option(title, "or write a new lock with them: `--lock`")


def _write_pictures(view: View, outputs: OutputFiles) -> None:
    """Write the requested pictures."""
    from schedlang.diagnostics.diagnostic import Refusal
    from schedlang.pipeline.timeline.simulation import simulate_timeline
    from schedlang.verbs.inputs import write_output
    from schedlang.viz.picture import draw_plan, plan_page
    from schedlang.viz.timeline_page import format_trace

    if outputs.svg is not None:
        write_output(outputs.svg, draw_plan(view))
    if outputs.html is not None:
        write_output(outputs.html, plan_page(view))
    if outputs.trace is not None:
        timeline = view.account.timeline
        if timeline is None:
            title = "this plan has no pipeline, so there is no timeline to trace"
            raise Refusal.of("S609", title, helps=("leave out `--trace`",))
        write_output(outputs.trace, format_trace(simulate_timeline(timeline)))


def _save_plan(out: Path, planned: PlannedSchedule) -> None:
    """Save all that a later run needs: text, model, decisions, mesh and actions."""
    import json

    from schedlang.language import printer
    from schedlang.passes.elaborate.plan_record import plan_to_record
    from schedlang.verbs.inputs import write_output

    path = planned.model.path
    saved = {
        "plan": 1,
        "schedule_file": str(planned.file),
        "schedule_text": printer.to_text(planned.tree),
        "model_file": str(path) if path is not None else planned.model.name,
        **{key: value for key, value in plan_to_record(planned.plan).items() if key != "schedule"},
    }
    write_output(out, json.dumps(saved, indent=1, ensure_ascii=False) + "\n")
