"""tune: every setting is tried, priced as alone, and the quickest that fits is named first."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schedlang.cli import app
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.language.syntax import parse
from schedlang.passes.autoshard.tune import meshes, settings_of

MODEL = '''
"""Blocks of two projections."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def model():
    return Net()


def batch(seed):
    return {"x": torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))}


def loss(output, batch):
    return output.pow(2).mean()
'''
SHEET = """[sheet]
speed = 989e12
stream = 3350e9
link = 450e9
network = 50e9
node = 8
memory = "80 GiB"
"""
SCHEDULE = """schedule 1 for Net

knob tp: int = 1 in [1, 2]
knob again: bool = false
knob micro: int = 2 in 1..4

mesh(dp=_, tp=tp)

step "all" {
  blocks.*.up    shard(col, over=tp)
  blocks.*.down  shard(row, over=tp)
  when again { blocks.*  checkpoint() }
  zero(stage=1, over=dp)
  pipeline(order="GPipe", micro=micro)
}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A schedule beside its model."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "my.sched").write_text(SCHEDULE)
    return tmp_path / "my.sched"


def tuned(*words: object, code: int = 0) -> dict[str, Any]:
    """What `tune` found."""
    ran = CliRunner().invoke(app, ["tune", *map(str, words), "--json"])
    assert ran.exit_code == code, ran.output
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_every_setting_is_tried() -> None:
    """All values of choices and flags; powers of two of an interval; no knob that is set."""
    tree = parse(Source("my.sched", SCHEDULE))
    assert len(settings_of(tree, {}, {})) == 2 * 2 * 3
    assert settings_of(tree, {"tp": "2", "again": "true"}, {}) == [
        {"micro": 1},
        {"micro": 2},
        {"micro": 4},
    ]
    named = settings_of(tree, {"tp": "2"}, {"micro": ["3"]})
    assert named == [{"again": False, "micro": "3"}, {"again": True, "micro": "3"}]


def test_too_many_settings_are_refused() -> None:
    """And the message says which knob is the longest."""
    wide = SCHEDULE.replace("in 1..4", f"in [{', '.join(map(str, range(1, 500)))}]")
    with pytest.raises(Refusal, match="1996 settings"):
        settings_of(parse(Source("my.sched", wide)), {}, {})


@pytest.mark.parametrize(("ranks", "node"), [(8, 8), (12, 4), (7, 8), (1, 8)])
def test_every_mesh_is_one_of_all_ranks(ranks: int, node: int) -> None:
    """Each factorization once, tensors within a node, both ways to split data."""
    found = [tuple(sorted(mesh.items())) for mesh in meshes(ranks, node)]
    assert len(found) == len(set(found))
    sizes = [dict(one) for one in found]
    assert all(math.prod(one.values()) == ranks and one.get("tp", 1) <= node for one in sizes)
    plain = sum("fsdp" not in one for one in sizes)
    divisors = [k for k in range(1, ranks + 1) if ranks % k == 0]
    assert plain == sum(ranks // tp % pp == 0 for tp in divisors if tp <= node for pp in divisors)


def test_the_first_is_the_quickest_that_fits(file: Path) -> None:
    """With a limit between the peaks those above it are left out, whatever they take."""
    every = tuned(file, "--gpus", 4, "--on", "a100")
    assert len(every["fit"]) == 12
    seconds = [one["time"]["seconds"] for one in every["fit"]]
    assert seconds == sorted(seconds)
    peaks = sorted(one["peak"] for one in every["fit"])
    limit = (peaks[5] + peaks[6]) // 2
    fewer = tuned(file, "--gpus", 4, "--on", "a100", "--memory", f"{limit / 1024}KiB")
    assert fewer["fit"] == [one for one in every["fit"] if one["peak"] <= limit]
    assert len(fewer["too_large"]) == 12 - len(fewer["fit"]) > 0


def test_a_price_is_that_of_the_plan_alone(file: Path) -> None:
    """The peak is what `plan` says of the same setting; recomputing takes longer, and less room."""
    found = {
        (one["given"]["tp"], one["given"]["again"], one["given"]["micro"]): one
        for one in tuned(file, "--gpus", 4, "--on", "a100")["fit"]
    }
    mine = found[2, True, 2]
    words = ["--knob", "tp=2", "--knob", "again=true", "--knob", "micro=2", "--mesh", "dp=2,tp=2"]
    ran = CliRunner().invoke(app, ["plan", str(file), *words, "--json"])
    assert mine["mesh"] == {"dp": 2, "tp": 2}
    assert max(one["peak"] for one in json.loads(ran.stdout)["account"]["memory"]) == mine["peak"]
    assert mine["time"]["computing"] > found[2, False, 2]["time"]["computing"]
    assert found[1, True, 1]["peak"] < found[1, False, 1]["peak"]


def test_the_command_it_ends_with_can_be_pasted(file: Path) -> None:
    """The table names the best, and `plan` takes it."""
    ran = CliRunner().invoke(app, ["tune", str(file), "--gpus", "4", "--on", "a100", "--top", "2"])
    assert ran.exit_code == 0 and "10 more fit" in ran.output
    said = next(line for line in ran.output.splitlines() if line.startswith("next: schedlang "))
    again = CliRunner().invoke(app, shlex.split(said)[2:])
    assert again.exit_code == 0, again.output


def test_what_cannot_be_is_told_beside_the_others(file: Path) -> None:
    """16 rows do not fill 4 x 8 parts: refused alone; where nothing fits the end is 1."""
    words = (file, "--gpus", 4, "--on", "a100", "--knob", "tp=1", "--knob", "again=false")
    found = tuned(*words, "--try", "micro=4,8")
    assert [one["given"]["micro"] for one in found["fit"]] == ["4"]
    assert [one["refusal"]["code"] for one in found["refused"]] == ["S103"]
    tuned(*words, "--memory", "1KiB", code=1)


def test_meshes_of_a_model_are_proposed_and_priced(file: Path) -> None:
    """Two ranks: data (state or parameters sliced), stages, tensors; `init` writes the best."""
    model = file.parent / "model.py"
    found = tuned(model, "--gpus", 2, "--on", "h100")
    tried = [one["mesh"] for one in (*found["fit"], *found["too_large"], *found["refused"])]
    assert sorted(map(tuple, tried)) == [("dp",), ("fsdp",), ("pp",), ("tp",)]
    ran = CliRunner().invoke(app, ["tune", str(model), "--gpus", "2", "--on", "h100"])
    assert f"schedlang init {model} --mesh " in ran.output


def test_the_choice_of_guides_is_found(file: Path) -> None:
    """A model that fits is replicated; where its state does not fit, parameters are sliced.

    By a data sheet alone, as guides count: of a model so small starts of operators decide.
    """
    model, sheet = file.parent / "model.py", file.parent / "sheet.toml"
    sheet.write_text(SHEET)
    model.write_text(MODEL.replace("torch.randn(16, 16", "torch.randn(4096, 16"))
    every = tuned(model, "--gpus", 2, "--on", sheet)["fit"]
    assert every[0]["mesh"] == {"dp": 2}
    less = every[0]["peak"] - 1
    fewer = tuned(model, "--gpus", 2, "--on", sheet, "--memory", f"{less}B")["fit"]
    assert fewer[0]["mesh"] == {"fsdp": 2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "the cluster is missing"),
        (("--on", "abacus", "--gpus", "4"), "unknown cluster `abacus`"),
        (("--on", "a100"), "number of ranks is missing"),
        (("--on", "a100x4", "--memory", "much"), "cannot read `--memory much`"),
        (("--on", "a100x4", "--tflops", "0"), "`--tflops` must be finite and above 0, not 0"),
        (("--on", "a100x4", "--try", "micro"), "cannot read `--try micro`"),
        (("--on", "a100x4", "--try", "macro=2"), "no knob `macro`"),
    ],
)
def test_what_is_missing_is_said(file: Path, words: tuple[str, ...], said: str) -> None:
    """Before any model is made."""
    ran = CliRunner().invoke(app, ["tune", str(file), *words])
    assert ran.exit_code == 2
    assert said in ran.output
