"""Tests of run: training on local ranks and under torchrun, its report, and how it ends."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from schedlang.cli import app
from schedlang.ir.modelfile import load_model_file
from schedlang.passes.elaborate.plan_record import plan_from_record, plan_to_record
from schedlang.schedule import load
from tests import forks

ROOT = Path(__file__).parents[2]

MODEL = '''
"""A network for one test."""

import os
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 12)

    def forward(self, ids):
        DIES
        x = self.table(ids)
        return self.head(x + self.down(torch.relu(self.up(x))))


def model():
    return Net()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(12, (4, 5), generator=generator)}


def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["ids"].flatten())
'''

SCHEDULE = """schedule 1 for Net

mesh(dp=2, tp=2)

step "rows" {
  up    shard(col, over=tp)
  down  shard(row, over=tp)
  zero(stage=1, over=dp)
}
"""


@pytest.fixture
def sched(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL.replace("DIES", ""))
    file = tmp_path / "net.sched"
    file.write_text(SCHEDULE)
    return file


def call(*args: object) -> Result:
    return CliRunner().invoke(app, ["run", *(str(arg) for arg in args)])


def test_run(sched: Path) -> None:
    """It trains, and reports loss, speed and exact bytes of every rank, as JSON too."""
    result = call(sched, "--json", "--steps", 12, "--lr", 0.02)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["first_loss"] == found["losses"][0] > found["last_loss"] == found["losses"][-1]
    assert len(found["losses"]) == 12 and found["mesh"] == {"dp": 2, "tp": 2}
    assert found["unit"] == "tokens" and found["per_second"] > 0 and found["step_seconds"] > 0
    assert [one["rank"] for one in found["memory"]] == [0, 1, 2, 3]
    sharded = 8 * 8 + 8 + 8 * 8  # up's weight and bias and down's weight, halved over tp
    whole = 12 * 8 + 8 + 8 * 12 + 12  # the rest; all of it lies in slices over dp
    for one in found["memory"]:
        assert one["parameters"] == 4 * (sharded + whole) // 2 == one["gradients"]
        assert one["optimizer"] >= 2 * one["parameters"]
    assert found["activations"] == "not measured"


def test_report(sched: Path) -> None:
    """The same as text; the loss does not depend on the mesh."""
    two, one = (call(sched, "--mesh", mesh, "--steps", 3) for mesh in ("dp=2,tp=1", "dp=1,tp=1"))
    assert two.exit_code == one.exit_code == 0, two.output + one.output
    assert "tokens/s (padding included)" in two.stdout and "2 ranks" in two.stdout
    assert "activations are not measured" in two.stdout
    losses = [next(x for x in r.stdout.splitlines() if "loss" in x) for r in (two, one)]
    assert losses[0] == losses[1]


def test_a_dead_rank_ends_it(sched: Path) -> None:
    """A rank that dies ends the run with its own error and exit 3, soon."""
    dies = "os.environ.get('RANK') != '1' or self.up.weight.is_meta or os._exit(7)"
    (sched.parent / "model.py").write_text(MODEL.replace("DIES", dies))
    began = time.monotonic()
    result = call(sched, "--json")
    assert result.exit_code == 3 and "rank 1" in json.loads(result.stdout)["error"]
    assert time.monotonic() - began < 600  # it did not wait for the time-out of a collective


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--mesh", "dp=8,tp=2"], "`run` starts at most 8 ranks"),
        (["--optimizer", "adam"], "choose adamw or sgd"),
        (["--steps", "0"], "`--steps` must be above 0"),
        (["--plan", "p.json"], "needs either a schedule or a saved plan"),
        (["--model", "none.py"], "no model file"),
    ],
)
def test_mistakes(sched: Path, args: list[str], said: str) -> None:
    """Wrong settings are refused with exit 2 before a rank starts."""
    result = call(sched, *args)
    assert result.exit_code == 2 and said in result.stderr


def test_saved_plan(sched: Path, tmp_path: Path) -> None:
    """A saved plan trains as its schedule does."""
    saved = tmp_path / "p.json"
    done = CliRunner().invoke(app, ["plan", str(sched), "--out", str(saved)])
    assert done.exit_code == 0, done.output
    runs = [call(*args, "--json", "--steps", 2) for args in ((sched,), ("--plan", saved))]
    first, second = (json.loads(result.stdout) for result in runs)
    assert first["losses"] == second["losses"] and first["memory"] == second["memory"]


@pytest.mark.parametrize(
    "name", ["gpt2/3d", "llama/3d", "llama/tp_sp", "bert/one_device", "custom/2d"]
)
def test_record_and_back(name: str) -> None:
    """A record of each example, restored, is the same plan."""
    file = ROOT / "examples" / f"{name}.sched"
    plan = load(file, load_model_file(None, file).model(meta=True)).plan()
    made: dict[str, Any] = json.loads(json.dumps(plan_to_record(plan)))
    assert plan_from_record(made, plan.model) == plan


@pytest.mark.parametrize("text", ["", "[]", '{"plan": 2}', '{"plan": 1, "mesh": {}}'])
def test_no_plan(tmp_path: Path, text: str) -> None:
    """A file that holds no plan is refused, with how to write one."""
    (tmp_path / "p.json").write_text(text)
    result = call("--plan", tmp_path / "p.json")
    assert result.exit_code == 2 and "schedlang plan FILE --out" in result.stderr


def _torchrun(*args: object) -> subprocess.CompletedProcess[str]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = forks.run(*start, *args, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.deep
def test_under_torchrun(sched: Path) -> None:
    """It joins the job; one rank prints, and trains as local ranks do."""
    args = (sched, "--mesh", "dp=1,tp=2", "--json", "--steps", 2)
    found = json.loads(_torchrun("-m", "schedlang.cli", "run", *args).stdout)
    assert found["losses"] == json.loads(call(*args).stdout)["losses"]


SUMMED = (
    MODEL.replace("DIES", "")
    .replace("cross_entropy(", 'cross_entropy(reduction="sum", input=')
    .replace('batch["ids"].flatten()', 'target=batch["ids"].flatten()')
)


def test_what_verify_refuses(sched: Path) -> None:
    """A loss that parts do not add up to is refused by both, in the same words, with exit 2."""
    (sched.parent / "model.py").write_text(SUMMED)
    results = [CliRunner().invoke(app, [verb, str(sched)]) for verb in ("verify", "run")]
    said = [r.stderr[r.stderr.index("error[S703]") :] for r in results]
    assert [r.exit_code for r in results] == [2, 2] and said[0] == said[1], said
    assert "is a sum over rows, not a mean" in said[0] and "divide it" in said[0]


@pytest.mark.deep
def test_what_verify_refuses_under_torchrun(sched: Path) -> None:
    """The ranks of a job refuse it, too: each alike, told once."""
    (sched.parent / "model.py").write_text(SUMMED)
    words = ("schedlang.cli", "run", str(sched), "--mesh", "dp=2,tp=1", "--steps", "1")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*start, "-m", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode != 0 and done.stderr.count("error[S703]") == 1, done.stderr


@pytest.mark.deep
def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    """The script of the README: it trains, saves, and goes on from there."""
    pytest.importorskip("transformers")
    script, folder = ROOT / "examples" / "gpt2" / "train.py", tmp_path / "saved"
    first, second = (_torchrun(script, folder).stdout.splitlines() for _ in range(2))
    losses = [float(line.split()[-1]) for line in (*first, *second)]
    assert len(losses) == 20 and losses[-1] < losses[9] < losses[0]


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--svg"),
        ("plan", "--html"),
        ("plan", "--out"),
        ("verify", "--html"),
        ("run", "--timeline"),
        ("simulate", "--svg"),
    ],
)
def test_a_folder_that_is_missing(tmp_path: Path, words: tuple[str, str]) -> None:
    """It is refused before any work, with the path: here not even the schedule is there."""
    verb, option = words
    missing = tmp_path / "no" / "out.svg"
    done = CliRunner().invoke(app, [verb, str(tmp_path / "no.sched"), option, str(missing)])
    assert done.exit_code == 2 and "S109" in done.stderr, done.stderr
    said = " ".join(done.stderr.split())  # lines are broken beside long paths
    assert f"cannot write `{option} {missing}`" in said
    done = CliRunner().invoke(app, [verb, str(tmp_path / "no.sched"), option, str(tmp_path)])
    assert done.exit_code == 2 and "is a folder" in done.stderr


@pytest.mark.deep
def test_a_run_has_a_time_out(sched: Path) -> None:
    """It ends with exit code 3 and says where the ranks stand."""
    result = call(sched, "--steps", 1_000_000, "--timeout", 15)
    assert result.exit_code == 3 and "not finished after 15 s" in result.stderr
