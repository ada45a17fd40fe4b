"""The command `run`: training on local ranks and under torchrun, its report, its exit codes."""

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


def run_cli(*args: object) -> Result:
    """Run `schedlang run`."""
    return CliRunner().invoke(app, ["run", *(str(arg) for arg in args)])


def test_run(sched: Path) -> None:
    """It trains and reports loss, speed and exact bytes of every rank, as JSON too."""
    result = run_cli(sched, "--json", "--steps", 12, "--lr", 0.02)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["first_loss"] == record["losses"][0] > record["last_loss"] == record["losses"][-1]
    assert len(record["losses"]) == 12 and record["mesh"] == {"dp": 2, "tp": 2}
    assert record["unit"] == "tokens" and record["per_second"] > 0 and record["step_seconds"] > 0
    assert [rank["rank"] for rank in record["memory"]] == [0, 1, 2, 3]
    sharded = 8 * 8 + 8 + 8 * 8  # up's weight and bias and down's weight, halved over tp
    unsharded = 12 * 8 + 8 + 8 * 12 + 12  # the rest; all of it lies in slices over dp
    for rank in record["memory"]:
        assert rank["parameters"] == 4 * (sharded + unsharded) // 2 == rank["gradients"]
        assert rank["optimizer"] >= 2 * rank["parameters"]
    assert record["activations"] == "not measured"


def test_report(sched: Path) -> None:
    """The text report has the same facts; the loss does not depend on the mesh."""
    two_ranks, one_rank = (
        run_cli(sched, "--mesh", mesh, "--steps", 3) for mesh in ("dp=2,tp=1", "dp=1,tp=1")
    )
    assert two_ranks.exit_code == one_rank.exit_code == 0, two_ranks.output + one_rank.output
    assert "tokens/s (padding included)" in two_ranks.stdout and "2 ranks" in two_ranks.stdout
    assert "activations are not measured" in two_ranks.stdout
    losses = [next(x for x in r.stdout.splitlines() if "loss" in x) for r in (two_ranks, one_rank)]
    assert losses[0] == losses[1]


def test_a_dead_rank_ends_it(sched: Path) -> None:
    """A rank that dies ends the run soon, with its own error and exit 3."""
    dies = "os.environ.get('RANK') != '1' or self.up.weight.is_meta or os._exit(7)"
    (sched.parent / "model.py").write_text(MODEL.replace("DIES", dies))
    began = time.monotonic()
    result = run_cli(sched, "--json")
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
    result = run_cli(sched, *args)
    assert result.exit_code == 2 and said in result.stderr


def test_saved_plan(sched: Path, tmp_path: Path) -> None:
    """A saved plan trains as its schedule does."""
    saved = tmp_path / "p.json"
    planned = CliRunner().invoke(app, ["plan", str(sched), "--out", str(saved)])
    assert planned.exit_code == 0, planned.output
    runs = [run_cli(*args, "--json", "--steps", 2) for args in ((sched,), ("--plan", saved))]
    first, second = (json.loads(result.stdout) for result in runs)
    assert first["losses"] == second["losses"] and first["memory"] == second["memory"]


@pytest.mark.parametrize(
    "name", ["gpt2/3d", "llama/3d", "llama/tp_sp", "bert/one_device", "custom/2d"]
)
def test_record_and_back(name: str) -> None:
    """The record of each example's plan restores the same plan."""
    file = ROOT / "examples" / f"{name}.sched"
    plan = load(file, load_model_file(None, file).model(meta=True)).plan()
    record: dict[str, Any] = json.loads(json.dumps(plan_to_record(plan)))
    assert plan_from_record(record, plan.model) == plan


@pytest.mark.parametrize("text", ["", "[]", '{"plan": 2}', '{"plan": 1, "mesh": {}}'])
def test_no_plan(tmp_path: Path, text: str) -> None:
    """A file that is not a plan is refused, with how to write one."""
    (tmp_path / "p.json").write_text(text)
    result = run_cli("--plan", tmp_path / "p.json")
    assert result.exit_code == 2 and "schedlang plan FILE --out" in result.stderr


def _torchrun(*args: object) -> subprocess.CompletedProcess[str]:
    """Run Python arguments under torchrun on two ranks."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = forks.run(*start, *args, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.deep
def test_under_torchrun(sched: Path) -> None:
    """Under torchrun it joins the job; one rank prints, with the losses of local ranks."""
    args = (sched, "--mesh", "dp=1,tp=2", "--json", "--steps", 2)
    record = json.loads(_torchrun("-m", "schedlang.cli", "run", *args).stdout)
    assert record["losses"] == json.loads(run_cli(*args).stdout)["losses"]


SUMMED = (
    MODEL.replace("DIES", "")
    .replace("cross_entropy(", 'cross_entropy(reduction="sum", input=')
    .replace('batch["ids"].flatten()', 'target=batch["ids"].flatten()')
)


def test_what_verify_refuses(sched: Path) -> None:
    """A summed loss is refused by `verify` and `run` with the same message, exit 2."""
    (sched.parent / "model.py").write_text(SUMMED)
    results = [CliRunner().invoke(app, [verb, str(sched)]) for verb in ("verify", "run")]
    messages = [r.stderr[r.stderr.index("error[S703]") :] for r in results]
    assert [r.exit_code for r in results] == [2, 2] and messages[0] == messages[1], messages
    assert "is a sum over rows, not a mean" in messages[0] and "divide it" in messages[0]


@pytest.mark.deep
def test_what_verify_refuses_under_torchrun(sched: Path) -> None:
    """The ranks of a job refuse it too, with one message."""
    (sched.parent / "model.py").write_text(SUMMED)
    args = ("schedlang.cli", "run", str(sched), "--mesh", "dp=2,tp=1", "--steps", "1")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*start, "-m", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode != 0 and result.stderr.count("error[S703]") == 1, result.stderr


@pytest.mark.deep
def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    """The README's script trains, saves, and continues from the checkpoint."""
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
    """A missing output folder is refused before any work, even before the schedule is read."""
    verb, option = words
    missing = tmp_path / "no" / "out.svg"
    result = CliRunner().invoke(app, [verb, str(tmp_path / "no.sched"), option, str(missing)])
    assert result.exit_code == 2 and "S109" in result.stderr, result.stderr
    message = " ".join(result.stderr.split())  # lines are broken beside long paths
    assert f"cannot write `{option} {missing}`" in message
    result = CliRunner().invoke(app, [verb, str(tmp_path / "no.sched"), option, str(tmp_path)])
    assert result.exit_code == 2 and "is a folder" in result.stderr


@pytest.mark.deep
def test_a_run_has_a_time_out(sched: Path) -> None:
    """With `--timeout` it exits 3 and says where the ranks are."""
    result = run_cli(sched, "--steps", 1_000_000, "--timeout", 15)
    assert result.exit_code == 3 and "not finished after 15 s" in result.stderr
