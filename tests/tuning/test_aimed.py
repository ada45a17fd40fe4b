"""tune --aim and fabric: what they write runs, what they say is of the plan, what is wrong is
refused."""

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
SLOW = SHEET.replace("[sheet]", "[slow]").replace("= 989e12", "= 494e12").replace("3350", "1675")
LAYOUT = """schedule 1 for Net

mesh(dp=4)

step "all" {
  zero(stage=0, over=dp)
}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model file; beside it a cluster of a quick node that is dear, and a slow one."""
    (tmp_path / "cluster.toml").write_text(NODES + SHEET + SLOW)
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path / "model.py"


def ran(*words: object, code: int = 0) -> Any:
    """What a command printed; of refusals the first message."""
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == code, done.output
    if code == 2:
        return done.output
    return json.loads(done.stdout)


def test_the_cheapest_node_is_written_and_proven(model: Path) -> None:
    """The slow node takes longer and costs less; a deadline that it misses makes it the quick one,
    and of one that all miss nothing is written."""
    best, on = model.parent / "best.sched", model.parent / "cluster.toml"
    words = ("tune", model, "--on", on, "--dtype", "none", "--aim", "cost", "--json", "-o", best)
    words = (*words, "--pin", "zero=0", "--pin", "pp=1")
    slow = ran(*words, "--samples", "16G")
    assert [one["device"]["name"] for one in slow["cluster"]["nodes"]] == ["slow"]
    assert "`order = [2]` in its file" in slow["schedule"].replace("\n# ", " ")
    took = slow["seconds"] * 2**30
    told = slow["schedule"].replace("\n# ", " ")
    assert "Training: 1,073,741,824 steps of 16 rows take" in told
    assert f"{took * 0.36 / 3600:,.2f} at these prices" in told
    assert "least cost of 3 choices" in told and "1 node of 1 sheet" in told
    verified = CliRunner().invoke(app, ["verify", str(best), "--model", str(model)])
    assert verified.exit_code == 0, verified.output
    quick = ran(*words, "--samples", "16G", "--deadline", f"{took * 0.9}s")
    assert [one["device"]["name"] for one in quick["cluster"]["nodes"]] == ["sheet"]
    best.unlink()
    none = ran(*words, "--samples", "16G", "--deadline", f"{took / 10}s", code=1)
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
    """Before any search, with what would be legal (S109)."""
    on = () if "--on" in words else ("--on", model.parent / "cluster.toml")
    output = ran("tune", model, *on, *words.split(), code=2)
    assert "S109" in output and said in " ".join(output.split()), output


def test_a_fabric_is_wired_for_the_plan(model: Path) -> None:
    """Four hosts of one rank: a sum goes round both rings that two links of each host make."""
    file, on = model.parent / "my.sched", model.parent / "four.toml"
    file.write_text(LAYOUT)
    on.write_text(NODES.replace("ranks = 1", "ranks = 1\ncount = 2") + SHEET + SLOW)
    words = ("fabric", file, "--model", model, "--on", on)
    found = ran(*words, "--links", 2, "--json")
    assert (found["hosts"], found["strides"], found["messages"]) == (4, [1, 3], [])
    (ring,) = found["rings"]
    assert ring["hosts"] == [0, 1, 2, 3] and ring["strides"] == [1, 3]
    assert found["seconds"] == pytest.approx(ring["bytes"] / 2 / 25e9)
    assert found["switch"] == pytest.approx(ring["bytes"] / 50e9)
    assert len(found["links"]) == 8 and [3, 0] in found["links"]
    said = CliRunner().invoke(app, list(map(str, words)))
    assert said.exit_code == 0 and "1 link of 50 GB/s each" in said.output, said.output
    for more, why in (
        (("--links", 4), "a host has 3 others"),
        (("--mesh", "dp=2"), "there is nothing to choose"),
    ):
        assert why in " ".join(ran(*words, *more, code=2).split())
    assert "the cluster is missing" in ran("fabric", file, "--model", model, code=2)
