"""The commands why and diff: reasons of rows and collectives, costs; as text, Markdown and HTML."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedlang.cli import app

MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return {"loss": self.down(torch.relu(self.up(x))).square().mean()}
def model():
    return Net()
def batch(seed):
    return {"x": torch.ones(4, 8)}
"""
HEAD = "schedule 1 for Net\n\nmesh(dp=2, tp=2)\n\n"
ROWS = "up    shard(col, over=tp)\ndown  shard(row, over=tp)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model and two schedules; the second one slices its state."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "a.sched").write_text(f"{HEAD}{ROWS}zero(stage=0, over=dp)\n")
    (tmp_path / "b.sched").write_text(f"{HEAD}{ROWS}zero(stage=1, over=dp)\n")
    return tmp_path


def run_cli(*args: object) -> tuple[int, str]:
    """Exit code and output of a command."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.output


def test_every_collective_has_a_reason_and_its_row(folder: Path) -> None:
    """Each collective names its row: sums of sharded modules, of replicas, or no row."""
    code, text = run_cli("why", folder / "a.sched", "--collectives")
    assert code == 0
    numbered = dict(re.findall(r"^ +(\d+)  (.*)$", text, re.M))
    assert len(numbered) == len(text.strip().split("\n"))
    sums = [n for n, reason in numbered.items() if "all-reduce over tp   forward: output" in reason]
    (number,) = sums
    reason = run_cli("why", folder / "a.sched", "--collective", number)[1]
    assert "a.sched:6   shard(row, over=tp)" in reason and "groups of 2 ranks along tp" in reason
    assert "each rank has a partial sum" in reason and "needs its full output" in reason
    (number,) = [n for n, reason in numbered.items() if "step: grads " in reason]
    reason = run_cli("why", folder / "a.sched", "--collective", number)[1]
    assert (
        "a.sched:7   zero(stage=0, over=dp)" in reason and "different rows of the batch" in reason
    )
    (number,) = [n for n, reason in numbered.items() if "loss and gradient norm" in reason]
    assert "by no row" in run_cli("why", folder / "a.sched", "--collective", number)[1]


def test_why_refuses(folder: Path) -> None:
    """An unknown number (S866), and no or two questions (S109), are refused."""
    code, text = run_cli("why", folder / "a.sched", "--collective", "99")
    assert code == 2 and "S866" in text and "they are numbered 0 to " in text
    for args in ((), ("up", "--collectives")):
        code, text = run_cli("why", folder / "a.sched", *args)
        assert code == 2 and "S109" in text and "needs either a module or a collective" in text


def test_a_difference_has_memory_bytes_and_actions(folder: Path) -> None:
    """The Markdown table for pull requests has the memory that slicing the optimizer state
    saves."""
    code, text = run_cli("diff", folder / "a.sched", folder / "b.sched", "--markdown")
    assert code == 0 and text.startswith("### `a.sched` → `b.sched`")
    rows = {row.split(" | ")[0].strip("| "): row for row in text.split("\n") if row.startswith("|")}
    assert re.search(r"\| -\d+\.\d% \|$", rows["peak of the fullest rank: optimizer"]), text
    assert "| `zero` | `stage: 0 -> 1` |" in text and "**~** changed" in text
    assert "Unchanged: " in text
    as_text = run_cli("diff", folder / "a.sched", folder / "b.sched")[1]
    assert re.search(r"peak of the fullest rank: optimizer .* -> .* \(-", as_text)
    equal = run_cli("diff", folder / "a.sched", folder / "a.sched", "--markdown")[1]
    assert "No difference" in equal and "| " not in equal


def test_a_difference_is_a_page_of_its_own(folder: Path) -> None:
    """The HTML page has the same rows, light and dark, and is self-contained."""
    page = folder / "d.html"
    assert run_cli("diff", folder / "a.sched", folder / "b.sched", "--html", page)[0] == 0
    text = page.read_text()
    assert "prefers-color-scheme:dark" in text and "http" not in text and len(text) < 300_000
    assert "<code>stage: 0 -&gt; 1</code>" in text and "peak of the fullest rank" in text


def test_a_saved_plan_is_compared_as_its_schedule_is(folder: Path) -> None:
    """A saved plan on either side gives the same differences as its schedule."""
    plans = {}
    for name in ("a", "b"):
        plans[name] = folder / f"{name}.json"
        assert run_cli("plan", folder / f"{name}.sched", "--out", plans[name])[0] == 0
    expected = json.loads(run_cli("diff", folder / "a.sched", folder / "b.sched", "--json")[1])
    assert expected["changes"] and any(cost["old"] != cost["new"] for cost in expected["costs"])
    for sides in (
        (plans["a"], folder / "b.sched"),
        (folder / "a.sched", plans["b"]),
        (plans["a"], plans["b"]),
    ):
        code, text = run_cli("diff", *sides, "--json")
        assert code == 0 and json.loads(text) == expected, sides
    assert "No difference" in run_cli("diff", plans["a"], folder / "a.sched", "--markdown")[1]


def test_settings_go_with_schedules(folder: Path) -> None:
    """Settings with two saved plans are refused (S109); a file that only resembles a plan, too."""
    saved = folder / "a.json"
    assert run_cli("plan", folder / "a.sched", "--out", saved)[0] == 0
    code, text = run_cli("diff", saved, saved, "--mesh", "dp=4")
    assert code == 2 and "S109" in text and "a saved plan has its own settings" in text
    assert run_cli("diff", saved, folder / "b.sched", "--mesh", "dp=4")[0] == 0
    saved.write_text(' {"plan": 2}')
    code, text = run_cli("diff", saved, folder / "b.sched")
    assert code == 2 and "S907" in text and "not hold a plan of version 1" in text


NEST = MODEL.replace(
    "def model",
    """class Mine(nn.Module):
    def __init__(self, old):
        super().__init__()
        self.up, self.down, self.act = old.up, old.down, nn.ReLU()
    def forward(self, x):
        return {"loss": self.down(self.act(self.up(x))).square().mean()}
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.replacements = Net(), {"mine": Mine}
    def forward(self, x):
        return self.net(x)
def model""",
).replace("return Net()", "return Whole()")


def test_a_saved_plan_names_modules_that_its_rows_made(tmp_path: Path) -> None:
    """A row on a module that an earlier row created is found again."""
    (tmp_path / "model.py").write_text(NEST)
    sched, saved = tmp_path / "a.sched", tmp_path / "a.json"
    sched.write_text("schedule 1 for Whole\n\nnet      replace(mine)\nnet.act  checkpoint()\n")
    assert run_cli("plan", sched, "--out", saved)[0] == 0
    code, text = run_cli("diff", saved, sched, "--json")
    assert code == 0 and json.loads(text)["changes"] == [], text
