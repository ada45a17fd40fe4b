"""tune --layouts: choose how every operator of a model is sharded over a mesh, and write the
rows."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import typer

from schedlang.verbs.ending import FAILS, bad_option, show_json
from schedlang.verbs.inputs import check_folders, write_asked
from schedlang.verbs.searched import DTYPES, Search, batch_of, head

if TYPE_CHECKING:
    from schedlang.diagnostics.source import Source
    from schedlang.ir.model import ModelFacts
    from schedlang.ir.modelfile import ModelFile
    from schedlang.ir.plan import Plan
    from schedlang.language import nodes as n
    from schedlang.passes.autoshard.tune import Job, Tried
    from schedlang.passes.complete.proposal import Trial
    from schedlang.passes.planner.operators.given import Given
    from schedlang.passes.planner.operators.graph import Graph
    from schedlang.passes.planner.operators.rows import Chosen
    from schedlang.passes.simulate.machine import Cluster

UNITY = "unity"  # the planner that also chooses substitutions
FLEXFLOW = "flexflow"  # the planner that searches by a walk in place of the solver
TRIES = 4  # searches, each with the memory limit that the last one's simulated step implies


@dataclass(frozen=True)
class Begun:
    """A schedule whose rows are fixed, and its plan."""

    source: Source
    plan: Plan


@dataclass(frozen=True)
class Question:
    """A job and the terms of its search: fixed rows, dtype, planner."""

    job: Job
    trial: Trial
    given: Given
    begun: Begun | None
    graph: Graph
    dtype: str
    planner: str | None


@dataclass(frozen=True)
class Laid:
    """Layouts over a mesh, the schedule with their rows, and the simulated step of that
    schedule."""

    mesh: Mapping[str, int]
    found: tuple[Chosen, ...]
    file: n.File
    tried: Tried


def layouts(
    model: ModelFile,
    name: str,
    cluster: Cluster,
    ranks: int,
    begun: Begun | None,
    asked: Search,
    as_json: bool,
) -> None:
    """Search layouts, write and print them; exit 1 where nothing fits.

    `name` is the name of the model's file.
    """
    from schedlang.diagnostics.tables import columns, fitted
    from schedlang.ir.model import ModelFacts
    from schedlang.passes.autoshard.tune import Job
    from schedlang.passes.complete.proposal import Trial
    from schedlang.passes.planner.operators.given import Given, given_of
    from schedlang.passes.planner.operators.graph import graph_of
    from schedlang.passes.reduce_model.blocks import blocks_of

    start, out = time.perf_counter(), asked.out
    check_folders(out=out)
    if ranks == 1:
        bad_option("one rank has nothing to split", "`--gpus 4`, or a larger mesh in the schedule")
    facts = begun.plan.model if begun else ModelFacts(model.model(meta=True))
    job = Job(facts, batch_of(model), model.loss, model.weight, cluster, ranks)
    trial = Trial(facts, blocks_of(facts), job.batch, job.loss, job.weight)
    given = given_of(begun.plan, trial.all) if begun else Given()
    meshes = [dict(begun.plan.mesh.sizes)] if begun else list(_meshes(ranks))
    dtype = _computing_dtype(facts, asked.dtype, begun)
    reasons: list[str] = []
    graph = graph_of(trial, dtype)
    question = Question(job, trial, given, begun, graph, dtype, asked.planner)
    # the simulated step chooses between rows and tensors: the sum of operators is too inexact
    kinds = (None,) if begun else (False, True)
    made = [_best_for_mesh(question, mesh, kind, reasons) for mesh in meshes for kind in kinds]
    best = min((one for one in made if one), key=_step_seconds, default=None)
    other = _best_proposal(job, meshes, dtype) if begun is None else None
    if best is not None and out is not None:
        write_asked(out, best.file.text)
    if as_json:
        show_json(_plain(job, best, other))
    else:
        print(fitted("\n".join(_report_lines(name, job, best, other, reasons)), columns()))
        if best is not None and out is None:
            print(f"\n{best.file.text}", end="")
        elif best is not None:
            print(f"next: schedlang verify {out} --model {name}")
        print(f"solved in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    if best is None:
        raise typer.Exit(FAILS)


def _meshes(ranks: int) -> Iterator[dict[str, int]]:
    """Yield all ranks as one axis, and as two."""
    yield {"inner": ranks}
    yield from (
        {"outer": ranks // few, "inner": few} for few in range(2, ranks) if ranks % few == 0
    )


def _computing_dtype(facts: ModelFacts, asked: str, begun: Begun | None) -> str:
    """Return the dtype that a model computes in; "": as stored, also for a model stored in 16
    bits."""
    from schedlang.primitives.cast import HALVES, cast

    if begun is not None:
        casts = (one for one in begun.plan.actions if "" in one.sites)
        own = (one.primitive.dtype for one in casts if isinstance(one.primitive, cast))
        return next(own, "")
    if asked not in DTYPES:
        bad_option(f"`--dtype {asked}` is none of {', '.join(DTYPES)}", "`--dtype bf16`")
    stored = any(one.dtype in HALVES for one in facts.unique.values())
    return "" if stored or asked == "none" else asked


def _best_for_mesh(
    asked: Question, mesh: Mapping[str, int], rows: bool | None, said: list[str]
) -> Laid | None:
    """Return the best layouts over a mesh whose simulated step fits into memory.

    The bytes of operators estimate the step's only roughly. `rows`: whether an axis splits rows;
    None: whichever is faster.
    """
    from schedlang.passes.autoshard.tune import priced
    from schedlang.passes.elaborate.expand import expand
    from schedlang.passes.planner.operators.asked import Asked
    from schedlang.passes.planner.operators.rows import alone, inserted, layouts
    from schedlang.passes.planner.operators.solve import solve
    from schedlang.passes.planner.operators.walked import walked
    from schedlang.passes.planner.profile import Profiles, recipe_of
    from schedlang.passes.planner.values import Recipe

    job, trial, begun = asked.job, asked.trial, asked.begun
    solver = walked if asked.planner == FLEXFLOW else solve
    recipe = Recipe() if asked.dtype else recipe_of(job.facts)
    limit, names = float(job.cluster.memory), list(mesh)
    strides = {one: math.prod(mesh[o] for o in names[k + 1 :]) for k, one in enumerate(names)}
    axes = {
        one: Asked(size, job.cluster, strides[one], recipe=recipe)
        for one, size in mesh.items()
        if size > 1
    }
    for _ in range(TRIES):
        unity = asked.planner == UNITY
        found = layouts(trial, axes, limit, asked.given, said, asked.graph, unity, rows, solver)
        if found is None:
            return None
        if begun is None:
            own = Profiles(job.facts, job.batch, job.loss, job.weight)
            relax = own.relax if rows else ""
            made = alone(job.facts.class_name, mesh, found, trial, asked.dtype, relax)
        else:
            made = inserted(begun.source, found, trial)
        plan = expand(made, job.facts).plan
        assert plan is not None
        tried = priced(job, plan, {})
        if tried.fits(job.cluster.memory):
            return Laid(mesh, found, made, tried)
        limit = min(0.99, found[0].solution.bytes / tried.peak) * min(limit, job.cluster.memory)
    return None


def _step_seconds(one: Laid) -> float:
    assert one.tried.time is not None
    return one.tried.time.seconds


def _best_proposal(job: Job, meshes: list[dict[str, int]], dtype: str) -> Tried | None:
    """Return the fastest proposal of `init` for the same ranks and dtype; None where none fits."""
    from schedlang.diagnostics.diagnostic import Refusal
    from schedlang.passes.autoshard.propose import propose
    from schedlang.passes.autoshard.tune import priced, ranked
    from schedlang.passes.complete.proposal import precision
    from schedlang.passes.elaborate.expand import expand

    found: list[Tried] = []
    for mesh in meshes:
        sizes = [*mesh.values()]
        named = [dict(zip(("dp", "tp"), sizes))] if len(sizes) > 1 else []
        for one in named or [{"dp": sizes[0]}, {"tp": sizes[0]}]:
            try:
                file = propose(job.facts, job.batch, one, job.loss, job.weight).file
                if dtype:
                    first, *steps = file.items
                    file = replace(file, items=(first, precision(dtype), *steps))
                plan = expand(file, job.facts).plan
                assert plan is not None
                found.append(replace(priced(job, plan, {}), given=one))
            except Refusal:  # `init` reports the reason; here there is no result
                continue
    return next(iter(ranked(found, job.cluster.memory)), None)


# -- output ----------------------------------------------------------------------------------------


def _report_lines(
    name: str, job: Job, best: Laid | None, other: Tried | None, said: list[str]
) -> Iterator[str]:
    from schedlang.diagnostics.tables import seconds, size

    yield head(name, job.ranks, job.cluster)
    if best is None:
        yield "nothing that is legal fits"
        yield from (f"refused   {why}" for why in dict.fromkeys(said))
        return
    yield "layouts   " + ", ".join(
        f"{one.axis} = {best.mesh[one.axis]} {_describe_mode(one)}" for one in best.found
    )
    took, solved = _step_seconds(best), best.found[0].seconds
    peak = f"{size(best.tried.peak)} on the fullest rank"
    yield f"          {seconds(took)} a step as played, {seconds(solved)} by its operators; {peak}"
    yield from (f"          {row}" for row in best.found[0].above)
    if other is not None and other.time is not None:
        mesh = ", ".join(f"{axis} = {count}" for axis, count in other.mesh.items())
        share = other.time.seconds / took - 1
        word = f"{share:.0%} slower" if share > 0 else f"{-share:.0%} quicker: take it"
        if abs(share) < SAME:
            word = "as quick"
        yield f"init      {mesh}: {seconds(other.time.seconds)} a step, {word}"


SAME = 0.005


def _describe_mode(one: Chosen) -> str:
    options = one.placed.asked
    return f"splits rows (zero {options.zero})" if options.mode == "rows" else "splits tensors"


def _plain(job: Job, best: Laid | None, other: Tried | None) -> dict[str, object]:
    """Return plain values, in seconds and bytes."""
    return {
        "ranks": job.ranks,
        "mesh": None if best is None else dict(best.mesh),
        "solved": None if best is None else best.found[0].seconds,
        "seconds": None if best is None else _step_seconds(best),
        "peak": None if best is None else best.tried.peak,
        "init": None if other is None or other.time is None else other.time.seconds,
        "schedule": None if best is None else best.file.text,
    }
