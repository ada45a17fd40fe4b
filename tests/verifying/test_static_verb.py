"""The verb check with a model: what it prints, its JSON, its exit codes."""

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


def check(*args: object) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, args)])


@pytest.mark.parametrize("name", ["gpt2/3d", "llama/tp_sp", "llama/3d", "bert/one_device"])
def test_examples_hold(name: str) -> None:
    """Each proof has its line with counts, and what it cannot see is said."""
    file = EXAMPLES / f"{name}.sched"
    found = check(file, "--model", file.parent / "model.py")
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert lines[0] == f"{file}: holds"
    for start, line in zip(PROOFS, lines[1 : 1 + len(PROOFS)], strict=True):
        assert line.strip().startswith(start) and line.endswith(": holds")
    assert any(line.strip().startswith("not covered: values") for line in lines)


def test_the_page_shows_what_is_printed() -> None:
    """The lines on the page of static proofs are those of the program."""
    file = "examples/gpt2/3d.sched"
    page = (ROOT / "docs" / "static.md").read_text()
    printed = check(ROOT / file, "--model", ROOT / "examples/gpt2/model.py").stdout
    lines = [line for line in printed.splitlines() if line.startswith("  ")]
    shown = [line for line in lines if "not covered" not in line]
    assert len(shown) >= len(PROOFS) and not [line for line in shown if line not in page]


def test_a_bug_is_refused_with_its_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit code 2, the row in text and in JSON; the other proofs still hold."""
    replicas.replicas_not_summed(monkeypatch)
    file = EXAMPLES / "custom" / "2d.sched"
    model = ("--model", file.parent / "model.py")
    assert check(file, *model).exit_code == 0  # no data axis: the bug does not concern it
    text = '\nmesh(dp=3)\nstep "s" {\n  zero(stage=0, over=dp)\n  verify(train)\n}\n'
    schedule = tmp_path / "x.sched"
    schedule.write_text("schedule 1\n" + text)
    found = check(schedule, *model)
    told = json.loads(check(schedule, *model, "--json").stdout)
    assert found.exit_code == 2 and "x.sched:5" in found.stderr
    assert "DOES NOT HOLD" in found.stdout
    assert told["exit"] == 2
    assert {(d["code"], d["at"]["line"]) for d in told["diagnostics"]} == {("S711", 5)}
    proofs = {p["proof"]: p["holds"] for p in told["static"][str(schedule)]["proofs"]}
    assert proofs["matching"] and not proofs["reductions"]


def test_what_could_not_be_looked_at_is_not_passed(tmp_path: Path) -> None:
    """A model without a loss cannot do a step: refused as by every verb, and not said to hold."""
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
    found = check(file, "--model", tmp_path / "model.py")
    assert found.exit_code == 2, found.output
    assert "error[S615]: the model returns no loss" in found.output
    assert "holds" not in found.output
