"""tune, for a model: search for the schedule that trains it fastest, write it, give the reasons."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schedlang.verbs.ending import FAILS, bad_option, show_json
from schedlang.verbs.inputs import write_asked

if TYPE_CHECKING:
    from schedlang.ir.limits import Limits
    from schedlang.ir.modelfile import ModelFile
    from schedlang.passes.planner.profile import Profiles
    from schedlang.passes.planner.reasons import Rejected
    from schedlang.passes.planner.search import Found
    from schedlang.passes.planner.space import Job
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
    file: Path, found: ModelFile, cluster: Cluster, ranks: int, asked: Search, as_json: bool
) -> None:
    """Search, write and tell; exit 1 where nothing fits."""
    from schedlang.ir.model import ModelFacts
    from schedlang.passes.planner.limits import asked as question
    from schedlang.passes.planner.limits import limits_of
    from schedlang.passes.planner.profile import Profiles
    from schedlang.passes.planner.search import why

    start = time.perf_counter()
    if asked.dtype not in DTYPES:
        bad_option(f"`--dtype {asked.dtype}` is none of {', '.join(DTYPES)}", "`--dtype bf16`")
    limits = limits_of(asked.pin or (), asked.forbid or (), asked.least or ())
    questions = [question(text) for text in asked.why or ()]
    batch, dtype = _batch(found), "" if asked.dtype == "none" else asked.dtype
    facts = ModelFacts(found.model(meta=True))
    profiles = Profiles(facts, batch, found.loss, found.weight, dtype)
    job = _job(batch, asked, profiles, cluster, ranks)
    last = _best(profiles, job, limits, quiet=as_json)
    answers = [why(profiles, job, one, last, limits) for one in questions]
    text = _text(profiles, job, last)
    if asked.out is not None and text:
        write_asked(asked.out, text)
    if as_json:
        show_json(_plain(job, last, answers, text))
    else:
        print("\n".join(_told(file, job, last, answers)))
        if text and asked.out is None:
            print(f"\n{text}", end="")
        if text:
            print(f"next: schedlang verify {asked.out or 'best.sched'} --shrink --model {file}")
        print(f"searched in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    if last.best is None:
        raise typer.Exit(FAILS)


# -- what is asked ---------------------------------------------------------------------------------


def _batch(found: ModelFile) -> Mapping[str, Any]:
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
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    assert last is not None
    return last


# -- what is told ----------------------------------------------------------------------------------


def _text(profiles: Profiles, job: Job, found: Found) -> str:
    """The schedule of the best, with figures and reasons as comments; "" where nothing fits."""
    from schedlang.passes.planner.write import written

    if found.best is None:
        return ""
    remarks = [*_figures(job, found), *_reasons(found.rejected)]
    return written(profiles, found.best.setting, remarks)


def _figures(job: Job, found: Found) -> Iterator[str]:
    """The predicted time of a step, by cause, and the memory of the ranks of each place."""
    from schedlang.diagnostics.tables import seconds, size

    best = found.best
    assert best is not None and best.priced is not None
    parts = sorted(best.priced.parts.items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {took / best.priced.seconds:.0%}" for name, took in parts if took)
    took = f"{seconds(best.priced.seconds)} a step of {job.rows} rows"
    yield f"Predicted on {job.ranks} ranks of {job.cluster.name}: {took}: {shares}."
    peaks = dict.fromkeys(size(int(one)) for one in best.priced.peaks)
    yield f"Memory of a rank, by its place in the pipeline: {', '.join(peaks)}."


def _reasons(rejected: Sequence[Rejected]) -> Iterator[str]:
    for one in rejected:
        yield f"Rejected: {one.kind}: {one.reason}."


def _told(file: Path, job: Job, found: Found, answers: Sequence[Rejected]) -> Iterator[str]:
    """The best in words, what was rejected, and answers to what was asked."""
    from schedlang.diagnostics.tables import size

    ranks = f"{job.ranks} ranks of {job.cluster.name}, {size(job.cluster.memory)}"
    rows = f"{job.rows} rows" + (f" of {job.length} tokens" if job.length else "")
    yield f"{file.name} · {ranks} · {rows}"
    yield ""
    if found.best is None:
        yield "nothing fits"
    else:
        yield f"best      {_way(found)}"
        yield from (f"          {line}" for line in _figures(job, found))
    yield from (f"rejected  {one.kind}: {one.reason}" for one in found.rejected)
    yield from (f"asked     {one.kind}: {one.reason}" for one in answers)
    counts = found.counts
    end = "none is quicker" if found.done else f"one may be {found.gap:.0%} quicker"
    yield f"{counts.all} ways, {counts.priced} of them priced, {counts.large} too large: {end}"


def _way(found: Found) -> str:
    from schedlang.passes.planner.limits import told

    assert found.best is not None
    said = told(found.best.setting)
    axes = {name: said.pop(name) for name in ("dp", "pp", "cp", "ep", "tp")}
    if axes["pp"] == 1:
        for name in ("order", "chunks"):
            said.pop(name)
    if said["chunks" if "chunks" in said else "zero"] == 1 and "chunks" in said:
        said.pop("chunks")
    words = [f"{name} = {size}" for name, size in axes.items() if size != 1]
    words += [f"{name} {str(value).lower()}" for name, value in said.items()]
    return ", ".join(words)


def _plain(job: Job, found: Found, answers: Sequence[Rejected], text: str) -> dict[str, Any]:
    """Plain values; seconds and bytes."""
    from dataclasses import asdict

    best = found.best
    return {
        "cluster": asdict(job.cluster),
        "ranks": job.ranks,
        "rows": job.rows,
        "best": None if best is None else asdict(best),
        "rejected": [asdict(one) for one in found.rejected],
        "asked": [asdict(one) for one in answers],
        "counts": asdict(found.counts),
        "done": found.done,
        "schedule": text or None,
    }
