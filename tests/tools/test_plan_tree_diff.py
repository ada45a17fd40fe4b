"""The commands plan, tree and diff."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from schedlang.cli import app

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, y):
        return ((self.down(torch.relu(self.up(x))) - y) ** 2).mean()

def model():
    return Net()

def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, 6, generator=g), "y": torch.randn(4, 6, generator=g)}
"""
PLAIN = "schedule 1 for Net\n\nmesh(tp=2)\n\nup    shard(col, over=tp)\ndown  shard(row, over=tp)\n"
MORE = PLAIN.replace("mesh(tp=2)", "mesh(dp=2, tp=2)") + "\nzero(stage=1, over=dp)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "a.sched").write_text(PLAIN)
    (tmp_path / "b.sched").write_text(MORE)
    return tmp_path


def run_cli(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_plan(folder: Path) -> None:
    """`plan` prints rows and costs, draws pictures, and saves a record."""
    files = {name: folder / f"p.{name}" for name in ("svg", "html", "json")}
    result = run_cli(
        "plan",
        folder / "a.sched",
        "--svg",
        files["svg"],
        "--html",
        files["html"],
        "--out",
        files["json"],
    )
    assert result.exit_code == 0, result.output
    assert "f32[8@tp, 6]" in result.stdout and "activations" in result.stdout
    assert files["svg"].read_text().startswith("<svg") and "</svg>" in files["html"].read_text()
    saved = json.loads(files["json"].read_text())
    assert saved["mesh"] == {"tp": 2} and len(saved["actions"]) == 2
    assert "shard(col, over=tp)" in saved["schedule_text"]
    record = json.loads(run_cli("plan", folder / "a.sched", "--json").stdout)
    assert record["account"]["ranks"][0]["parameters"] == 4 * (4 * 6 + 4 + 6 * 4 + 6)


def test_plan_refuses(folder: Path) -> None:
    """A trace without a pipeline, or a misspelt module, exits 2."""
    assert run_cli("plan", folder / "a.sched", "--trace", folder / "t.json").exit_code == 2
    assert not (folder / "t.json").exists()
    misspelt = run_cli("why", folder / "a.sched", "upp")
    assert misspelt.exit_code == 2 and "did you mean `up`?" in misspelt.output
    result = run_cli("why", folder / "a.sched", "up.weight")
    assert result.exit_code == 0 and "a.sched:5" in result.stdout


def test_plan_without_a_batch(folder: Path) -> None:
    """A model file without `batch` is planned, without counting collectives."""
    (folder / "model.py").write_text(MODEL.replace("def batch", "def other"))
    result = run_cli("plan", folder / "a.sched")
    assert result.exit_code == 0 and "collectives are not counted" in result.stdout


def test_tree(folder: Path) -> None:
    """`tree` takes a schedule or a model file."""
    for files in (("a.sched",), ("model.py",)):
        result = run_cli("tree", *(folder / file for file in files))
        assert result.exit_code == 0 and "weight f32[out 8, in 6]" in result.stdout
    value = json.loads(run_cli("tree", folder / "model.py", "--json").stdout)
    assert [child["name"] for child in value["children"]] == ["up", "down"]


def test_diff(folder: Path) -> None:
    """`diff` names the new action and what it saves; equal files have no difference."""
    result = run_cli("diff", folder / "a.sched", folder / "b.sched")
    assert result.exit_code == 0
    assert "+ the model" in result.stdout and "stage=1, over=dp" in result.stdout
    assert "parameters per rank, at most 232 B -> " in result.stdout
    value = json.loads(run_cli("diff", folder / "a.sched", folder / "a.sched", "--json").stdout)
    assert value["changes"] == [] and all(c["old"] == c["new"] for c in value["costs"])
