"""`tune --aim` and `fabric`: what they write is verified, reports match the plan, and
refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schedlang.cli import app
from tests.tuning.test_tune import MODEL, SHEET

NODES = """
[[node]]
device = "sheet"
ranks = 1
price = 7.2
power = 700
limits = [[400, 0.7]]

[[node]]
device = "slow"
ranks = 1
price = 0.36
power = 300
"""
SLOW_SHEET = (
    SHEET.replace("[sheet]", "[slow]").replace("= 989e12", "= 494e12").replace("3350", "1675")
)
LAYOUT = """schedule 1 for Net

mesh(dp=4)

step "all" {
  zero(stage=0, over=dp)
}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model file, and a cluster file with a quick expensive node and a slow cheap one."""
    (tmp_path / "cluster.toml").write_text(NODES + SHEET + SLOW_SHEET)
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path / "model.py"


def run_command(*arguments: object, code: int = 0) -> Any:
    """Run a command, and return its JSON, or its output for exit code 2."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    if code == 2:
        return result.output
    return json.loads(result.stdout)


def test_the_cheapest_node_is_written_and_proven(model: Path) -> None:
    """The slow node costs less; a deadline that it misses selects the quick node, and if all nodes
    miss the deadline nothing is written."""
    best, on = model.parent / "best.sched", model.parent / "cluster.toml"
    arguments = (
        "tune",
        model,
        "--on",
        on,
        "--dtype",
        "none",
        "--aim",
        "cost",
        "--json",
        "-o",
        best,
    )
    arguments = (*arguments, "--pin", "zero=0", "--pin", "pp=1")
    slow = run_command(*arguments, "--samples", "16G")
    assert [node["device"]["name"] for node in slow["cluster"]["nodes"]] == ["slow"]
    assert "`order = [2]` in its file" in slow["schedule"].replace("\n# ", " ")
    seconds = slow["seconds"] * 2**30
    header_text = slow["schedule"].replace("\n# ", " ")
    assert "Training: 1,073,741,824 steps of 16 rows take" in header_text
    assert f"{seconds * 0.36 / 3600:,.2f} at these prices" in header_text
    assert "least cost of 3 choices" in header_text and "1 node of 1 sheet" in header_text
    verified = CliRunner().invoke(app, ["verify", str(best), "--model", str(model)])
    assert verified.exit_code == 0, verified.output
    quick = run_command(*arguments, "--samples", "16G", "--deadline", f"{seconds * 0.9}s")
    assert [node["device"]["name"] for node in quick["cluster"]["nodes"]] == ["sheet"]
    best.unlink()
    none = run_command(*arguments, "--samples", "16G", "--deadline", f"{seconds / 10}s", code=1)
    assert none["best"] is None and not best.exists()
    assert "too late" in none["rejected"][0]["reason"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--aim cost", "nothing says how long the training is"),
        ("--aim coast --samples 1M", "none of time, cost, energy"),
        ("--aim energy --samples 1M --eta 2", "`--eta 2` is no share"),
        ("--aim cost --samples 1M --eta 0.5", "weighs energy, not cost"),
        ("--deadline 7x --samples 1M", "cannot read `--deadline 7x`"),
        ("--deadline -7h --samples 1M", "must be finite and above 0"),
        ("--aim cost --samples 1Q", "cannot read `--samples 1Q`"),
        ("--samples 512=3", "fewer rows than one of its steps"),
        ("--tokens 3G", "have no tokens"),
        ("--layouts --aim cost", "looks for the quickest step alone"),
        ("--layouts --on a100 --gpus 1", "one rank has nothing to split"),
        ("--aim cost --samples 1M --on a100x2", "`a100` says none"),
    ],
)
def test_what_an_aim_cannot_be_is_refused(model: Path, words: str, said: str) -> None:
    """Wrong aims are refused before any search, with valid values (S109)."""
    on = () if "--on" in words else ("--on", model.parent / "cluster.toml")
    output = run_command("tune", model, *on, *words.split(), code=2)
    assert "S109" in output and said in " ".join(output.split()), output


def test_a_fabric_is_wired_for_the_plan(model: Path) -> None:
    """Four hosts with two links each: an all-reduce uses both rings."""
    file, on = model.parent / "my.sched", model.parent / "four.toml"
    file.write_text(LAYOUT)
    on.write_text(NODES.replace("ranks = 1", "ranks = 1\ncount = 2") + SHEET + SLOW_SHEET)
    arguments = ("fabric", file, "--model", model, "--on", on)
    report = run_command(*arguments, "--links", 2, "--json")
    assert (report["hosts"], report["strides"], report["messages"]) == (4, [1, 3], [])
    (ring,) = report["rings"]
    assert ring["hosts"] == [0, 1, 2, 3] and ring["strides"] == [1, 3]
    assert report["seconds"] == pytest.approx(ring["bytes"] / 2 / 25e9)
    assert report["switch"] == pytest.approx(ring["bytes"] / 50e9)
    assert len(report["links"]) == 8 and [3, 0] in report["links"]
    printed = CliRunner().invoke(app, list(map(str, arguments)))
    assert printed.exit_code == 0 and "1 link of 50 GB/s each" in printed.output, printed.output
    for options, reason in (
        (("--links", 4), "a host has 3 others"),
        (("--mesh", "dp=2"), "there is nothing to choose"),
    ):
        assert reason in " ".join(run_command(*arguments, *options, code=2).split())
    assert "the cluster is missing" in run_command("fabric", file, "--model", model, code=2)
