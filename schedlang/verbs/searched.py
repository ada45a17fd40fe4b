"""tune, for a model: search for the schedule that trains it fastest, write it, give the reasons."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schedlang.verbs.ending import FAILS, bad_option, show_json
from schedlang.verbs.inputs import check_folders, of_rows, to_try, write_asked

if TYPE_CHECKING:
    from schedlang.ir.limits import Limits
    from schedlang.ir.modelfile import ModelFile
    from schedlang.passes.planner.profile import Profiles
    from schedlang.passes.planner.reasons import Rejected
    from schedlang.passes.planner.search import Found
    from schedlang.passes.planner.space import Job
    from schedlang.passes.planner.values import Placement
    from schedlang.passes.simulate.machine import Cluster

DTYPES = ("bf16", "fp16", "none")


@dataclass(frozen=True)
class Search:
    """A search for a model's schedule: the batch, limits, a question, where the schedule goes."""

    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            metavar="TOKENS",
            help="Tokens of a step: 4M is 4 x 2^20. Default: the model file's batch.",
        ),
    ] = None
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="Rows of a step, in place of tokens.")
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="Compute in bf16 or fp16 beside masters in 32 bits; none: as the model."
        ),
    ] = "bf16"
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", metavar="NAME=V,..", help="Only these values; may be repeated."),
    ] = None
    forbid: Annotated[
        list[str] | None,
        typer.Option("--forbid", metavar="NAME=V,..", help="Not these values; may be repeated."),
    ] = None
    least: Annotated[
        list[str] | None,
        typer.Option("--least", metavar="NAME=N", help="So many at least; may be repeated."),
    ] = None
    why: Annotated[
        list[str] | None,
        typer.Option("--why", metavar="NAME=V", help="Price this beside the best; repeatable."),
    ] = None
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the schedule to this file.")
    ] = None

    @property
    def given(self) -> bool:
        """Whether anything is asked that only a search answers."""
        return self != Search()


def searched(
    model: ModelFile,
    name: str,
    cluster: Cluster,
    ranks: int,
    limits: Limits,
    asked: Search,
    as_json: bool,
) -> None:
    """Search, write and tell; exit 1 where nothing fits.

    `name` is that of the model's file; `limits` bind beside those asked for.
    """
    from schedlang.diagnostics.tables import columns, fitted
    from schedlang.ir.model import ModelFacts
    from schedlang.passes.planner.limits import asked as question
    from schedlang.passes.planner.limits import limits_of
    from schedlang.passes.planner.profile import Profiles
    from schedlang.passes.planner.search import why
    from schedlang.runtime.batch import rows_of

    start = time.perf_counter()
    if asked.dtype not in DTYPES:
        bad_option(f"`--dtype {asked.dtype}` is none of {', '.join(DTYPES)}", "`--dtype bf16`")
    limits = limits_of(asked.pin or (), asked.forbid or (), asked.least or ()).within(limits)
    questions = [question(text) for text in asked.why or ()]
    check_folders(out=asked.out)
    batch, dtype = batch_of(model), "" if asked.dtype == "none" else asked.dtype
    facts = ModelFacts(to_try(model, model.model(meta=True)))
    profiles = Profiles(facts, batch, model.loss, model.weight, dtype)
    job = _job(batch, asked, profiles, cluster, ranks)
    last, written, room = _fitting(profiles, job, limits, quiet=as_json)
    answers = [why(profiles, room, one, last, limits) for one in questions]
    if asked.out is not None and written is not None:
        write_asked(asked.out, written.text)
    if as_json:
        show_json(_plain(job, last, answers, written))
    else:
        told = "\n".join(_told(name, job, last, answers, written))
        print(fitted(told, columns()))
        if written is not None and asked.out is not None:
            print(f"next: schedlang verify {asked.out} --shrink --model {name}")
            if job.rows != rows_of(batch):
                print(f"or:   schedlang plan {asked.out} --rows {job.rows} --model {name}")
        elif written is not None:
            print("write it: add `-o best.sched`")
        print(f"searched in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    if written is None:
        raise typer.Exit(FAILS)


# -- what is asked ---------------------------------------------------------------------------------


def batch_of(found: ModelFile) -> Mapping[str, Any]:
    """The batch of a model file (S109 where it has none)."""
    if not found.has_batch:
        bad_option(
            f"`{found.name}` has no batch: a step has no cost without one",
            "define `batch(seed)` in it",
        )
    return found.batch(0)


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def _tokens(text: str) -> int:
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if unit not in UNITS or not number.isdecimal() or int(number) < 1:
        bad_option(f"cannot read `--batch {text}`", "write `--batch 4M`: 4 x 2^20 tokens")
    return int(number) * UNITS[unit]


def _job(
    batch: Mapping[str, Any], asked: Search, profiles: Profiles, cluster: Cluster, ranks: int
) -> Job:
    """Rows of a step, and what of them can be split."""
    from schedlang.passes.autoshard.propose import experts_of
    from schedlang.passes.planner.space import Job
    from schedlang.runtime.batch import named_tensors, rows_of

    whole = [v for v in named_tensors(batch).values() if v.ndim > 1]
    length = next((v.shape[1] for v in whole if not v.is_floating_point()), 0)
    rows = asked.rows or rows_of(batch)
    if asked.batch is not None:
        if asked.rows is not None:
            bad_option("`--batch` and `--rows` both say how large a step is", "give one of them")
        tokens = _tokens(asked.batch)
        if not length or tokens % length:
            said = f"rows of {length} tokens" if length else "rows without tokens"
            title = f"`--batch {asked.batch}` is no number of {said}, which this model's batch has"
            near = max(1, tokens // length) if length else 8
            bad_option(title, f"give rows: `--rows {near}`")
        rows = tokens // length
    experts = experts_of(profiles.trial.blocks)
    count = next(iter(experts.values()), 0)
    return Job(ranks, rows, cluster, profiles.recipe, length, count)


# -- the search ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """The schedule of a setting, and what the simulated step of just this schedule takes."""

    text: str
    seconds: float
    peak: int
    fits: bool


TRIES = 4  # searches, each for the memory that the last one's best has shown to be there


def _fitting(
    profiles: Profiles, job: Job, limits: Limits, quiet: bool
) -> tuple[Found, Written | None, Job]:
    """The best whose own simulated step fits: a price tells its bytes only nearly.

    The last is the job with the memory that prices may take, so that what they mean fits.  Raises
    Refusal where the schedule that is written is refused.
    """
    room = job
    for _ in range(TRIES):
        found = _best(profiles, room, limits, quiet)
        if found.best is None or found.best.priced is None:
            return found, None, room
        made = _simulated(profiles, job, found)
        if made.fits:
            return found, made, room
        share = min(0.99, found.best.priced.peak / made.peak)
        room = replace(room, cluster=room.cluster.holding(share))
    return found, None, room


def _simulated(profiles: Profiles, job: Job, found: Found) -> Written:
    """Write the best, and play a step of it."""
    from schedlang.diagnostics.source import Source
    from schedlang.language.syntax import parse
    from schedlang.passes.autoshard import tune
    from schedlang.passes.elaborate.expand import expand
    from schedlang.passes.planner.write import written

    assert found.best is not None
    text = written(profiles, found.best.setting)
    plan = expand(parse(Source("best.sched", text)), profiles.facts).plan
    assert plan is not None
    whole = tune.Job(
        profiles.facts,
        of_rows(profiles.batch, job.rows),
        profiles.loss,
        profiles.weight,
        job.cluster.ordered(found.best.setting.nodes),
        job.ranks,
    )
    tried = tune.priced(whole, plan, {})
    seconds = found.best.least if tried.time is None else tried.time.seconds
    remarks = [*_figures(job, found, seconds, tried.peak), *_reasons(found.rejected)]
    fits = tried.peak <= job.cluster.memory and tried.lacks <= 0
    return Written(written(profiles, found.best.setting, remarks), seconds, tried.peak, fits)


def _best(profiles: Profiles, job: Job, limits: Limits, quiet: bool) -> Found:
    """The best that is found, or the best so far where one interrupts; a bar on a terminal."""
    from schedlang.passes.planner.search import search

    shown = not quiet and sys.stderr.isatty()

    def progress(done: int, known: int) -> None:
        if shown and done % 64 == 0:
            print(f"\r{done} of {known} ways", end="", file=sys.stderr, flush=True)

    last: Found | None = None
    try:
        for found in search(profiles, job, limits, progress):
            last = found
            if shown and found.best is not None:
                said = f"{found.best.least:.4g} s, at most {found.gap:.0%} above the least"
                print(f"\r{said}", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        if last is None or last.best is None:
            raise
        print("interrupted: the best so far", file=sys.stderr)
    finally:
        if shown:
            print(f"\r{' ' * 60}\r", end="", file=sys.stderr, flush=True)
    assert last is not None
    if not last.counts.all and last.refused:  # there is no way at all: what is wrong is the model
        raise last.refused[0][1]
    return last


# -- what is told ----------------------------------------------------------------------------------


def _figures(job: Job, found: Found, took: float, peak: int) -> Iterator[str]:
    """Time of the simulated step, where it goes by the planner's price, memory of a rank."""
    from schedlang.diagnostics.tables import seconds, size
    from schedlang.passes.simulate.nodes import Nodes

    best = found.best
    assert best is not None and best.priced is not None
    parts = sorted(best.priced.parts.items(), key=lambda part: -part[1])
    shares = [f"{name} {part / best.priced.seconds:.0%}" for name, part in parts if part]
    step = f"{seconds(took)} a step of {job.rows} rows"
    yield f"Predicted on {job.ranks} ranks of {job.cluster.name}: {step}; {', '.join(shares)}."
    peaks = dict.fromkeys(size(int(one)) for one in best.priced.peaks)
    places = f"; by place in the pipeline about {', '.join(peaks)}" if len(peaks) > 1 else ""
    yield f"Memory of the fullest rank: {size(peak)} of {size(job.cluster.memory)}{places}."
    if isinstance(job.cluster, Nodes):
        nodes, said = best.setting.nodes, ""
        if nodes != tuple(range(len(nodes))):
            order = [at + 1 for at in nodes]
            said = f": `order = {order}` in its file, with hosts in that order"
        yield f"Ranks lie node by node on {job.cluster.text(nodes)}{said}."


def _reasons(rejected: Sequence[Rejected]) -> Iterator[str]:
    for one in rejected[:REASONS]:
        yield f"Rejected: {one.kind}: {one.reason}."


REASONS = 3  # rejected settings that are told


def _told(
    name: str,
    job: Job,
    found: Found,
    answers: Sequence[Rejected],
    written: Written | None,
) -> Iterator[str]:
    """The best in words, what was rejected, and answers to what was asked."""
    from schedlang.diagnostics.tables import size

    ranks = f"{job.ranks} ranks of {job.cluster.name}, {size(job.cluster.memory)}"
    rows = f"{job.rows} rows" + (f" of {job.length} tokens" if job.length else "")
    yield f"{Path(name).name} · {ranks} · {rows}"
    yield ""
    if written is None:
        yield "nothing fits"
    else:
        yield f"best      {_way(found)}"
        figures = _figures(job, found, written.seconds, written.peak)
        yield from (f"          {line}" for line in figures)
    yield from (f"rejected  {one.kind}: {one.reason}" for one in found.rejected[:REASONS])
    yield from (f"asked     {one.kind}: {one.reason}" for one in answers)
    for placement, refusal in found.refused:
        one = refusal.diagnostics[0]
        yield f"refused   {_split(placement)}: {one.code}: {one.title}"
    counts = found.counts
    end = "none is quicker" if found.done else f"one may be {found.gap:.0%} quicker"
    yield f"{counts.all} ways, {counts.priced} of them priced, {counts.large} too large: {end}"


def _split(placement: Placement) -> str:
    """tp = 2, cp = 4, .."""
    sizes = {name: getattr(placement, name) for name in ("rows", "tp", "cp", "ep")}
    words = [f"{name} = {size}" for name, size in sizes.items() if size > 1 or name == "rows"]
    return ", ".join([*words, *["sequence"] * placement.sequence])


def _way(found: Found) -> str:
    """dp = 8, tp = 4, zero 1, .."""
    from schedlang.passes.planner.limits import told

    assert found.best is not None
    said = told(found.best.setting)
    axes = [name for name in ("dp", "pp", "cp", "ep", "tp") if said.pop(name) != 1]
    if "pp" not in axes:
        said.pop("order")
    words = [f"{name} = {told(found.best.setting)[name]}" for name in axes]
    for name, value in said.items():
        if name != "chunks" or value != 1:
            words.append(f"{name} {str(value).lower() if isinstance(value, bool) else value}")
    return ", ".join(words)


def _plain(
    job: Job, found: Found, answers: Sequence[Rejected], written: Written | None
) -> dict[str, Any]:
    """Plain values; seconds and bytes."""
    best = found.best
    return {
        "cluster": asdict(job.cluster),
        "ranks": job.ranks,
        "rows": job.rows,
        "best": None if best is None else asdict(best),
        "rejected": [asdict(one) for one in found.rejected],
        "asked": [asdict(one) for one in answers],
        "refused": [
            {"placement": asdict(placement), "refusal": refusal.diagnostics[0].to_json()}
            for placement, refusal in found.refused
        ],
        "counts": asdict(found.counts),
        "done": found.done,
        "seconds": None if written is None else written.seconds,
        "peak": None if written is None else written.peak,
        "schedule": None if written is None else written.text,
    }
