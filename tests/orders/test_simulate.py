"""`schedlang simulate`: what it answers, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from schedlang.cli import app
from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import make_order
from schedlang.pipeline.timeline.simulation import simulate_timeline
from schedlang.verbs.costs import parse_costs

PUBLISHED = "F=18.522,I=18.086,W=9.337,comm=0.601"  # Zero Bubble, Table 9, 1.5B, p = 8, m = 24


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, words)])


def answer(*words: object) -> Any:
    found = run(*words, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_as_published() -> None:
    """1F1B and its interleaved form have the bubbles of Zero Bubble's Table 5, row one."""
    given = ("--stages", 8, "--micro", 24, "--cost", PUBLISHED)
    value = answer("--order", "1f1b", *given)
    assert round(value["bubble"], 4) == 0.2431
    assert value["peak"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert value["communication"]["messages"] == 2 * 7 * 24
    assert value["communication"]["time"][0] == pytest.approx(24 * 0.601)
    value = answer("--order", "1F1B-I", *given, "--chunks", 3)
    assert round(value["paper"]["bubble"], 4) == 0.1055


def test_as_the_timeline() -> None:
    """Both bubbles and both spans are the timeline's own; chunks take their part of the costs."""
    value = answer(
        "--order",
        "Interleaved",
        "--ranks",
        4,
        "--micro",
        8,
        "--chunks",
        3,
        "--cost",
        "F=1/3,B=2,comm=1/7",
    )
    cost = Cost(Fraction(1, 3), 1, 1, Fraction(1, 7))
    times = simulate_timeline(make_order("Interleaved1F1B", 4, 8, 3), cost)
    assert isinstance(times.rank_span, Fraction)
    assert value["rank_span"] == float(times.rank_span)
    assert value["makespan"] == float(times.makespan)
    assert value["bubble"] == float(times.span_bubble)
    assert value["makespan_bubble"] == float(times.bubble)
    assert value["busy"] == pytest.approx([8 * (1 / 3 + 2)] * 4)


def test_pictures(tmp_path: Path) -> None:
    """It draws and traces what it timed: a block and an event for each operation."""
    words = ("--order", "GPipe", "--ranks", 3, "--micro", 5)
    found = run(*words, "--svg", tmp_path / "t.svg", "--trace", tmp_path / "t.json")
    assert found.exit_code == 0 and "rank 2: F0 F1" in found.stdout
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 30
    assert (tmp_path / "t.svg").read_text().count('class="b"') == 30


def test_memory() -> None:
    """A limit that the order does not obey is said, not swallowed."""
    words = ("--order", "1F1B", "--stages", 4, "--micro", 8, "--memory")
    assert answer(*words, 3)["fits"] is False and "over the limit of 3" in run(*words, 3).stdout
    assert answer(*words, 4)["fits"] is True


def test_costs() -> None:
    """Costs are read as they are written; what is left out follows from what is there."""
    assert parse_costs(None) == Cost()
    assert parse_costs("f=2, w=1") == Cost(2, 2, 1)
    assert parse_costs("B=3,comm=0.5") == Cost(1, Fraction(3, 2), Fraction(3, 2), 0.5)
    assert parse_costs("F=1/3,kept=1/2,evict=2") == Cost(
        *[Fraction(1, 3)] * 3, kept=Fraction(1, 2), evict=2
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--order", "1F1BB"), "did you mean `1F1B`"),
        (("--order", "Interleaved1F1B", "--chunks", 1), "chunks=2"),
        (("--cost", "F=-1"), "a time must be finite, and not below 0"),
        (("--cost", "F=nan"), "a time must be finite, and not below 0"),
        (("--cost", "F=one"), "not a number"),
        (("--cost", "F=1/0"), "not a number"),
        (("--cost", "F="), "not a number"),
        (("--cost", "com=1"), "did you mean `comm`"),
        (("--cost", "F=1,f=2"), "given twice"),
        (("--cost", "B=1,W=2"), "`B` is `I` and `W` together"),
        (("--cost", "F=0,B=0"), "above 0"),
        (("--cost", "kept=2"), "share"),
        (("--stages", 0), "at least 1"),
        (("--slices", 2), "does not cut sequences"),
    ],
)
def test_refuses(words: tuple[object, ...], said: str) -> None:
    """Unknown words, sizes that an order does not have, costs that are no times: a remedy each."""
    found = run(*words)
    assert found.exit_code == 2 and said in found.output, found.output


def test_without_torch() -> None:
    """Without a schedule nothing imports torch."""
    code = (
        "import sys; from typer.testing import CliRunner; from schedlang.cli import app\n"
        "assert CliRunner().invoke(app, ['simulate', '--json']).exit_code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_table(tmp_path: Path) -> None:
    """A table of an order is timed as the order itself; a broken one is refused with its place."""
    from schedlang.pipeline.schedules import write_table

    (tmp_path / "a.csv").write_text(write_table(make_order("1F1B", 3, 5)))
    cost = ("--cost", "F=2,B=3,comm=1")
    table = answer("--order", tmp_path / "a.csv", *cost)
    named = answer("--order", "1F1B", "--stages", 3, "--micro", 5, *cost)
    same = ("rank_span", "makespan", "bubble", "peak", "communication", "stages", "micro", "chunks")
    assert {key: table[key] for key in same} == {key: named[key] for key in same}
    (tmp_path / "b.csv").write_text(write_table(make_order("1F1B", 3, 5)).replace("0B4", "0X4"))
    for words, said in (
        (("--order", tmp_path / "b.csv"), "line 1"),
        (("--order", tmp_path / "c.csv"), "cannot read the table"),
        (("--order", tmp_path / "a.csv", "--chunks", 1), "the table already sets"),
    ):
        found = run(*words)
        assert found.exit_code == 2 and said in found.output, found.output


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)] + [nn.Linear(6, 60)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def model():
    return Net()

def batch(seed):
    return {"x": torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))}
"""
SCHEDULE = """schedule 1 for Net

mesh(pp=2)

layers[3]  pipeline_split(over=pp)
pipeline(order="GPipe", micro=4)
"""


def test_estimated(tmp_path: Path) -> None:
    """Without costs those of a schedule's stages are counted: operations, bytes sent and kept."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "a.sched").write_text(SCHEDULE)
    words = (tmp_path / "a.sched", "--tflops", 1e-9, "--bandwidth", 1e-6)
    value = answer(*words)
    rows, layer = 4, 2 * 6 * 6  # operations of a row of a layer
    stages = [3 * layer * rows, (1 + 10) * layer * rows]
    assert value["cost"]["shares"] == stages  # at 1000 operations a second, in milliseconds
    assert value["cost"]["f"] == pytest.approx(sum(stages) / 2)
    assert value["busy"] == pytest.approx([4 * 3 * s for s in stages])
    sent = rows * 6 * 4  # bytes, at 1000 a second
    assert value["cost"]["between"] == [[0, 1, pytest.approx(sent)]]
    assert value["communication"]["time"] == pytest.approx([4 * sent, 4 * sent])
    assert "FLOP" in value["estimated"][0] and "estimated:" in run(*words).stdout
    given = answer(tmp_path / "a.sched", "--cost", "F=1,B=2")
    assert given["estimated"] == [] and given["makespan"] == 15
    (tmp_path / "model.py").write_text(MODEL.replace("def batch", "def other"))
    value = answer(tmp_path / "a.sched")
    assert "no batch" in value["estimated"][0] and value["makespan"] == 15
    assert "already sets" in run(tmp_path / "a.sched", "--micro", 4).output
    assert "must be finite and above 0" in run(tmp_path / "a.sched", "--tflops", 0).output
