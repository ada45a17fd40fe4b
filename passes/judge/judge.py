"""Judge a program that was written elsewhere: run its ranks, run the original, compare, explain."""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.model import ModelFacts
from schedlang.ir.modelfile import load_model_file
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.judge.beside import (
    alike,
    dropped,
    grouped,
    initial,
    of_saved,
    saved,
    with_own,
)
from schedlang.passes.judge.kinds import kinds
from schedlang.passes.judge.layouts import Holdings, Table
from schedlang.passes.judge.loaded import reloaded
from schedlang.passes.judge.located import located
from schedlang.passes.judge.masks import Dropping, Drops, Placed
from schedlang.passes.judge.placing import dropped_alike, noted_drops, of_dropout, places_of
from schedlang.passes.judge.program import Make, check_ranks, load_program
from schedlang.passes.judge.rounded import judged_in
from schedlang.passes.judge.subject import Judged, Kept
from schedlang.passes.verify.asked import STEPS
from schedlang.passes.verify.compare import compare
from schedlang.passes.verify.finite import check_original, check_trained
from schedlang.passes.verify.observe import (
    Batch,
    Condition,
    Observation,
    conditions,
    observe,
)
from schedlang.passes.verify.original import Sequential, randomised, rows
from schedlang.passes.verify.runs import (
    HALVED,
    PADDED,
    Batches,
    Labels,
    gaps,
    idle,
    integers,
    unoffered,
    varied,
)
from schedlang.passes.verify.sides import Case, twin
from schedlang.passes.verify.spilled import unhoarded
from schedlang.report import Gap, Report
from schedlang.runtime.batch import shares
from schedlang.runtime.comm import world as comm
from schedlang.runtime.float64 import Float64, as_float64
from schedlang.runtime.float64 import widened as wide
from schedlang.runtime.launch.forkserver import BASE, PROGRAMS
from schedlang.runtime.launch.pool import Hang, Pool, shared, temporary
from schedlang.runtime.modes import ambient
from schedlang.runtime.rng.logical_dropout import Still, Undropped

MOST_RANKS = 8
IGNORED = -100  # the label that torch's losses leave out
Progress = Callable[..., None]
_CALLERS = ("judge/program.py", "judge/subject.py")  # of what a user wrote


@dataclass(frozen=True)
class Task:
    """A program, its original, and how they are compared.

    vary  some batches are changed where all of them together hide something
    told  ranks' lines go to the standard error: the standard output is a document
    dtype what the program is run in, by the word of it, where that is not float64
    """

    make: Make
    original: nn.Module
    batches: tuple[Batch, ...]
    world: int
    loss: Any = None
    seed: int = 0
    vary: bool = True
    told: bool = False
    dtype: str | None = None


def judge(
    task: Task,
    *,
    pool: Pool | None = None,
    title: str = "",
    command: str = "",
    progress: Progress = lambda stage, done=0, total=0: None,
) -> Report:
    """Compare a program with its original; on failure in float64 say by which arithmetic it errs.

    Raises Refusal for a program or batch that cannot be run, RankDied or Hang for a run that
    failed.
    """
    start = time.perf_counter()
    _check_world(task.world)
    case = check_trained(_widened(task))
    progress("the original")
    try:
        report = _run(case, task, pool or shared(), progress)
    except Hang as hang:
        raise hang.of_users(_CALLERS) from None
    report = replace(report, title=title, command=command)
    return replace(report, seconds=time.perf_counter() - start)


def _run(case: Case, task: Task, pool: Pool, progress: Progress) -> Report:
    if task.dtype is not None:
        given, told = _planned(task, task.original), _conditions(case, task)[0]
        return judged_in(task.dtype, given, told, task.make, task.world, pool, task.told)
    with temporary() as folder:
        return _compared(case, task, pool, progress, folder)


def _compared(case: Case, task: Task, pool: Pool, progress: Progress, folder: str) -> Report:
    """Run both sides, compare them, and explain what differs."""
    told, seen, derived = _conditions(case, task)
    asked = told
    drops, actual, kept = _dropping(case, task, told, pool, progress, folder)
    holdings = kept.holdings
    assert holdings is not None
    if kept.optimizer is not None:
        told, actual = with_own(told, actual, pickle.loads(kept.optimizer))
    told = [replace(one, optimizer=grouped(one.optimizer, holdings)) for one in told]
    expected = _original(case, told, drops)
    check_original(case, told, expected)
    expected, actual = alike(expected, actual, kept)
    report = Report(
        (
            *initial(case.plan.model.model, kept),
            *dropped(drops, kept),
            *compare(expected, actual),
            *saved(case, actual, kept, told),
            *(kept.loaded.rows(told[-1]) if kept.loaded else ()),
        ),
        facts=_facts(task, holdings, derived),
        gaps=_gaps(case, seen, expected, actual, kept, drops),
    )
    if any(not row.ok for row in report.rows):
        progress("the kind of mistake")
        means = _means(case, told, task, drops)
        where = located(case, task.make, task.world, asked, told, drops, report, pool)
        report = kinds(report, expected, actual, kept, task.world, means, where)
    return report


@dataclass(frozen=True)
class Posed:
    """A task whose program, and maybe whose original, are files that ranks must load."""

    task: Task
    title: str
    files: Mapping[str, Path]

    @contextlib.contextmanager
    def pool(self) -> Iterator[Pool]:
        """Ranks that know the files."""
        with Pool(preload=(*BASE, *PROGRAMS), files=dict(self.files)) as pool:
            yield pool


def posed(program: Make | Path, model: str | None, ranks: int | None, **options: Any) -> Posed:
    """Read the files of a program and of its original, by default the `model.py` beside it.

    `options` are those of Task; what they name is taken, and not what the files have.
    """
    files: dict[str, Path] = {}
    title, make, beside = "a program", program, None
    if isinstance(program, Path):
        written = load_program(program)
        title, make, beside = program.name, written.program, program
        files |= written.files
        ranks = ranks if ranks is not None else written.world
    check_ranks(ranks)
    assert ranks is not None and not isinstance(make, Path)
    seed = options.get("seed", 0)
    if "original" not in options or "batches" not in options:
        found = load_model_file(model, beside)
        files |= found.files
        options.setdefault("original", found.model(seed=seed))
        options.setdefault("loss", found.loss)
        if "batches" not in options:
            options["batches"] = tuple(found.batch(seed + step) for step in range(STEPS))
    return Posed(Task(make, world=ranks, **options), title, files)


def _check_world(world: int) -> None:
    if world <= MOST_RANKS:
        return
    title = f"`verify` starts at most {MOST_RANKS} ranks on one machine, not {world}"
    raise Refusal(
        Diagnostic("S702", title, helps=("a program of fewer ranks shows as much: `--ranks 4`",))
    )


def _widened(task: Task) -> Case:
    """The original in float64 with other weights, all different, under a plan without any row."""
    if any(t.is_meta for t in (*task.original.parameters(), *task.original.buffers())):
        title = "the model has no values: it is on the meta device"
        raise Refusal(Diagnostic("S623", title, helps=("make a small one with values",)))
    module = randomised(as_float64(task.original), task.seed)
    case = _planned(task, module)
    return replace(case, batches=tuple(wide(dict(batch)) for batch in case.batches))


def _planned(task: Task, module: nn.Module) -> Case:
    plan = expand(parse(Source("nothing.sched", "schedule 1\n")), ModelFacts(module)).plan
    assert plan is not None
    return Case(plan, task.batches, task.loss, None, task.seed, "none")


def _modes() -> tuple[Any, ...]:
    return Float64(), Undropped(Still())


# ---- The runs.


def _conditions(case: Case, task: Task) -> tuple[list[Condition], Batches, list[str]]:
    """SGD on the batches as given, AdamW, clipped, on variants; what all show, what was derived."""
    given = case.batches

    def cut(count: int) -> list[range]:
        return [part for part in shares(count, task.world) if part]

    norm = _norm(case, given[0])
    assert norm is not None
    names = [n for n, v in integers(given[0]).items() if "label" in n or "target" in n]
    labels = [Labels(name, IGNORED) for name in names if _leaves_out(case, given[0], name)]
    seen = Batches(given, cut, labels)
    made, derived = list(given), []
    if task.vary:
        made, said = varied(seen, (PADDED, HALVED))
        for place, words in said.items():
            if _norm(case, made[place]) is None:
                made[place] = given[place]
            else:
                derived += words
    told = [replace(one, follow=False) for one in conditions(given, norm, made)]
    return told, replace(seen, all=(*given, *made)), derived


def _norm(case: Case, batch: Batch) -> float | None:
    """The gradient norm of the original at a batch; None for one that it does not take."""
    try:
        with ambient(*_modes()):
            norm = Sequential(twin(case), loss=case.loss).norm(batch)
    except Refusal:
        raise
    except Exception as error:  # whatever the model raises for what its user never gave it
        if batch is not case.batches[0]:
            return None
        text = f"{type(error).__name__}: {error}".split("\n")[0]
        title = f"the original rejects its batch: {text}"
        helps = ("return the keyword arguments of the model's forward from `batch(seed)`",)
        raise Refusal(Diagnostic("S604", title, helps=helps)) from error
    return norm if math.isfinite(norm) or batch is case.batches[0] else None


def _leaves_out(case: Case, batch: Batch, name: str) -> bool:
    """Whether labels of -100 do not count: the original takes them."""
    changed = batch[name].clone().reshape(-1)
    changed[-1:] = IGNORED
    return _norm(case, {**batch, name: changed.reshape(batch[name].shape)}) is not None


def _dropping(
    case: Case,
    task: Task,
    told: Sequence[Condition],
    pool: Pool,
    progress: Progress,
    folder: str,
) -> tuple[Drops, Observation, Kept]:
    """Run the ranks, which drop where places are known."""
    drops = noted_drops(case, told, folder)
    return dropped_alike(drops, lambda drops: _ranks(case, task, told, pool, progress, drops))


def _original(case: Case, told: Sequence[Condition], drops: Drops) -> Observation:
    def make(condition: Condition) -> Sequential:
        return Sequential(
            twin(case),
            condition.optimizer,
            loss=case.loss,
            clip=condition.clip,
            evaluate=condition.evaluate,
            follow=False,
        )

    with ambient(Float64(), Dropping(drops.seed, drops.off)):
        return observe(make, told, folder=drops.folder)


def _ranks(
    case: Case,
    task: Task,
    told: Sequence[Condition],
    pool: Pool,
    progress: Progress,
    drops: Drops,
) -> tuple[Observation, Kept]:
    steps = sum(len(condition.batches) for condition in told)
    done = itertools.count(1)
    stage = f"{task.world} rank{'s' * (task.world > 1)}"

    def heard(rank: int, message: object) -> None:
        if rank == 0:
            progress(stage, min(next(done), steps), steps)

    progress(stage, 0, steps)
    module = case.plan.model.model
    found: tuple[Observation, Kept] = pool.run(
        _rank, task.world, task.make, module, tuple(told), task.told, drops, on_progress=heard
    )[0]
    return found


def _rank(
    make: Make, original: nn.Module, told: Sequence[Condition], aside: bool, drops: Drops
) -> tuple[Observation, Kept] | None:
    """One rank's part; only rank 0 tells what it saw."""
    unhoarded()
    kept, table = Kept(folder=drops.folder), Table(original)
    made: list[Judged] = []
    lines = contextlib.redirect_stdout(sys.stderr) if aside else contextlib.nullcontext()
    # a compiled region does not ask for masks
    eager = torch.compiler.set_stance("force_eager") if drops.sites else contextlib.nullcontext()
    with lines, eager:
        places = places_of(make, original, table, told, kept, drops) if drops.sites else {}
        dropping = Placed(drops.seed, kept.met.off(drops))

        def begin_again(_: int) -> None:
            dropping.begin(places.get(drops.numbers[told[-1].name, 0], {}))

        def subject(condition: Condition) -> Judged:
            def begin(step: int) -> None:
                dropping.begin(places.get(drops.numbers[condition.name, step], {}))

            made.clear()
            made.append(Judged(make, original, table, condition, kept, begin))
            return made[0]

        with ambient(Float64(), dropping):
            seen = observe(subject, told, keep=comm.rank() == 0, folder=drops.folder)
            kept.loaded = reloaded(made[0], told[-1], begin_again)
    kept.stray = {site for one in comm.all_gather_object(dropping.stray) for site in one}
    sys.stdout.flush()
    return (seen, kept) if comm.rank() == 0 else None


# ---- What is said about it.


def _facts(task: Task, holdings: Holdings, derived: Sequence[str]) -> tuple[tuple[str, str], ...]:
    by_name = sorted({one.name for one in holdings.everything if one.by == "name"})
    facts = [
        ("", f"{task.world} rank{'s' * (task.world > 1)}"),
        ("seed", str(task.seed)),
        ("dtype", "float64"),
        ("torch", torch.__version__),
    ]
    facts += [("mesh", ", ".join(f"{k}={n}" for k, n in holdings.axes.items()))] * bool(
        holdings.axes
    )
    facts += [("derived", ", ".join(derived))] * bool(derived)
    facts += [("matched by name", ", ".join(by_name[:8]))] * bool(by_name)
    for name, count in holdings.padding.items():
        facts.append(("padding", f"{count} elements of {name}"))
    return tuple(facts)


def _gaps(
    case: Case,
    seen: Batches,
    expected: Observation,
    actual: Observation,
    kept: Kept,
    drops: Drops,
) -> tuple[Gap, ...]:
    assert kept.holdings is not None
    sizes = kept.holdings.axes or {}
    names = {name: p.numel() for name, p in case.plan.model.model.named_parameters()}
    found = [*gaps(seen, sizes=sizes, drawn=len(drops.sites), parameters=names)]
    found += of_dropout(drops, kept)
    if all(p.requires_grad for p in case.plan.model.model.parameters()):
        found.append(Gap("no frozen parameters", "frozen weights that are updated"))
    found += of_saved(kept)
    for name in sorted(kept.lost):
        found.append(Gap(f"buffer `{name}`: no rank has it by this name", "wrong values in it"))
    found = [one for one in found if one.condition != "no float inputs"]
    return (*found, *idle(expected), *unoffered(actual))


def _means(
    case: Case, told: Sequence[Condition], task: Task, drops: Drops
) -> Callable[[str, str], Iterator[list[Tensor]]]:
    """Return a function that yields a gradient in each part of a batch by itself.

    The batch is cut into every number of parts that divides the number of ranks, and into two and
    four, as ranks or steps that accumulate may cut it; in blocks, and with strides.
    """
    known: dict[tuple[str, int, int], Mapping[str, Tensor | None]] = {}

    def of_part(condition: Condition, parts: int, place: int, strided: bool) -> Any:
        key = (condition.name, parts * (-1 if strided else 1), place)
        if key not in known:
            batch = condition.batches[0]
            subject = Sequential(twin(case), loss=case.loss)
            count = rows(batch)
            chosen = range(place, count, parts) if strided else shares(count, parts)[place]
            part = _chosen(batch, chosen, count)
            with ambient(Float64(), Dropping(drops.seed, drops.off, tuple(chosen))):
                subject.derive(part, chosen)
            known[key] = dict(subject.gradients())
        return known[key]

    def means(name: str, condition: str) -> Iterator[list[Tensor]]:
        one = next(c for c in told if c.name == condition)
        count = rows(one.batches[0])
        divisors = {n for n in range(2, task.world + 1) if task.world % n == 0}
        for parts in sorted(n for n in divisors | {2, 4} if n <= count):
            for strided in (False, True):
                try:
                    found = [of_part(one, parts, k, strided).get(name) for k in range(parts)]
                except Exception:  # the original takes no part of its batch
                    continue
                there = [g for g in found if g is not None]
                if len(there) == parts:
                    yield there

    return means


def _chosen(batch: Batch, chosen: Sequence[int], count: int) -> dict[str, Any]:
    return {
        name: value[list(chosen)]
        if isinstance(value, Tensor) and value.dim() and len(value) == count
        else value
        for name, value in batch.items()
    }
