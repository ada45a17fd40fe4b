"""The command `schedlang simulate`: its answers and its refusals."""

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


def run_simulate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def simulate_json(*arguments: object) -> Any:
    result = run_simulate(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_as_published() -> None:
    """1F1B and its interleaved form have the bubbles of Zero Bubble's Table 5, row one."""
    arguments = ("--stages", 8, "--micro", 24, "--cost", PUBLISHED)
    value = simulate_json("--order", "1f1b", *arguments)
    assert round(value["bubble"], 4) == 0.2431
    assert value["peak"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert value["communication"]["messages"] == 2 * 7 * 24
    assert value["communication"]["time"][0] == pytest.approx(24 * 0.601)
    value = simulate_json("--order", "1F1B-I", *arguments, "--chunks", 3)
    assert round(value["paper"]["bubble"], 4) == 0.1055


def test_as_the_timeline() -> None:
    """Bubbles and spans equal the simulator's; chunks take their share of the costs."""
    value = simulate_json(
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
    """The picture and the trace have one block and one event for each operation."""
    arguments = ("--order", "GPipe", "--ranks", 3, "--micro", 5)
    result = run_simulate(*arguments, "--svg", tmp_path / "t.svg", "--trace", tmp_path / "t.json")
    assert result.exit_code == 0 and "rank 2: F0 F1" in result.stdout
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 30
    assert (tmp_path / "t.svg").read_text().count('class="b"') == 30


def test_memory() -> None:
    """An order that exceeds the memory limit is reported."""
    arguments = ("--order", "1F1B", "--stages", 4, "--micro", 8, "--memory")
    assert (
        simulate_json(*arguments, 3)["fits"] is False
        and "over the limit of 3" in run_simulate(*arguments, 3).stdout
    )
    assert simulate_json(*arguments, 4)["fits"] is True


def test_costs() -> None:
    """Costs are parsed; missing ones follow from the others."""
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
    """Unknown names, illegal sizes and invalid costs are refused, each with a help."""
    result = run_simulate(*words)
    assert result.exit_code == 2 and said in result.output, result.output


def test_without_torch() -> None:
    """Without a schedule nothing imports torch."""
    code = (
        "import sys; from typer.testing import CliRunner; from schedlang.cli import app\n"
        "assert CliRunner().invoke(app, ['simulate', '--json']).exit_code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_table(tmp_path: Path) -> None:
    """A table is timed as the order itself; an invalid one is refused with its position."""
    from schedlang.pipeline.schedules import write_table

    (tmp_path / "a.csv").write_text(write_table(make_order("1F1B", 3, 5)))
    cost = ("--cost", "F=2,B=3,comm=1")
    table = simulate_json("--order", tmp_path / "a.csv", *cost)
    by_name = simulate_json("--order", "1F1B", "--stages", 3, "--micro", 5, *cost)
    compared_keys = (
        "rank_span",
        "makespan",
        "bubble",
        "peak",
        "communication",
        "stages",
        "micro",
        "chunks",
    )
    assert {key: table[key] for key in compared_keys} == {
        key: by_name[key] for key in compared_keys
    }
    (tmp_path / "b.csv").write_text(write_table(make_order("1F1B", 3, 5)).replace("0B4", "0X4"))
    for arguments, expected in (
        (("--order", tmp_path / "b.csv"), "line 1"),
        (("--order", tmp_path / "c.csv"), "cannot read the table"),
        (("--order", tmp_path / "a.csv", "--chunks", 1), "the table already sets"),
    ):
        result = run_simulate(*arguments)
        assert result.exit_code == 2 and expected in result.output, result.output


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
    """Without `--cost` costs are estimated from a schedule's stages: operations and bytes."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "a.sched").write_text(SCHEDULE)
    arguments = (tmp_path / "a.sched", "--tflops", 1e-9, "--bandwidth", 1e-6)
    value = simulate_json(*arguments)
    rows, layer = 4, 2 * 6 * 6  # operations of a row of a layer
    stages = [3 * layer * rows, (1 + 10) * layer * rows]
    assert value["cost"]["shares"] == stages  # at 1000 operations a second, in milliseconds
    assert value["cost"]["f"] == pytest.approx(sum(stages) / 2)
    assert value["busy"] == pytest.approx([4 * 3 * s for s in stages])
    sent = rows * 6 * 4  # bytes, at 1000 a second
    assert value["cost"]["between"] == [[0, 1, pytest.approx(sent)]]
    assert value["communication"]["time"] == pytest.approx([4 * sent, 4 * sent])
    assert "FLOP" in value["estimated"][0] and "estimated:" in run_simulate(*arguments).stdout
    with_costs = simulate_json(tmp_path / "a.sched", "--cost", "F=1,B=2")
    assert with_costs["estimated"] == [] and with_costs["makespan"] == 15
    (tmp_path / "model.py").write_text(MODEL.replace("def batch", "def other"))
    value = simulate_json(tmp_path / "a.sched")
    assert "no batch" in value["estimated"][0] and value["makespan"] == 15
    assert "already sets" in run_simulate(tmp_path / "a.sched", "--micro", 4).output
    assert "must be finite and above 0" in run_simulate(tmp_path / "a.sched", "--tflops", 0).output
