"""Rows `expect` are checked by `verify`, `build`, `plan` and `run`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import schedlang
from schedlang.cli import app
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.modelfile import load_model_file
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.prove import Case, prove
from schedlang.verbs.inputs import make_proof_case
from tests.engine.threads import Threads
from tests.proofs import make_plan

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
ROWS = 'schedule 1 for Sequential\nmesh(dp=2)\nstep "a" {\n  zero(stage=0, over=dp)\n}\n'
HOLDS = "expect peak_memory < 1GiB\nexpect comm_bytes(dp) > 0\n"
FAILS = f"{HOLDS}expect peak_memory < 16B\n"


def run_verb(folder: Path, name: str, text: str, *options: str) -> Result:
    """Run a command on a schedule of the small model."""
    (folder / "model.py").write_text(MODEL)
    (folder / "x.sched").write_text(text)
    return CliRunner().invoke(app, [name, str(folder / "x.sched"), *options])


def squared_loss(output: Any, batch: Any) -> Any:
    """Return the loss."""
    return output.square().mean()


def test_verify_has_a_line_for_each(threads: Threads) -> None:
    """A proof fails (exit 1) if costs exceed a bound, and blames no row for it."""
    plan = make_plan(nn.Sequential(nn.Linear(4, 4)), f"zero(stage=0, over=dp)\n{FAILS}", "dp=2")
    batches = tuple({"input": torch.rand(4, 4)} for _ in range(3))
    report = prove(Case(plan, batches, squared_loss, dtype="none"), pool=threads)
    assert all(row.ok for row in report.rows) and not report.ok and report.exit_code == 1
    assert [bound.holds for bound in report.bounds] == [True, True, False]
    text = str(report)
    assert " expected           peak_memory < 16B   does not hold: it is " in text
    assert "zero(stage=1, over=dp)" in text and "FAIL in" in text
    assert "to blame" not in text and "first difference" not in text
    assert report.to_json()["bounds"][2]["holds"] is False
    untold = replace(report, bounds=(replace(report.bounds[2], holds=None),))
    assert untold.exit_code == 3 and "peak_memory < 16B   cannot be computed" in str(untold)


def test_a_smaller_mesh_stands_for_the_files_own(tmp_path: Path) -> None:
    """Verified on a smaller mesh, bounds apply to the costs on the file's own mesh."""
    bound = ROWS + "expect comm_bytes(dp) > 0\n"
    assert run_verb(tmp_path, "plan", bound, "--mesh", "dp=1").exit_code == 1
    model_file = load_model_file(None, tmp_path / "x.sched")
    for sizes, world in (({}, 2), ({"dp": 1}, 2)):
        proof = make_proof_case(tmp_path / "x.sched", model_file, Settings(mesh=sizes))
        assert (
            proof.case.expected_for is not None and proof.case.expected_for[0].mesh.world == world
        )
        assert proof.case.plan.mesh.world == sizes.get("dp", 2)
    part = make_proof_case(tmp_path / "x.sched", model_file, Settings(), only="4").case
    assert part.expected_for is None and not part.plan.expected, (
        "a part of the rows costs something else"
    )


@pytest.mark.parametrize("bound", [HOLDS, FAILS])
def test_build_refuses(bound: str) -> None:
    """`build` refuses a program whose costs exceed a bound (S860)."""
    sch: Any = schedlang.create_schedule(nn.Sequential(nn.Linear(4, 4)))
    sch.mesh(dp=1)
    sch.zero(stage=0, over="dp")
    sch.expect("peak_memory < 16B" if bound is FAILS else "peak_memory < 1GiB")
    arguments = {"batch": {"input": torch.ones(4, 4)}, "loss": lambda output, batch: output.sum()}
    if bound is HOLDS:
        assert sch.build(**arguments).assembly.parameters
        return
    with pytest.raises(Refusal, match="S860"):
        sch.build(**arguments)
    unbuilt = sch.build(loss=arguments["loss"])
    with pytest.raises(Refusal, match="S860"):
        unbuilt.train_step(arguments["batch"])


def test_a_saved_plan_keeps_what_is_expected(tmp_path: Path) -> None:
    """`plan --out` saves bounds; `run --plan` ends with exit 1 before ranks start."""
    saved = tmp_path / "p.json"
    plan_result = run_verb(tmp_path, "plan", ROWS + FAILS, "--out", str(saved))
    assert plan_result.exit_code == 1 and "S860" in plan_result.output
    saved_bounds = json.loads(saved.read_text())["expected"]
    assert [entry["said"] for entry in saved_bounds][-1] == "peak_memory < 16B"
    run_result = CliRunner().invoke(app, ["run", "--plan", str(saved), "--steps", "1"])
    assert (
        run_result.exit_code == 1
        and "`peak_memory < 16B` does not hold: it is" in run_result.output
    )
    assert "loss" not in run_result.stdout
    saved.write_text(json.dumps(json.loads(saved.read_text()) | {"expected": [{"op": "<"}]}))
    run_result = CliRunner().invoke(app, ["run", "--plan", str(saved)])
    assert (
        run_result.exit_code == 2
        and "S907" in run_result.output
        and "expected[0]" in run_result.output
    )
