"""tune, for a model: search for the schedule that trains it fastest, write it, give the reasons."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schedlang.diagnostics.tables import format_bytes, terminal_columns, wrap_lines
from schedlang.verbs.exits import FAILS, bad_option, check_positive, show_json
from schedlang.verbs.inputs import check_folders, model_to_try, write_output

if TYPE_CHECKING:
    from schedlang.ir.limits import Limits
    from schedlang.ir.modelfile import ModelFile
    from schedlang.passes.planner.aims import Aim
    from schedlang.passes.planner.profile import Profiles
    from schedlang.passes.planner.reasons import RejectedSetting
    from schedlang.passes.planner.search import SearchResult
    from schedlang.passes.planner.search_space import Job
    from schedlang.passes.planner.tuning import WrittenSchedule
    from schedlang.passes.planner.values import Placement
    from schedlang.passes.simulate.machine import Cluster

DTYPES = ("bf16", "fp16", "none")


@dataclass(frozen=True)
class Search:
    """The options of a search: the batch, limits, questions, planner and output file."""

    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            metavar="TOKENS",
            help="Tokens of a step: 4M is 4 x 2^20. Default: the model file's batch.",
        ),
    ] = None
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="Rows of a step, instead of tokens.")
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            help="Compute in bf16 or fp16 with 32-bit master weights; none: the model's dtype.",
        ),
    ] = "bf16"
    pin: Annotated[
        list[str] | None,
        typer.Option(
            "--pin", metavar="NAME=V,..", help="Allow only these values; may be repeated."
        ),
    ] = None
    forbid: Annotated[
        list[str] | None,
        typer.Option(
            "--forbid", metavar="NAME=V,..", help="Exclude these values; may be repeated."
        ),
    ] = None
    least: Annotated[
        list[str] | None,
        typer.Option("--least", metavar="NAME=N", help="Minimum value; may be repeated."),
    ] = None
    why: Annotated[
        list[str] | None,
        typer.Option(
            "--why", metavar="NAME=V", help="Compare this setting with the best; may be repeated."
        ),
    ] = None
    planner: Annotated[
        str | None,
        typer.Option(
            "--planner",
            metavar="NAME",
            help="Plan as a published method: pipedream, alpa, ptd-p, ..; `list` shows all.",
        ),
    ] = None
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the schedule to this file.")
    ] = None

    @property
    def is_given(self) -> bool:
        """Whether any option is given that only a search uses."""
        return self != Search()


def search_model(
    model: ModelFile,
    name: str,
    cluster: Cluster,
    ranks: int,
    limits: Limits,
    options: Search,
    aims: Aims,
    as_json: bool,
) -> None:
    """Search, write and print the schedule; exit 1 where nothing fits.

    `name` is the name of the model's file; `limits` are added to those of the options.
    """
    from schedlang.ir.model import ModelFacts
    from schedlang.passes.planner.limits import parse_limits, parse_question
    from schedlang.passes.planner.paper_planners import find_planner
    from schedlang.passes.planner.profile import Profiles
    from schedlang.passes.planner.search import explain_rejection
    from schedlang.passes.planner.tuning import job_of, length_of, tune_model
    from schedlang.runtime.batch import row_count

    start = time.perf_counter()
    if options.dtype not in DTYPES:
        bad_option(f"`--dtype {options.dtype}` is none of {', '.join(DTYPES)}", "`--dtype bf16`")
    limits = parse_limits(
        options.pin or (), options.forbid or (), options.least or ()
    ).combined_with(limits)
    questions = [parse_question(text) for text in options.why or ()]
    if options.planner is not None:
        find_planner(options.planner)
    check_folders(out=options.out)
    batch, dtype = batch_of(model), "" if options.dtype == "none" else options.dtype
    facts = ModelFacts(model_to_try(model, model.model(meta=True)))
    profiles = Profiles(facts, batch, model.loss, model.weight, dtype)
    job = job_of(profiles, cluster, ranks, _step_rows(batch, options), [limits, *questions])
    aim = aims.read(job.rows, length_of(batch))

    def find(profiles: Profiles, job: Job, before: SearchResult | None) -> SearchResult:
        return _search_best(profiles, job, limits, options.planner, as_json, before)

    if aim is None:
        tuned = tune_model(profiles, job, find)
    else:
        from schedlang.passes.planner.aims import tune_for_aim

        job, tuned = tune_for_aim(profiles, job, aim, find)
    last, schedule = tuned.found, tuned.written
    answers = [
        explain_rejection(profiles, tuned.room, question, last, limits) for question in questions
    ]
    if options.out is not None and schedule is not None:
        write_output(options.out, schedule.file.text)
    if as_json:
        show_json(_plain(job, last, answers, schedule))
    else:
        report = "\n".join(_report_lines(name, job, last, answers, schedule))
        print(wrap_lines(report, terminal_columns()))
        if schedule is not None and options.out is not None:
            print(f"next: schedlang verify {options.out} --shrink --model {name}")
            if job.rows != row_count(batch):
                print(f"or:   schedlang plan {options.out} --rows {job.rows} --model {name}")
        elif schedule is not None:
            print("write it: add `-o best.sched`")
        print(f"searched in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    if schedule is None:
        raise typer.Exit(FAILS)


# -- the batch -------------------------------------------------------------------------------------


def batch_of(model_file: ModelFile) -> Mapping[str, Any]:
    """Return the batch of a model file; refuses S109 a file without one."""
    if not model_file.has_batch:
        bad_option(
            f"`{model_file.name}` has no batch: a step has no cost without one",
            "define `batch(seed)` in it",
        )
    return model_file.batch(0)


def _step_rows(batch: Mapping[str, Any], options: Search) -> int | None:
    """Return the rows of a step from the options."""
    from schedlang.passes.planner.tuning import length_of

    if options.batch is None:
        return options.rows
    length = length_of(batch)
    if options.rows is not None:
        bad_option("`--batch` and `--rows` both say how large a step is", "give one of them")
    tokens = parse_count(options.batch, "--batch")
    if not length or tokens % length:
        rows_text = f"rows of {length} tokens" if length else "rows without tokens"
        title = (
            f"`--batch {options.batch}` is no number of {rows_text}, which this model's batch has"
        )
        suggested = max(1, tokens // length) if length else 8
        bad_option(title, f"give rows: `--rows {suggested}`")
    return tokens // length


# -- the search ------------------------------------------------------------------------------------


def _search_best(
    profiles: Profiles,
    job: Job,
    limits: Limits,
    planner: str | None,
    quiet: bool,
    before: SearchResult | None,
) -> SearchResult:
    """Return the best result, or the best so far after an interrupt; shows progress on a
    terminal."""
    from schedlang.passes.planner.paper_planners import plan_with
    from schedlang.passes.planner.profile import placements_to_simulate
    from schedlang.passes.planner.search import search

    is_live = not quiet and sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if is_live and done % 64 == 0:
            print(f"\r{done} of {total} ways", end="", file=sys.stderr, flush=True)

    last: SearchResult | None = None
    try:
        with profiles.simulating_ahead(placements_to_simulate(job, limits)):
            for result in search(profiles, job, limits, progress, before=before):
                last = result
                if is_live and result.best is not None:
                    status = f"{result.best.least:.4g} s, at most {result.gap:.0%} above the least"
                    print(f"\r{status}", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        if last is None or last.best is None:
            raise
        print("interrupted: the best so far", file=sys.stderr)
    finally:
        if is_live:
            print(f"\r{' ' * 60}\r", end="", file=sys.stderr, flush=True)
    assert last is not None
    return last if planner is None else plan_with(planner, profiles, job, last, limits)


# -- output ----------------------------------------------------------------------------------------


def _report_lines(
    name: str,
    job: Job,
    found: SearchResult,
    answers: Sequence[RejectedSetting],
    schedule: WrittenSchedule | None,
) -> Iterator[str]:
    """Yield the best in words, what was rejected, and answers to questions."""
    from schedlang.passes.planner.tuning import MAX_REASONS

    rows = f"{job.rows} rows" + (f" of {job.length} tokens" if job.length else "")
    yield f"{head_line(name, job.ranks, job.cluster)} · {rows}"
    yield ""
    if schedule is None:
        late = bool(found.rejected) and all("too late" in entry.reason for entry in found.rejected)
        yield "nothing ends in time" if late else "nothing fits"
    else:
        yield f"best      {_describe_setting(found)}"
        yield from (f"          {line}" for line in schedule.remarks)
    yield from (f"rejected  {entry.kind}: {entry.reason}" for entry in found.rejected[:MAX_REASONS])
    yield from (f"asked     {entry.kind}: {entry.reason}" for entry in answers)
    for placement, refusal in found.refused:
        entry = refusal.diagnostics[0]
        yield f"refused   {_describe_placement(placement)}: {entry.code}: {entry.title}"
    if found.attribution:
        return
    counts = found.counts
    end = "none is quicker" if found.done else f"one may be {found.gap:.0%} quicker"
    yield f"{counts.all} ways, {counts.priced} of them priced, {counts.large} too large: {end}"


def head_line(name: str, ranks: int, cluster: Cluster) -> str:
    """Return the head line: model.py · 4 ranks of a100, 80 GiB."""
    return f"{Path(name).name} · {ranks} ranks of {cluster.name}, {format_bytes(cluster.memory)}"


def _describe_placement(placement: Placement) -> str:
    """Describe a placement: tp = 2, cp = 4, .."""
    sizes = {name: getattr(placement, name) for name in ("rows", "tp", "cp", "ep", "slices")}
    parts = [f"{name} = {size}" for name, size in sizes.items() if size > 1 or name == "rows"]
    parts += ["sequence"] * placement.sequence
    return ", ".join([*parts, *[f"offload {placement.offload}"] * (placement.offload != "none")])


def _describe_setting(result: SearchResult) -> str:
    """Describe the best setting: dp = 8, tp = 4, zero 1, .."""
    from schedlang.ir.limits import AXES, format_value
    from schedlang.passes.planner.limits import setting_values

    assert result.best is not None
    setting = setting_values(result.best.setting)
    axes = [name for name in ("dp", "pp", "cp", "ep", "tp") if setting.pop(name) != 1]
    if "pp" not in axes:
        setting.pop("order")
    for name, usual in (("offload", "none"), ("axes", "-".join(AXES))):
        if setting[name] == usual:
            setting.pop(name)
    parts = [f"{name} = {setting_values(result.best.setting)[name]}" for name in axes]
    for name, value in setting.items():
        if name not in ("chunks", "slices") or value != 1:
            parts.append(f"{name} {format_value(value)}")
    return ", ".join(parts)


def _plain(
    job: Job,
    result: SearchResult,
    answers: Sequence[RejectedSetting],
    schedule: WrittenSchedule | None,
) -> dict[str, Any]:
    """Return plain values, in seconds and bytes."""
    best = result.best
    return {
        "cluster": asdict(job.cluster),
        "ranks": job.ranks,
        "rows": job.rows,
        "best": None if best is None else asdict(best),
        "rejected": [asdict(rejected) for rejected in result.rejected],
        "asked": [asdict(rejected) for rejected in answers],
        "refused": [
            {"placement": asdict(placement), "refusal": refusal.diagnostics[0].to_json()}
            for placement, refusal in result.refused
        ],
        "by": list(result.attribution),
        "counts": asdict(result.counts),
        "done": result.done,
        "seconds": None if schedule is None else schedule.seconds,
        "peak": None if schedule is None else schedule.peak,
        "schedule": None if schedule is None else schedule.file.text,
    }


# -- what a search minimises: time, cost or energy of a training -----------------------------------

TIMES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Aims:
    """The quantity of a training to be minimised, the training's length, and its deadline."""

    aim: Annotated[
        str | None,
        typer.Option(
            "--aim",
            metavar="time|cost|energy",
            help="What to minimise over a training; it may use only some nodes of `--on`.",
        ),
    ] = None
    samples: Annotated[
        list[str] | None,
        typer.Option(
            "--samples",
            metavar="[ROWS=]N",
            help="Rows of the training; 512=10M: in steps of 512 rows. May be repeated.",
        ),
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens", metavar="N", help="Tokens of the training, instead of `--samples`."
        ),
    ] = None
    deadline: Annotated[
        str | None,
        typer.Option(
            "--deadline", metavar="72h", help="The training must end within this time (s, m, h, d)."
        ),
    ] = None
    eta: Annotated[
        float, typer.Option("--eta", help="Share of energy in Zeus's cost; the rest is time.")
    ] = 1.0

    @property
    def is_given(self) -> bool:
        """Whether any of these options is given."""
        return self != Aims()

    def read(self, rows: int, length: int) -> Aim | None:
        """Return the aim of a job whose steps have `rows` rows of `length` tokens; None without
        options.

        Raises Refusal S109 for illegal options, and for a training without a length.
        """
        from schedlang.passes.planner.aims import AIMS, COST, ENERGY, TIME, Aim

        if not self.is_given:
            return None
        name = self.aim or TIME
        if name not in AIMS:
            bad_option(f"`--aim {name}` is none of {', '.join(AIMS)}", f"`--aim {COST}`")
        if self.eta != 1 and name != ENERGY:
            bad_option(f"`--eta` weighs energy, not {name}", f"`--aim {ENERGY}`")
        if not 0 <= self.eta <= 1:
            bad_option(f"`--eta {self.eta:g}` is no share", "give one from 0 to 1: `--eta 0.5`")
        samples = (
            self._steps_from_tokens(rows, length)
            if self.tokens is not None
            else self._steps_from_samples(rows)
        )
        return Aim(name, samples, self._deadline_seconds(), self.eta)

    def _steps_from_samples(self, rows: int) -> Mapping[int, float]:
        if not self.samples:
            title = "nothing says how long the training is"
            bad_option(title, "give its rows or tokens: `--samples 10M`, `--tokens 300G`")
        steps: dict[int, float] = {}
        for text in self.samples:
            row_text, _, total_text = text.rpartition("=")
            steps[parse_count(row_text, "--samples") if row_text else rows] = parse_count(
                total_text, "--samples"
            )
        if any(total_text < row_text for row_text, total_text in steps.items()):
            bad_option(
                "a training has fewer rows than one of its steps", "give all: `--samples 10M`"
            )
        return steps

    def _steps_from_tokens(self, rows: int, length: int) -> Mapping[int, float]:
        assert self.tokens is not None
        count = parse_count(self.tokens, "--tokens")
        if self.samples:
            bad_option("`--tokens` and `--samples` both say how long it is", "give one of them")
        if not length:
            bad_option("rows of this model's batch have no tokens", "give rows: `--samples 10M`")
        if count < rows * length:
            bad_option("a training has fewer tokens than one of its steps", "`--tokens 300G`")
        return {rows: count / length}

    def _deadline_seconds(self) -> float:
        if self.deadline is None:
            return math.inf
        number, unit = self.deadline[:-1], self.deadline[-1:].lower()
        try:
            seconds = float(number) * TIMES[unit]
        except (ValueError, KeyError):
            bad_option(f"cannot read `--deadline {self.deadline}`", "write `72h`, `90m` or `3d`")
        check_positive("deadline", seconds)
        return seconds


def parse_count(text: str, option: str) -> int:
    """Parse a number of rows or tokens: 4M is 4 x 2^20; refuses S109."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if unit not in UNITS or not number.isdecimal() or int(number) < 1:
        bad_option(f"cannot read `{option} {text}`", f"write `{option} 4M`: 4 x 2^20")
    return int(number) * UNITS[unit]
