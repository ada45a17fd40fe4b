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

from schedlang.verbs.exits import FAILS, bad_option, show_json
from schedlang.verbs.inputs import check_folders, write_output
from schedlang.verbs.model_search import DTYPES, Search, batch_of, head_line

if TYPE_CHECKING:
    from schedlang.diagnostics.source import Source
    from schedlang.ir.model import ModelFacts
    from schedlang.ir.modelfile import ModelFile
    from schedlang.ir.plan import Plan
    from schedlang.language import nodes as n
    from schedlang.passes.autoshard.knob_tuning import Job, PricedPlan
    from schedlang.passes.complete.proposed_rows import RowTrial
    from schedlang.passes.planner.operators.fixed_rows import FixedRows
    from schedlang.passes.planner.operators.layout_rows import AxisLayout
    from schedlang.passes.planner.operators.operator_graph import Graph
    from schedlang.passes.simulate.machine import Cluster

UNITY = "unity"  # the planner that also chooses substitutions
FLEXFLOW = "flexflow"  # the planner that searches by a walk in place of the solver
MAX_SEARCHES = 4  # searches, each with the memory limit that the last one's simulated step implies


@dataclass(frozen=True)
class BaseSchedule:
    """A schedule whose rows are fixed, and its plan."""

    source: Source
    plan: Plan


@dataclass(frozen=True)
class LayoutProblem:
    """A job and the terms of its search: fixed rows, dtype, planner."""

    job: Job
    trial: RowTrial
    given: FixedRows
    begun: BaseSchedule | None
    graph: Graph
    dtype: str
    planner: str | None


@dataclass(frozen=True)
class LayoutResult:
    """Layouts over a mesh, the schedule with their rows, and the simulated step of that
    schedule."""

    mesh: Mapping[str, int]
    found: tuple[AxisLayout, ...]
    file: n.File
    tried: PricedPlan


def search_layouts(
    model: ModelFile,
    name: str,
    cluster: Cluster,
    ranks: int,
    begun: BaseSchedule | None,
    asked: Search,
    as_json: bool,
) -> None:
    """Search layouts, write and print them; exit 1 where nothing fits.

    `name` is the name of the model's file.
    """
    from schedlang.diagnostics.tables import terminal_columns, wrap_lines
    from schedlang.ir.model import ModelFacts
    from schedlang.passes.autoshard.knob_tuning import Job
    from schedlang.passes.complete.proposed_rows import RowTrial
    from schedlang.passes.planner.operators.fixed_rows import FixedRows, fixed_rows_of
    from schedlang.passes.planner.operators.operator_graph import build_graph
    from schedlang.passes.reduce_model.blocks import blocks_of

    start, out = time.perf_counter(), asked.out
    check_folders(out=out)
    if ranks == 1:
        bad_option("one rank has nothing to split", "`--gpus 4`, or a larger mesh in the schedule")
    facts = begun.plan.model if begun else ModelFacts(model.model(meta=True))
    job = Job(facts, batch_of(model), model.loss, model.weight, cluster, ranks)
    trial = RowTrial(facts, blocks_of(facts), job.batch, job.loss, job.weight)
    given = fixed_rows_of(begun.plan, trial.full_blocks) if begun else FixedRows()
    meshes = [dict(begun.plan.mesh.sizes)] if begun else list(_meshes(ranks))
    dtype = _computing_dtype(facts, asked.dtype, begun)
    reasons: list[str] = []
    graph = build_graph(trial, dtype)
    question = LayoutProblem(job, trial, given, begun, graph, dtype, asked.planner)
    # the simulated step chooses between rows and tensors: the sum of operators is too inexact
    kinds = (None,) if begun else (False, True)
    made = [_best_for_mesh(question, mesh, kind, reasons) for mesh in meshes for kind in kinds]
    best = min((one for one in made if one), key=_step_seconds, default=None)
    other = _best_proposal(job, meshes, dtype) if begun is None else None
    if best is not None and out is not None:
        write_output(out, best.file.text)
    if as_json:
        show_json(_plain(job, best, other))
    else:
        print(
            wrap_lines(
                "\n".join(_report_lines(name, job, best, other, reasons)), terminal_columns()
            )
        )
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


def _computing_dtype(facts: ModelFacts, asked: str, begun: BaseSchedule | None) -> str:
    """Return the dtype that a model computes in; "": as stored, also for a model stored in 16
    bits."""
    from schedlang.primitives.cast import HALVES, cast

    if begun is not None:
        casts = (one for one in begun.plan.actions if "" in one.sites)
        own = (one.primitive.dtype for one in casts if isinstance(one.primitive, cast))
        return next(own, "")
    if asked not in DTYPES:
        bad_option(f"`--dtype {asked}` is none of {', '.join(DTYPES)}", "`--dtype bf16`")
    stored = any(one.dtype in HALVES for one in facts.unique_parameters.values())
    return "" if stored or asked == "none" else asked


def _best_for_mesh(
    asked: LayoutProblem, mesh: Mapping[str, int], rows: bool | None, said: list[str]
) -> LayoutResult | None:
    """Return the best layouts over a mesh whose simulated step fits into memory.

    The bytes of operators estimate the step's only roughly. `rows`: whether an axis splits rows;
    None: whichever is faster.
    """
    from schedlang.passes.autoshard.knob_tuning import price_plan
    from schedlang.passes.elaborate.expand import expand
    from schedlang.passes.planner.operators.layout_requests import LayoutRequest
    from schedlang.passes.planner.operators.layout_rows import (
        find_legal_layouts,
        insert_rows,
        layout_schedule,
    )
    from schedlang.passes.planner.operators.layout_walk import solve_by_walk
    from schedlang.passes.planner.operators.solver import solve
    from schedlang.passes.planner.profile import Profiles, recipe_of
    from schedlang.passes.planner.values import Recipe

    job, trial, begun = asked.job, asked.trial, asked.begun
    solver = solve_by_walk if asked.planner == FLEXFLOW else solve
    recipe = Recipe() if asked.dtype else recipe_of(job.facts)
    limit, names = float(job.cluster.memory), list(mesh)
    strides = {one: math.prod(mesh[o] for o in names[k + 1 :]) for k, one in enumerate(names)}
    axes = {
        one: LayoutRequest(size, job.cluster, strides[one], recipe=recipe)
        for one, size in mesh.items()
        if size > 1
    }
    for _ in range(MAX_SEARCHES):
        unity = asked.planner == UNITY
        found = find_legal_layouts(
            trial, axes, limit, asked.given, said, asked.graph, unity, rows, solver
        )
        if found is None:
            return None
        if begun is None:
            own = Profiles(job.facts, job.batch, job.loss, job.weight)
            relax = own.relax if rows else ""
            made = layout_schedule(job.facts.class_name, mesh, found, trial, asked.dtype, relax)
        else:
            made = insert_rows(begun.source, found, trial)
        plan = expand(made, job.facts).plan
        assert plan is not None
        tried = price_plan(job, plan, {})
        if tried.fits(job.cluster.memory):
            return LayoutResult(mesh, found, made, tried)
        limit = min(0.99, found[0].solution.bytes / tried.peak) * min(limit, job.cluster.memory)
    return None


def _step_seconds(one: LayoutResult) -> float:
    assert one.tried.time is not None
    return one.tried.time.seconds


def _best_proposal(job: Job, meshes: list[dict[str, int]], dtype: str) -> PricedPlan | None:
    """Return the fastest proposal of `init` for the same ranks and dtype; None where none fits."""
    from schedlang.diagnostics.diagnostic import Refusal
    from schedlang.passes.autoshard.knob_tuning import price_plan, rank_fitting
    from schedlang.passes.autoshard.propose import propose
    from schedlang.passes.complete.proposed_rows import precision_step
    from schedlang.passes.elaborate.expand import expand

    found: list[PricedPlan] = []
    for mesh in meshes:
        sizes = [*mesh.values()]
        named = [dict(zip(("dp", "tp"), sizes))] if len(sizes) > 1 else []
        for one in named or [{"dp": sizes[0]}, {"tp": sizes[0]}]:
            try:
                file = propose(job.facts, job.batch, one, job.loss, job.weight).file
                if dtype:
                    first, *steps = file.items
                    file = replace(file, items=(first, precision_step(dtype), *steps))
                plan = expand(file, job.facts).plan
                assert plan is not None
                found.append(replace(price_plan(job, plan, {}), knobs=one))
            except Refusal:  # `init` reports the reason; here there is no result
                continue
    return next(iter(rank_fitting(found, job.cluster.memory)), None)


# -- output ----------------------------------------------------------------------------------------


def _report_lines(
    name: str, job: Job, best: LayoutResult | None, other: PricedPlan | None, said: list[str]
) -> Iterator[str]:
    from schedlang.diagnostics.tables import format_bytes, format_seconds

    yield head_line(name, job.ranks, job.cluster)
    if best is None:
        yield "nothing that is legal fits"
        yield from (f"refused   {why}" for why in dict.fromkeys(said))
        return
    yield "layouts   " + ", ".join(
        f"{one.axis} = {best.mesh[one.axis]} {_describe_mode(one)}" for one in best.found
    )
    took, solved = _step_seconds(best), best.found[0].seconds
    peak = f"{format_bytes(best.tried.peak)} on the fullest rank"
    by_operators = format_seconds(solved)
    played = format_seconds(took)
    yield f"          {played} a step as played, {by_operators} by its operators; {peak}"
    yield from (f"          {row}" for row in best.found[0].first_rows)
    if other is not None and other.time is not None:
        mesh = ", ".join(f"{axis} = {count}" for axis, count in other.mesh.items())
        share = other.time.seconds / took - 1
        word = f"{share:.0%} slower" if share > 0 else f"{-share:.0%} quicker: take it"
        if abs(share) < SAME_SHARE:
            word = "as quick"
        yield f"init      {mesh}: {format_seconds(other.time.seconds)} a step, {word}"


SAME_SHARE = 0.005


def _describe_mode(one: AxisLayout) -> str:
    options = one.placed.asked
    return f"splits rows (zero {options.zero})" if options.mode == "rows" else "splits tensors"


def _plain(job: Job, best: LayoutResult | None, other: PricedPlan | None) -> dict[str, object]:
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
