"""The command `check` with a model: output, JSON and exit codes."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from schedlang.cli import app
from tests.zoo import replicas

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROOFS = ("reductions", "placement types", "loss weights", "matching", "ownership")


def run_check(*args: object) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, args)])


@pytest.mark.parametrize("name", ["gpt2/3d", "llama/tp_sp", "llama/3d", "bert/one_device"])
def test_examples_hold(name: str) -> None:
    """Each static proof has a line with counts; what is not covered is listed."""
    file = EXAMPLES / f"{name}.sched"
    result = run_check(file, "--model", file.parent / "model.py")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"{file}: holds"
    for start, line in zip(PROOFS, lines[1 : 1 + len(PROOFS)], strict=True):
        assert line.strip().startswith(start) and line.endswith(": holds")
    assert any(line.strip().startswith("not covered: values") for line in lines)


def test_the_page_shows_what_is_printed() -> None:
    """The documentation page of static proofs shows the command's output."""
    file = "examples/gpt2/3d.sched"
    page = (ROOT / "docs" / "static.md").read_text()
    printed = run_check(ROOT / file, "--model", ROOT / "examples/gpt2/model.py").stdout
    lines = [line for line in printed.splitlines() if line.startswith("  ")]
    proof_lines = [line for line in lines if "not covered" not in line]
    assert len(proof_lines) >= len(PROOFS) and not [
        line for line in proof_lines if line not in page
    ]


def test_a_bug_is_refused_with_its_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bug gives exit code 2 and its row in text and JSON; the other proofs still hold."""
    replicas.replicas_not_summed(monkeypatch)
    file = EXAMPLES / "custom" / "2d.sched"
    model = ("--model", file.parent / "model.py")
    assert run_check(file, *model).exit_code == 0  # no data axis: the bug does not concern it
    text = '\nmesh(dp=3)\nstep "s" {\n  zero(stage=0, over=dp)\n  verify(train)\n}\n'
    schedule = tmp_path / "x.sched"
    schedule.write_text("schedule 1\n" + text)
    result = run_check(schedule, *model)
    document = json.loads(run_check(schedule, *model, "--json").stdout)
    assert result.exit_code == 2 and "x.sched:5" in result.stderr
    assert "DOES NOT HOLD" in result.stdout
    assert document["exit"] == 2
    assert {(d["code"], d["at"]["line"]) for d in document["diagnostics"]} == {("S711", 5)}
    proofs = {p["proof"]: p["holds"] for p in document["static"][str(schedule)]["proofs"]}
    assert proofs["matching"] and not proofs["reductions"]


def test_what_could_not_be_looked_at_is_not_passed(tmp_path: Path) -> None:
    """A model without a loss is refused, and not reported as holding."""
    (tmp_path / "model.py").write_text(
        textwrap.dedent("""
            import torch
            from torch import nn

            def model():
                return nn.Sequential(nn.Linear(4, 4), nn.ReLU())

            def batch(seed):
                return {"input": torch.zeros(4, 4)}
        """)
    )
    file = tmp_path / "x.sched"
    file.write_text('schedule 1\n\nstep "s" {\n  `0`  checkpoint()\n  verify(forward)\n}\n')
    result = run_check(file, "--model", tmp_path / "model.py")
    assert result.exit_code == 2, result.output
    assert "error[S615]: the model returns no loss" in result.output
    assert "holds" not in result.output
