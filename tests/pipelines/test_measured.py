"""Measured steps: what ranks record, how times are joined, and how `run` shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from schedlang.cli import app
from schedlang.passes.lower.build import build
from schedlang.passes.lower.train import MeasuredStep, join_measured, median_step
from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import ORDERS, checked_size, make_order
from schedlang.pipeline.timeline.simulation import Timing, simulate_timeline
from schedlang.pipeline.timeline.table import Kind, dependencies
from schedlang.runtime.pipeline.measured_times import MeasuredOp, StepTimer, gather_times
from schedlang.viz.timeline_page import measured_page, measured_svg, measured_trace
from tests import models
from tests.engine import Threads
from tests.proofs import make_plan, sgd
from tests.tools.test_run_command import MODEL

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
COST = Cost(0.03, 0.04, 0.02, 0.005)


def expected_notes(times: Timing, late: float = 0.0) -> list[list[MeasuredOp]]:
    """What ranks would record of a step that runs exactly as planned."""
    t, all_notes = times.timeline, []
    for rank in range(t.ranks):
        free, rank_notes = 0.0, []
        for row, op in zip(range(int(t.starts[rank]), int(t.starts[rank + 1])), t.rows(rank)):
            start, end = float(times.start[row]), float(times.end[row])
            if op.kind in (F, B, I, W, Kind.RECOMPUTE):
                rank_notes.append(MeasuredOp(op, free + late, start + late, end + late))
                free = end
        all_notes.append(rank_notes)
    return all_notes


def simulated(name: str) -> Timing:
    order = next(candidate for candidate in ORDERS if candidate.name == name)
    return simulate_timeline(
        order.make(checked_size(order, 4, 8, slices=2 if order.sliced else 1)), COST
    )


@pytest.mark.parametrize("name", [known.name for known in ORDERS])
def test_a_step_to_the_plan_gives_the_plan_back(name: str) -> None:
    """From the records of a planned step its costs, transfers and times are recovered."""
    times = simulated(name)
    measured = join_measured(times.timeline, expected_notes(times, late=7.0))
    assert np.allclose(measured.times.end - measured.times.start, times.end - times.start)
    assert abs(float(measured.times.bubble) - float(times.bubble)) < 1e-9
    share = times.timeline.ranks / times.timeline.stages / times.timeline.slices
    if times.timeline.slices == 1:
        assert abs(measured.transfer - float(COST.comm)) < 1e-9
    assert abs(measured.means()["F", 0] - 0.03 * share) < 1e-9
    assert np.allclose(measured.planned.end, times.end, atol=1e-9)


def test_the_median_step_is_taken() -> None:
    """Of several steps the one with the median time is taken."""
    plans = [simulate_timeline(make_order("1F1B", 2, 4), Cost(f, f, f)) for f in (5.0, 1.0, 3.0)]
    steps = [[expected_notes(times)[rank] for times in plans] for rank in range(2)]
    median = median_step(plans[0].timeline, steps)
    assert float(median.times.makespan) == float(plans[2].makespan)


def test_what_does_not_fit_is_a_defect() -> None:
    """An operation that was planned but not recorded, or the reverse, is an error."""
    times = simulate_timeline(make_order("1F1B", 2, 2), COST)
    for spoil in (lambda n: n[0].pop(2), lambda n: n[1].append(n[1][0])):
        noted = expected_notes(times)
        spoil(noted)
        with pytest.raises(AssertionError, match="noted"):
            join_measured(times.timeline, noted)


ROWS = 'blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=4)'


def timed_steps(plan: Any, batch: Any) -> Any:
    """On this rank: two timed steps; return the records of all ranks and the timeline."""
    program = build(plan, batch, optimizer=sgd)
    watch = program.watch = StepTimer(
        program.assembly.pipeline, program.assembly.pipeline.mail.device
    )
    for _ in range(2):
        with watch.step():
            program.train_step(batch)
    assert "take" not in vars(program.assembly.pipeline.mail)
    return gather_times(watch), program.assembly.pipeline.timeline


def test_ranks_note_what_they_run(threads: Threads) -> None:
    """Every operation is recorded once, in planned order, after its dependencies."""
    plan = make_plan(models.Skipping(), ROWS, "pp=2")
    (steps, timeline), (other_steps, _) = threads.run(timed_steps, 2, plan, models.points())
    assert steps == other_steps
    for rank_steps in zip(*steps):
        measured = join_measured(timeline, rank_steps)
        producers, consumers = dependencies(measured.timeline)
        assert (measured.end[producers] <= measured.start[consumers]).all()
        assert (measured.turn <= measured.start).all() and (measured.start < measured.end).all()
        assert measured.transfer >= 0 and 0 <= float(measured.times.bubble) < 1


def example_step() -> MeasuredStep:
    times = simulated("Interleaved1F1B")
    return join_measured(times.timeline, expected_notes(times))


def test_pictures_show_both() -> None:
    """Picture, page and trace show planned and measured times, without external resources."""
    measured = example_step()
    root = ElementTree.fromstring(measured_svg(measured, "a < b"))
    blocks = [e for e in root.iter() if e.get("class") == "b"]
    assert len(blocks) == 2 * len(measured.timeline)
    page = measured_page(measured, "a < b")
    without_namespace = page.replace("http://www.w3.org/2000/svg", "")
    assert (
        "http" not in without_namespace
        and "<script" not in without_namespace
        and len(page) < 300_000
    )
    bubble = f"{float(measured.times.span_bubble):.2%}"
    assert page.count(bubble) >= 2 and "<b" not in page.split("</h1>")[0]
    trace = json.loads(measured_trace(measured))
    assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == 2 * len(measured.timeline)
    assert trace["pipeline"] == measured.to_json()


SCHEDULE = """schedule 1 for Net

mesh(pp=2)

up  pipeline_split(over=pp)
pipeline(order="1F1B", micro=2)
"""


@pytest.fixture
def sched(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL.replace("DIES", ""))
    file = tmp_path / "net.sched"
    file.write_text(SCHEDULE)
    return file


def run_cli(*args: object) -> Result:
    return CliRunner().invoke(app, ["run", *(str(arg) for arg in args)])


@pytest.mark.deep
def test_run_draws_what_ran(sched: Path) -> None:
    """`run --timeline` writes the picture and prints both bubbles."""
    picture = sched.parent / "out.svg"
    result = run_cli(sched, "--steps", 3, "--timeline", picture)
    assert result.exit_code == 0, result.output
    assert "measured" in result.stdout and "simulated" in result.stdout
    root = ElementTree.fromstring(picture.read_text())
    assert len([e for e in root.iter() if e.get("class") == "b"]) == 2 * 2 * 4


def test_run_refuses_what_it_cannot_draw(sched: Path) -> None:
    """Another file type, or a plan without pipeline: exit code 2 before ranks start."""
    result = run_cli(sched, "--timeline", sched.parent / "out.png")
    assert result.exit_code == 2 and "*.svg" in result.stderr
    sched.write_text("schedule 1 for Net\n\nmesh(dp=2)\n\nzero(stage=1, over=dp)\n")
    result = run_cli(sched, "--timeline", sched.parent / "out.svg")
    assert result.exit_code == 2 and "no pipeline" in result.stderr
