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

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.tables import format_bytes, format_seconds, terminal_columns, wrap_lines
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
    base: BaseSchedule | None,
    options: Search,
    as_json: bool,
) -> None:
    """Search layouts, write and print them; exit 1 where nothing fits.

    `name` is the name of the model's file.
    """
    from schedlang.ir.model import ModelFacts
    from schedlang.passes.autoshard.knob_tuning import Job
    from schedlang.passes.complete.proposed_rows import RowTrial
    from schedlang.passes.planner.operators.fixed_rows import FixedRows, fixed_rows_of
    from schedlang.passes.planner.operators.operator_graph import build_graph
    from schedlang.passes.reduce_model.blocks import blocks_of

    start, out = time.perf_counter(), options.out
    check_folders(out=out)
    if ranks == 1:
        bad_option("one rank has nothing to split", "`--gpus 4`, or a larger mesh in the schedule")
    facts = base.plan.model if base else ModelFacts(model.model(meta=True))
    job = Job(facts, batch_of(model), model.loss, model.weight, cluster, ranks)
    trial = RowTrial(facts, blocks_of(facts), job.batch, job.loss, job.weight)
    fixed = fixed_rows_of(base.plan, trial.full_blocks) if base else FixedRows()
    meshes = [dict(base.plan.mesh.sizes)] if base else list(_meshes(ranks))
    dtype = _computing_dtype(facts, options.dtype, base)
    reasons: list[str] = []
    graph = build_graph(trial, dtype)
    problem = LayoutProblem(job, trial, fixed, base, graph, dtype, options.planner)
    # the simulated step chooses between rows and tensors: the sum of operators is too inexact
    kinds = (None,) if base else (False, True)
    results = [_best_for_mesh(problem, mesh, kind, reasons) for mesh in meshes for kind in kinds]
    best = min((result for result in results if result), key=_step_seconds, default=None)
    proposal = _best_proposal(job, meshes, dtype) if base is None else None
    if best is not None and out is not None:
        write_output(out, best.file.text)
    if as_json:
        show_json(_plain(job, best, proposal))
    else:
        print(
            wrap_lines(
                "\n".join(_report_lines(name, job, best, proposal, reasons)), terminal_columns()
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
        {"outer": ranks // count, "inner": count} for count in range(2, ranks) if ranks % count == 0
    )


def _computing_dtype(facts: ModelFacts, dtype: str, base: BaseSchedule | None) -> str:
    """Return the dtype that a model computes in; "": as stored, also for a model stored in 16
    bits."""
    from schedlang.primitives.cast import HALVES, cast

    if base is not None:
        casts = (item for item in base.plan.actions if "" in item.sites)
        cast_dtypes = (item.primitive.dtype for item in casts if isinstance(item.primitive, cast))
        return next(cast_dtypes, "")
    if dtype not in DTYPES:
        bad_option(f"`--dtype {dtype}` is none of {', '.join(DTYPES)}", "`--dtype bf16`")
    stored = any(item.dtype in HALVES for item in facts.unique_parameters.values())
    return "" if stored or dtype == "none" else dtype


def _best_for_mesh(
    problem: LayoutProblem, mesh: Mapping[str, int], rows: bool | None, notes: list[str]
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

    job, trial, base = problem.job, problem.trial, problem.begun
    solver = solve_by_walk if problem.planner == FLEXFLOW else solve
    recipe = Recipe() if problem.dtype else recipe_of(job.facts)
    limit, names = float(job.cluster.memory), list(mesh)
    strides = {axis: math.prod(mesh[o] for o in names[k + 1 :]) for k, axis in enumerate(names)}
    axes = {
        axis: LayoutRequest(size, job.cluster, strides[axis], recipe=recipe)
        for axis, size in mesh.items()
        if size > 1
    }
    for _ in range(MAX_SEARCHES):
        unity = problem.planner == UNITY
        layouts = find_legal_layouts(
            trial, axes, limit, problem.given, notes, problem.graph, unity, rows, solver
        )
        if layouts is None:
            return None
        if base is None:
            profiles = Profiles(job.facts, job.batch, job.loss, job.weight)
            relax = profiles.relax(max(mesh.values(), default=1)) if rows else ""
            schedule = layout_schedule(
                job.facts.class_name, mesh, layouts, trial, problem.dtype, relax
            )
        else:
            schedule = insert_rows(base.source, layouts, trial)
        plan = expand(schedule, job.facts).plan
        assert plan is not None
        tried = price_plan(job, plan, {})
        if tried.fits(job.cluster.memory):
            return LayoutResult(mesh, layouts, schedule, tried)
        limit = min(0.99, layouts[0].solution.bytes / tried.peak) * min(limit, job.cluster.memory)
    return None


def _step_seconds(result: LayoutResult) -> float:
    assert result.tried.time is not None
    return result.tried.time.seconds


def _best_proposal(job: Job, meshes: list[dict[str, int]], dtype: str) -> PricedPlan | None:
    """Return the fastest proposal of `init` for the same ranks and dtype; None where none fits."""
    from schedlang.passes.autoshard.knob_tuning import price_plan, rank_fitting
    from schedlang.passes.autoshard.propose import propose
    from schedlang.passes.complete.proposed_rows import precision_step
    from schedlang.passes.elaborate.expand import expand
    from schedlang.passes.reduce_model.blocks import blocks_of

    precision = (precision_step(dtype, blocks_of(job.facts)),) if dtype else ()
    priced: list[PricedPlan] = []
    for mesh in meshes:
        sizes = [*mesh.values()]
        grids = [dict(zip(("dp", "tp"), sizes))] if len(sizes) > 1 else []
        for grid in grids or [{"dp": sizes[0]}, {"tp": sizes[0]}]:
            try:
                file = propose(job.facts, job.batch, grid, job.loss, job.weight).file
                first, *steps = file.items
                file = replace(file, items=(first, *precision, *steps))
                plan = expand(file, job.facts).plan
                assert plan is not None
                priced.append(replace(price_plan(job, plan, {}), knobs=grid))
            except Refusal:  # `init` reports the reason; here there is no result
                continue
    return next(iter(rank_fitting(priced, job.cluster.memory)), None)


# -- output ----------------------------------------------------------------------------------------


def _report_lines(
    name: str, job: Job, best: LayoutResult | None, proposal: PricedPlan | None, reasons: list[str]
) -> Iterator[str]:
    yield head_line(name, job.ranks, job.cluster)
    if best is None:
        yield "nothing that is legal fits"
        yield from (f"refused   {reason}" for reason in dict.fromkeys(reasons))
        return
    yield "layouts   " + ", ".join(
        f"{layout.axis} = {best.mesh[layout.axis]} {_describe_mode(layout)}"
        for layout in best.found
    )
    seconds, solved = _step_seconds(best), best.found[0].seconds
    peak = f"{format_bytes(best.tried.peak)} on the fullest rank"
    by_operators = format_seconds(solved)
    played_text = format_seconds(seconds)
    yield f"          {played_text} a step as played, {by_operators} by its operators; {peak}"
    yield from (f"          {row}" for row in best.found[0].first_rows)
    if proposal is not None and proposal.time is not None:
        mesh = ", ".join(f"{axis} = {count}" for axis, count in proposal.mesh.items())
        share = proposal.time.seconds / seconds - 1
        comparison = f"{share:.0%} slower" if share > 0 else f"{-share:.0%} quicker: take it"
        if abs(share) < SAME_SHARE:
            comparison = "as quick"
        yield f"init      {mesh}: {format_seconds(proposal.time.seconds)} a step, {comparison}"


SAME_SHARE = 0.005


def _describe_mode(layout: AxisLayout) -> str:
    options = layout.placed.asked
    return f"splits rows (zero {options.zero})" if options.mode == "rows" else "splits tensors"


def _plain(job: Job, best: LayoutResult | None, proposal: PricedPlan | None) -> dict[str, object]:
    """Return plain values, in seconds and bytes."""
    return {
        "ranks": job.ranks,
        "mesh": None if best is None else dict(best.mesh),
        "solved": None if best is None else best.found[0].seconds,
        "seconds": None if best is None else _step_seconds(best),
        "peak": None if best is None else best.tried.peak,
        "init": None if proposal is None or proposal.time is None else proposal.time.seconds,
        "schedule": None if best is None else best.file.text,
    }
