"""verify: run the ranks of a schedule here, and compare them with the original."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlang.garbage_collection import without_collector
from schedlang.verbs.exits import FAILS, HOLDS, UNCHECKED, bad_option, show_json
from schedlang.verbs.options import (
    AsJson,
    Common,
    Seed,
    Timeout,
    WorkingDtype,
    exit_unchecked,
    verb,
)

if TYPE_CHECKING:
    from schedlang.report import Report


@dataclass(frozen=True)
class ForeignProgram:
    """A program that was written elsewhere, and how to run its ranks."""

    against: Annotated[
        Path | None,
        typer.Option(
            "--against", metavar="PROGRAM.py", help="Check this program, written without schedlang."
        ),
    ] = None
    ranks: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --against: number of ranks of the program."),
    ] = None
    as_given: Annotated[
        bool,
        typer.Option("--as-given", help="With --against: use only the batches of the model file."),
    ] = False


@verb
def verify(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A schedule; with --against: the original's model file.", metavar="FILE"
        ),
    ] = None,
    *,
    common: Common,
    foreign: ForeignProgram,
    seed: Seed = 0,
    only: Annotated[
        str | None,
        typer.Option(metavar="LINES", help="Check only the rows on these lines: 11,14-17."),
    ] = None,
    dtype: WorkingDtype = None,
    locked: Annotated[
        bool, typer.Option("--locked", help="First compare with FILE.lock; exit 1 if it differs.")
    ] = False,
    shrink: Annotated[
        bool | None,
        typer.Option(
            "--shrink/--whole",
            help="Verify a reduced model and mesh; the default if the model is on the meta device.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the report as a page into this file.")
    ] = None,
    timeout: Timeout = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Say which errors each gap of the proof could hide."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Prove that a schedule, or a program of yours, computes what the model computes, on a CPU.

    It compares outputs, loss, every gradient, the gradient norm, parameters and optimizer state
    after three steps of two optimizers, buffers, ties and a saved state, in float64 with dropout
    on.
    """
    # numpy's library starts threads on import; with threads the ranks' server cannot be forked from
    # here, and would import everything again
    if "numpy" not in sys.modules:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # imports leave almost no garbage, and a collection would visit all of it
    with without_collector():
        from schedlang.diagnostics.diagnostic import Refusal
        from schedlang.ir.modelfile import load_model_file
        from schedlang.language.syntax import read
        from schedlang.passes.prove import prove
        from schedlang.passes.reduce_model.shrink import with_reduction
        from schedlang.runtime.launch.forkserver import BASE_MODULES, PROGRAM_MODULES
        from schedlang.runtime.launch.frames import call_in_one_piece
        from schedlang.runtime.launch.pool import Pool
        from schedlang.verbs.inputs import check_folders, make_proof_case, parse_settings
        from schedlang.verbs.lockfile import check_lock
        from schedlang.verbs.progress import ProgressLine

    check_folders(html=html)
    of_schedule = {"knob": common.knob, "mesh": common.mesh, "only": only, "locked": locked}
    _check_options(foreign, of_schedule | {"shrink": shrink})
    if foreign.against is not None:
        report = _judge_program(file, common.model, foreign, seed, dtype, timeout, as_json)
        _print_report(report, as_json, html, verbose)
        raise typer.Exit(_exit_code(report))
    if file is None:
        title = "`verify` needs a schedule, or a program of yours"
        helps = ("`schedlang verify FILE`, or `schedlang verify --against program.py`",)
        raise Refusal.of("S109", title, helps=helps)
    read(file)  # refuses a file that is missing before ranks start
    if locked:
        check_lock(file, common.model, as_json)
    settings = parse_settings(common.knob, common.mesh)
    with (
        # forked before there is another thread
        Pool(preload=(*BASE_MODULES, *PROGRAM_MODULES), forked=True) as pool,
        ProgressLine(quiet=as_json) as progress,
        exit_unchecked(timeout, as_json, progress.close),
    ):
        model_file = load_model_file(common.model, file)
        with progress.paused():
            pool.import_files(model_file.files, here=True)
        case = make_proof_case(
            file,
            model_file,
            settings,
            model=common.model,
            seed=seed,
            only=only,
            dtype=dtype,
            shrink=shrink,
        )
        options = {"pool": pool, "title": file.name, "command": case.command, "progress": progress}
        report = call_in_one_piece(prove, case.case, **options)
    _print_report(with_reduction(report, case.small), as_json, html, verbose)
    raise typer.Exit(_exit_code(report))


def _check_options(foreign: ForeignProgram, of_schedule: Mapping[str, object]) -> None:
    """Refuse options that would be ignored: a schedule's for a program, or a program's for a
    schedule."""
    if foreign.against is not None:
        ignored = [option for option, value in of_schedule.items() if value]
        kind, help_ = "a schedule", "leave it out: ranks of a program are counted by `--ranks`"
    else:
        ignored = ["ranks"] * (foreign.ranks is not None) + ["as-given"] * foreign.as_given
        kind, help_ = "a program", "name it: `--against program.py`; a schedule has `--mesh dp=4`"
    if ignored:
        bad_option(f"`--{ignored[0]}` is about {kind}, and none is verified", help_)


def _exit_code(report: Report) -> int:
    return report.exit_code if report.exit_code in (HOLDS, FAILS) else UNCHECKED


def _judge_program(
    file: Path | None,
    model: str | None,
    foreign: ForeignProgram,
    seed: int,
    dtype: str | None,
    timeout: float | None,
    as_json: bool,
) -> Report:
    """Return the report of a program that was written elsewhere, against the original's file."""
    from schedlang.passes.judge.judge import judge, load_task
    from schedlang.passes.verify.mapped_tensors import limit_malloc_cache
    from schedlang.verbs.progress import ProgressLine

    limit_malloc_cache()  # this process runs only this verb
    path = foreign.against
    assert path is not None
    with ProgressLine(quiet=as_json) as progress, exit_unchecked(timeout, as_json, progress.close):
        original = str(file) if file is not None else model
        options = {"seed": seed, "vary": not foreign.as_given, "quiet": as_json}
        loaded = load_task(path, original, foreign.ranks, dtype=dtype, **options)
        parts = ["schedlang verify", *([original] if original else []), f"--against {path}"]
        parts += [f"--ranks {loaded.task.world}", f"--seed {seed}"]
        parts += ["--as-given"] * foreign.as_given + [f"--dtype {dtype}"] * (dtype is not None)
        with loaded.pool() as pool:
            command = " ".join(parts)
            return judge(
                loaded.task, pool=pool, title=loaded.title, command=command, progress=progress
            )


def _print_report(report: Report, as_json: bool, html: Path | None, verbose: bool) -> None:
    from schedlang.report import WIDTH, html_page, report_lines
    from schedlang.verbs.inputs import write_output

    if html is not None:
        write_output(html, html_page(report))
    if as_json:
        show_json(report.to_json())
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    width = console.width if console.is_terminal else WIDTH
    for style, text in report_lines(report, width, verbose=verbose):
        console.print(Text(text, style=style), soft_wrap=True)
