"""`expect time(step)`: compared with given or measured times, and skipped where there are none."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from schedlang.cli import app
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.prove import Case, prove
from schedlang.passes.simulate.expectations import check_times, require_costs, unmet_expectations
from schedlang.passes.simulate.step_time import Measurement, StepSeconds, simulate_step
from schedlang.pipeline.cost import Cost
from schedlang.report import CostExpectation, Report
from tests import models
from tests.engine.threads import Threads
from tests.proofs import make_plan

PIPE = 'transformer.h  pipeline_split(over=pp)\npipeline(order="{order}", micro=4)\n'
MODEL = """
import torch
from torch import nn
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
def batch(seed):
    return {"input": torch.ones(4, 4) * (seed + 1)}
def loss(output, batch):
    return output.square().mean()
"""


def pipeline_plan(order: str = "1F1B", rows: str = "") -> Any:
    """A plan of four microbatches on two pipeline stages."""
    return make_plan(models.gpt2(), PIPE.format(order=order) + rows, "pp=2")


def test_a_step_of_given_times() -> None:
    """1F1B takes (m + p - 1)(F + B) plus what is done once per step."""
    step = simulate_step(pipeline_plan(), Cost(f=2, i=3, w=1, step=5, reduce=7))
    assert step.seconds == pytest.approx(((4 + 2 - 1) * 6 + 12) / 1e3)
    no_pipeline = simulate_step(make_plan(models.gpt2(), "", ""), Cost(f=2, i=3, w=1, step=5))
    assert no_pipeline.seconds == pytest.approx((6 + 5) / 1e3)
    four_micros = make_plan(models.gpt2(), 'pipeline(order="GPipe", micro=4)\n', "")
    assert simulate_step(four_micros, Cost(f=2, i=3, w=1)).seconds == pytest.approx(4 * 6 / 1e3)


def measured_times(**changes: Any) -> Measurement:
    """Measured times of two stages, as a run of `pipe()` records them."""
    means = {(kind, stage): t for kind, t in (("F", 2.0), ("B", 4.0)) for stage in (0, 1)}
    defaults = dict(means=means, transfer=0.0, rest=1.5, mesh={"pp": 2}, micro=4, slices=1)
    return Measurement(**(defaults | changes))


def test_a_step_of_measured_times() -> None:
    """The simulated step uses each stage's mean times, plus the time outside the pipeline."""
    assert simulate_step(pipeline_plan(), measured_times()).seconds == pytest.approx(5 * 6 + 1.5)
    slow = {**measured_times().means, ("F", 1): 3.0, ("B", 1): 5.0}
    assert simulate_step(pipeline_plan(), measured_times(means=slow)).seconds == pytest.approx(
        2 + 4 * 8 + 4 + 1.5
    )
    assert simulate_step(pipeline_plan("GPipe"), measured_times()).seconds == pytest.approx(
        5 * 6 + 1.5
    )


@pytest.mark.parametrize(
    "other, said",
    [
        ({"micro": 8}, "measured: mesh pp=2, 8 microbatches"),
        ({"mesh": {"pp": 2, "tp": 2}}, "measured: mesh pp=2, tp=2, 4 microbatches"),
        ({"means": {("F", 0): 1.0, ("B", 0): 2.0}}, "the plan: it runs B of stage 1, F of stage 1"),
    ],
)
def test_times_of_another_plan(other: Any, said: str) -> None:
    """Times measured with another mesh, microbatch count or set of operations are refused
    (S914)."""
    with pytest.raises(Refusal, match="S914") as caught:
        simulate_step(pipeline_plan(), measured_times(**other))
    assert said in str(caught.value)


def test_halves_of_a_backward() -> None:
    """A full backward is timed as its two halves; halves cannot be timed from a full backward."""
    halves = {(k, s): t for k, t in (("F", 2.0), ("I", 3.0), ("W", 1.0)) for s in (0, 1)}
    assert simulate_step(pipeline_plan(), measured_times(means=halves)).seconds == pytest.approx(
        5 * 6 + 1.5
    )
    with pytest.raises(Refusal, match="it runs I of stage 0"):
        simulate_step(pipeline_plan("ZB-H1"), measured_times())


def test_a_bound_is_held_against_a_step() -> None:
    """Lower and upper bounds are compared with the step time, if they are for the plan's device."""
    plan = pipeline_plan(rows="expect time(step) < 30ms\nexpect 20ms <= time(step)\n")
    assert list(check_times(plan, StepSeconds(0.025))) == []
    (slow,), (fast,) = (
        list(check_times(plan, StepSeconds(s, ("measured",)))) for s in (0.03, 0.01)
    )
    assert slow.code == "S860" and "does not hold: it is 30 ms" in slow.title
    assert slow.notes == ("measured",) and "20ms <= time(step)" in fast.title
    plan = pipeline_plan(rows="expect time(step) < 1us on v100\n")
    elsewhere = replace(plan, mesh=replace(plan.mesh, device="h100x2"))
    assert list(check_times(plan, StepSeconds(1.0))) and not list(
        check_times(elsewhere, StepSeconds(1.0))
    )


def test_nothing_else_holds_times(threads: Threads) -> None:
    """Building ignores time bounds; a proof reports that they are not checked, and can still
    pass."""
    plan = make_plan(nn.Linear(2, 2), "expect time(step) < 1us\n", "")
    batch = {"input": torch.ones(4, 2)}
    require_costs(plan, batch, lambda out, batch: out.sum())
    assert unmet_expectations(plan, None) == ()  # type: ignore[arg-type]
    report = prove(Case(plan, (batch,) * 3, lambda out, b: out.sum(), dtype="none"), pool=threads)
    assert report.exit_code == 0 and "time(step) < 1us   is not held here" in str(report)
    assert not Report(report.rows, bounds=(CostExpectation("x", None),)).ok


def run_verb(
    folder: Path, name: str, *options: str, text: str = "expect time(step) < 5ms\n"
) -> Result:
    """Run a verb on a schedule of the small model."""
    (folder / "model.py").write_text(MODEL)
    (folder / "x.sched").write_text(f"schedule 1 for Sequential\n{text}")
    return CliRunner().invoke(app, [name, str(folder / "x.sched"), *options])


def test_plan_holds_what_it_is_given(tmp_path: Path) -> None:
    """`plan` without times says that the bound is not compared; with `--cost` it compares, exit
    1."""
    unchecked = run_verb(tmp_path, "plan")
    assert (
        unchecked.exit_code == 0 and "`time(step) < 5ms` is not compared here" in unchecked.stderr
    )
    fits = run_verb(tmp_path, "plan", "--cost", "F=1,B=2")
    assert (
        fits.exit_code == 0 and "a step takes 3 ms" in fits.stdout and "not held" not in fits.stderr
    )
    slow = run_verb(tmp_path, "plan", "--cost", "F=1,B=2,step=3")
    assert slow.exit_code == 1 and "it is 6 ms" in slow.stderr
    record = json.loads(run_verb(tmp_path, "plan", "--cost", "F=1,B=2,step=3", "--json").stdout)
    assert record["step_seconds"] == pytest.approx(0.006)


def test_run_measures(tmp_path: Path, threads: Threads) -> None:
    """`run` compares the bound with its own steps: exit 1, with `--json` too."""
    bound = "expect time(step) < 1us\n"
    with patch("schedlang.runtime.launch.pool.Pool", lambda **_: nullcontext(threads)):
        result = run_verb(tmp_path, "run", "--steps", "2", text=bound)
        as_json = run_verb(tmp_path, "run", "--steps", "2", "--json", text=bound)
        fits = run_verb(tmp_path, "run", "--steps", "2", text=bound.replace("1us", "600s"))
    assert result.exit_code == 1 and "`time(step) < 1us` does not hold: it is" in result.stderr
    assert "the median of 1 steps on this machine" in result.stderr
    assert as_json.exit_code == 1 and json.loads(as_json.stdout)["exit"] == 1
    assert fits.exit_code == 0


def test_simulate_holds_what_it_is_given(tmp_path: Path) -> None:
    """`simulate FILE --cost` exits 1 if a bound fails; with estimated costs bounds are ignored."""
    text = """mesh(pp=2)

`2`  pipeline_split(over=pp)
pipeline(order="1F1B", micro=2)
expect time(step) < 5ms
"""
    slow = run_verb(tmp_path, "simulate", "--cost", "F=1,B=2", text=text)
    assert slow.exit_code == 1 and "it is 9 ms" in slow.stderr and "makespan" in slow.stdout
    assert run_verb(tmp_path, "simulate", "--cost", "F=0.1,B=0.2", text=text).exit_code == 0
    assert run_verb(tmp_path, "simulate", text=text).exit_code == 0
