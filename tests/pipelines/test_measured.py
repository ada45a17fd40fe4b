"""A step as it ran: what ranks note, what follows from it, and how `run` shows it."""

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
from tests.proofs import planned, sgd
from tests.tools.test_run import MODEL

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
COST = Cost(0.03, 0.04, 0.02, 0.005)


def notes(times: Timing, late: float = 0.0) -> list[list[MeasuredOp]]:
    """What ranks would note of a step that runs to the plan: turns come when the rank is free."""
    t, found = times.timeline, []
    for rank in range(t.ranks):
        free, own = 0.0, []
        for row, op in zip(range(int(t.starts[rank]), int(t.starts[rank + 1])), t.rows(rank)):
            start, end = float(times.start[row]), float(times.end[row])
            if op.kind in (F, B, I, W, Kind.RECOMPUTE):
                own.append(MeasuredOp(op, free + late, start + late, end + late))
                free = end
        found.append(own)
    return found


def of(name: str) -> Timing:
    known = next(one for one in ORDERS if one.name == name)
    return simulate_timeline(
        known.make(checked_size(known, 4, 8, slices=2 if known.sliced else 1)), COST
    )


@pytest.mark.parametrize("name", [known.name for known in ORDERS])
def test_a_step_to_the_plan_gives_the_plan_back(name: str) -> None:
    """Costs and transfers are found again from what was noted, and with them every time."""
    times = of(name)
    found = join_measured(times.timeline, notes(times, late=7.0))
    assert np.allclose(found.times.end - found.times.start, times.end - times.start)
    assert abs(float(found.times.bubble) - float(times.bubble)) < 1e-9
    share = times.timeline.ranks / times.timeline.stages / times.timeline.slices
    if times.timeline.slices == 1:
        assert abs(found.transfer - float(COST.comm)) < 1e-9
    assert abs(found.means()["F", 0] - 0.03 * share) < 1e-9
    assert np.allclose(found.planned.end, times.end, atol=1e-9)


def test_the_median_step_is_taken() -> None:
    """Of several steps that which is in the middle by its time."""
    plans = [simulate_timeline(make_order("1F1B", 2, 4), Cost(f, f, f)) for f in (5.0, 1.0, 3.0)]
    steps = [[notes(times)[place] for times in plans] for place in range(2)]
    found = median_step(plans[0].timeline, steps)
    assert float(found.times.makespan) == float(plans[2].makespan)


def test_what_does_not_fit_is_a_defect() -> None:
    """An operation that was planned and not noted, or the reverse, is not passed over."""
    times = simulate_timeline(make_order("1F1B", 2, 2), COST)
    for wrong in (lambda n: n[0].pop(2), lambda n: n[1].append(n[1][0])):
        noted = notes(times)
        wrong(noted)
        with pytest.raises(AssertionError, match="noted"):
            join_measured(times.timeline, noted)


ROWS = 'blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=4)'


def watched(plan: Any, batch: Any) -> Any:
    """On this rank: two watched steps; what all ranks noted, and the gradients of the last."""
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
    """Every forward and backward once, in planned order, after what it needs on other ranks."""
    plan = planned(models.Skipping(), ROWS, "pp=2")
    (steps, timeline), (others, _) = threads.run(watched, 2, plan, models.points())
    assert steps == others
    for one in zip(*steps):
        found = join_measured(timeline, one)
        made, used = dependencies(found.timeline)
        assert (found.end[made] <= found.start[used]).all()
        assert (found.turn <= found.start).all() and (found.start < found.end).all()
        assert found.transfer >= 0 and 0 <= float(found.times.bubble) < 1


def example() -> MeasuredStep:
    times = of("Interleaved1F1B")
    return join_measured(times.timeline, notes(times))


def test_pictures_show_both() -> None:
    """Planned and measured bars of each rank; a page and a trace with the figures; all alone."""
    found = example()
    root = ElementTree.fromstring(measured_svg(found, "a < b"))
    blocks = [e for e in root.iter() if e.get("class") == "b"]
    assert len(blocks) == 2 * len(found.timeline)
    page = measured_page(found, "a < b")
    alone = page.replace("http://www.w3.org/2000/svg", "")
    assert "http" not in alone and "<script" not in alone and len(page) < 300_000
    bubble = f"{float(found.times.span_bubble):.2%}"
    assert page.count(bubble) >= 2 and "<b" not in page.split("</h1>")[0]
    trace = json.loads(measured_trace(found))
    assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == 2 * len(found.timeline)
    assert trace["pipeline"] == found.to_json()


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


def call(*args: object) -> Result:
    return CliRunner().invoke(app, ["run", *(str(arg) for arg in args)])


@pytest.mark.deep
def test_run_draws_what_ran(sched: Path) -> None:
    """`run --timeline` writes the picture and says both bubbles."""
    out = sched.parent / "out.svg"
    done = call(sched, "--steps", 3, "--timeline", out)
    assert done.exit_code == 0, done.output
    assert "measured" in done.stdout and "simulated" in done.stdout
    root = ElementTree.fromstring(out.read_text())
    assert len([e for e in root.iter() if e.get("class") == "b"]) == 2 * 2 * 4


def test_run_refuses_what_it_cannot_draw(sched: Path) -> None:
    """Another form of file, or a plan without a pipeline: exit 2 before a rank starts."""
    done = call(sched, "--timeline", sched.parent / "out.png")
    assert done.exit_code == 2 and "*.svg" in done.stderr
    sched.write_text("schedule 1 for Net\n\nmesh(dp=2)\n\nzero(stage=1, over=dp)\n")
    done = call(sched, "--timeline", sched.parent / "out.svg")
    assert done.exit_code == 2 and "no pipeline" in done.stderr
