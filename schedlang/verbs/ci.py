"""ci: check, compare and verify many schedules; on GitHub, annotate their lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.tables import terminal_columns, wrap_lines
from schedlang.verbs.exits import FAILS, HOLDS, REFUSED, UNCHECKED, bad_option, show_json
from schedlang.verbs.options import AsJson, Common, Seed, WorkingDtype, verb

if TYPE_CHECKING:
    from schedlang.verbs.examine import Outcome, ProofTerms


@dataclass(frozen=True)
class ProofLimits:
    """The seed and the limits of proofs, and the schedules that must be refused."""

    seed: Seed = 0
    dtype: WorkingDtype = None
    world: Annotated[int, typer.Option(metavar="N", help="Maximum number of ranks to start.")] = 8
    refused: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE:CODE", help="A schedule that must fail with this code; may be repeated."
        ),
    ] = None
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.001,
            help="Stop each proof after this many seconds; it then counts as not checked.",
        ),
    ] = None


@dataclass(frozen=True)
class ExtraChecks:
    """The examinations of each schedule in addition to its check."""

    static: Annotated[bool, typer.Option("--static", help="Start no ranks: no `verify`.")] = False
    shrink: Annotated[
        bool,
        typer.Option(
            "--shrink", help="Reduce model and mesh if the mesh is larger than `--world`."
        ),
    ] = False
    locked: Annotated[
        bool,
        typer.Option("--locked", help="Require for every schedule with rows a lock that holds."),
    ] = False


@verb
def ci(
    paths: Annotated[
        list[Path], typer.Argument(help="Schedules, or folders of them.", metavar="PATH")
    ],
    *,
    common: Common,
    terms: ProofLimits,
    asks: ExtraChecks,
    svg: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw each plan into this folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check schedules, compare the locks that exist, prove what needs no run, and verify.

    In a GitHub workflow it annotates the lines with errors and adds a table to the job's summary.
    If a mesh is larger than `--world`, its schedule is skipped and counts as not checked.
    """
    from schedlang.verbs.examine import ProofTerms, RankPool

    files = list(_find_schedules(paths))
    expected = _expected_refusals(terms.refused or (), files)
    wish = ProofTerms(
        common.model,
        tuple(common.knob or ()),
        common.mesh,
        terms.seed,
        terms.dtype,
        terms.world,
        asks.shrink,
        timeout=terms.timeout,
    )
    outcomes: list[Outcome] = []
    with RankPool() as ranks:
        for file in files:
            own_wish = replace(wish, refused=expected.get(file.resolve(), ""))
            for outcome in _examine_file(file, own_wish, asks, ranks):
                outcomes.append(outcome)
                if not as_json:
                    _print_outcome(outcome)
            if svg is not None and outcomes[-1].code == HOLDS and not own_wish.refused:
                _draw_plan(file, own_wish, svg)
    _annotate_github(outcomes, sys.stderr if as_json else sys.stdout)
    code = _exit_code(outcomes)
    if as_json:
        show_json({"exit": code, "outcomes": [outcome.to_json() for outcome in outcomes]})
    raise typer.Exit(code)


def _examine_file(
    file: Path, terms: ProofTerms, checks: ExtraChecks, ranks: object
) -> Iterator[Outcome]:
    """Yield the outcomes for one file; stop at the first that does not hold."""
    from schedlang.verbs import examine
    from schedlang.verbs.lockfile import lock_path

    assert isinstance(ranks, examine.RankPool)
    first = examine.check(file, terms)
    yield first
    if first.code != HOLDS or examine.is_library(file):
        return
    if not terms.refused and (checks.locked or lock_path(file).exists()):
        yield examine.lock(file, terms)
    second = examine.static(file, terms)
    yield second
    if second.code == HOLDS and not checks.static:
        yield examine.verify(file, terms, ranks)


def _find_schedules(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the named files, and those below the named folders, in order; refuses S000."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        schedules = sorted(path.rglob("*.sched"))
        visible = [p for p in schedules if not any(x[0] == "." for x in p.relative_to(path).parts)]
        if not visible:
            title = f"there is no schedule below `{path}`"
            raise Refusal.of("S000", title, helps=("give the files: `x.sched`",))
        yield from visible


def _expected_refusals(texts: Sequence[str], files: Sequence[Path]) -> dict[Path, str]:
    """Return the schedules that must be refused, each with its code; refuses S109 unknown ones."""
    paths, expected = {file.resolve() for file in files}, {}
    for text in texts:
        name, _, code = text.rpartition(":")
        if Path(name).resolve() not in paths or not code:
            title = f"`--refused {text}` matches none of the schedules"
            bad_option(title, "write the file, a colon and the code: `--refused x.sched:S403`")
        expected[Path(name).resolve()] = code.strip()
    return expected


def _print_outcome(outcome: Outcome) -> None:
    """Print one line for an outcome that holds, and the full text for one that does not."""
    print(f"{outcome.file}: {outcome.question} {outcome.word}  {outcome.seconds:.1f} s", flush=True)
    if outcome.skipped or outcome.code != HOLDS:
        print(wrap_lines(outcome.skipped or outcome.text, terminal_columns()), flush=True)
    elif outcome.text and outcome.question == "check":
        print(wrap_lines(outcome.text, terminal_columns(sys.stderr)), file=sys.stderr)


def _annotate_github(outcomes: Sequence[Outcome], out: TextIO) -> None:
    """Print annotations to `out` and write the job's summary; nothing outside of GitHub.

    The runner reads commands from both streams, so that JSON can stay alone on standard output.
    """
    from schedlang.diagnostics.annotate import annotation, on_github, summarize
    from schedlang.verbs.examine import summary

    if not on_github():
        return
    for outcome in outcomes:
        if outcome.note is not None:
            print(annotation(outcome.note), file=out)
    summarize(summary([outcome.to_json() for outcome in outcomes]))


def _exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return 1 if anything does not hold, else 2 if any was refused, else 3 if any was not
    checked."""
    codes = {UNCHECKED if outcome.skipped else outcome.code for outcome in outcomes}
    return next((code for code in (FAILS, REFUSED, UNCHECKED) if code in codes), HOLDS)


def _draw_plan(file: Path, terms: ProofTerms, folder: Path) -> None:
    """Draw a plan into the folder, in a file named after the schedule's path."""
    from schedlang.verbs.examine import is_library
    from schedlang.verbs.inputs import account_costs, plan_schedule, write_text
    from schedlang.viz.picture import draw_plan
    from schedlang.viz.show import make_view

    if is_library(file):
        return
    planned = plan_schedule(file, terms.model, terms.knobs, terms.mesh)
    folder.mkdir(parents=True, exist_ok=True)
    parts = [part for part in file.parts if part not in ("..", ".", file.anchor)]
    svg = draw_plan(make_view(planned.plan, account_costs(planned), file.name))
    write_text(folder / f"{'.'.join(parts)}.svg", svg)
