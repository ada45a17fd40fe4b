"""Wrong input on the command line: exit 2, a message with a remedy, and nothing written."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedlang.cli import app

MODEL = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            q = self.q(x).view(*x.shape[:2], -1, 2).transpose(1, 2)
            k, v = self.kv(x).chunk(2, -1)
            k, v = (t.view(*x.shape[:2], -1, 2).transpose(1, 2) for t in (k, v))
            k, v = (t.repeat_interleave(2, 1) for t in (k, v))
            y = F.scaled_dot_product_attention(q, k, v)
            return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.layers = nn.ModuleList(Attention() for _ in range(2))
            self.turn = nn.Linear(8, 8)
            self.head = nn.Linear(8, 1)

        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            for _ in range(3):
                x = self.turn(x)
            return self.head(x).square().mean()

    def model():
        return Net()

    def batch(seed):
        return {"ids": torch.randint(10, (4, 3), generator=torch.Generator().manual_seed(seed))}
"""
TP = """
  at layers.* {
    q    shard(col, over=tp)
    kv   shard(col, blocks=2, over=tp)
    out  shard(row, over=tp)
  }
"""


def _schedule_text(rows: str, mesh: str = "tp=2", header: str = "schedule 1 for Net") -> str:
    """A schedule with a header, a mesh and one step of these rows."""
    return f'{header}\n\nmesh({mesh})\n\nstep "a" {{\n{rows}\n}}\n'


def _refusal_text(folder: Path, text: str, *options: str, model: str = MODEL) -> str:
    """The message of `verify` when it refuses; check that no other output is written."""
    (folder / "model.py").write_text(textwrap.dedent(model))
    (folder / "x.sched").write_text(text)
    result = CliRunner().invoke(app, ["verify", str(folder / "x.sched"), *options])
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"model.py", "x.sched"}
    assert result.stderr.startswith("error[S")
    return result.stderr


def test_the_net_is_sound(tmp_path: Path) -> None:
    """The refusals below are of their mistakes: without them the schedule is proven."""
    (tmp_path / "model.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / "x.sched").write_text(_schedule_text(TP))
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "x.sched")])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "row, said",
    [
        ("layer.*  checkpoint()", "did you mean `layers`?"),
        ("layers.*.qq  checkpoint()", "did you mean `q`?"),
        ("layers.*  chekpoint()", "did you mean `checkpoint`?"),
        ("layers.*  checkpoint(sav=[linear])", "did you mean `save`?"),
        ("layers.*.q  shard(col, ovr=tp)", "`shard` needs `over`"),
        ("layers.*.q  shard(cool, over=tp)", "choose one of `col`, `row`, `vocab`"),
        ("layers.*.q  shard(col, over=tpp)", "did you mean `over=tp`?"),
        ("layers.*.q  shard(col, ovr=tp)", "did you mean `over`?"),
    ],
    ids=["path", "leaf", "primitive", "argument", "needed", "choice", "axis", "slip"],
)
def test_misspelt_names(tmp_path: Path, row: str, said: str) -> None:
    """A misspelt path, primitive, argument or axis is shown at its place, with the similar name."""
    message = _refusal_text(tmp_path, _schedule_text(f"  {row}"))
    assert said in message and row.strip() in message and "x.sched:6" in message


def test_sizes_that_do_not_divide(tmp_path: Path) -> None:
    """A size that cannot be split evenly: the message has the size, the axis and the legal rank
    counts."""
    message = _refusal_text(tmp_path, _schedule_text("  layers.*.q  shard(col, over=tp)", "tp=3"))
    assert "cannot split 8 evenly 3 ways" in message and "`tp` may be 2, 4, 8" in message
    message = _refusal_text(tmp_path, _schedule_text("  head  shard(col, over=tp)"))
    assert "cannot split 1 evenly 2 ways" in message


def test_key_value_heads_below_the_axis(tmp_path: Path) -> None:
    """Two key/value heads cannot be split over four ranks."""
    message = _refusal_text(tmp_path, _schedule_text(TP, "tp=4"))
    assert "2 heads of `layers.0` cannot be split over tp=4" in message
    assert "`tp` may be one of 1, 2" in message


def test_a_cut_inside_a_loop(tmp_path: Path) -> None:
    """A module that the forward calls three times cannot start a pipeline stage."""
    message = _refusal_text(tmp_path, _schedule_text("  turn  pipeline_split(over=tp)"))
    assert "S601" in message and "called 3 times" in message and "outside the loop" in message


def test_a_mesh_larger_than_the_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh that is larger than the job is refused; the message says how to start enough ranks."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = _refusal_text(tmp_path, _schedule_text("  zero(stage=0, over=dp)", "dp=_, tp=4"))
    assert "`dp` has no integer size" in message and "2 ranks" in message
    monkeypatch.delenv("WORLD_SIZE")
    message = _refusal_text(tmp_path, _schedule_text("  zero(stage=0, over=dp)", "dp=16"))
    assert "`verify` starts at most 8 ranks" in message and "`--mesh dp=2`" in message


def test_building_on_too_few_ranks() -> None:
    """`build` with a mesh of two ranks in a job of one refuses before any communication."""
    from schedlang.diagnostics.diagnostic import Refusal
    from schedlang.passes.lower.build import build
    from tests.proofs import make_plan
    from tests.training.test_build import OddSizes, series

    with pytest.raises(Refusal) as caught:
        build(make_plan(OddSizes(), "zero(stage=0, over=dp)", "dp=2"), series(4, 1))
    message = caught.value.render()
    assert "the mesh needs 2 ranks, and this job has 1" in message and "torchrun" in message


@pytest.mark.parametrize(
    "model, said",
    [
        ("import no_such_module\n", "No module named 'no_such_module'"),
        ("def model(:\n", "importing the model file"),
        ("raise ValueError('not today')\n", "ValueError: not today"),
        ("def modle(): ...\n", "did you mean `modle`?"),
        ("def model(): return 3\n", "returns int, not a module"),
        (
            "import torch\ndef model(): return torch.nn.Linear(1, 1)\n",
            "this schedule is for the model class Net",
        ),
        (MODEL.replace("def batch", "def bach"), "defines no `batch(seed)`"),
        (
            MODEL.replace('return {"ids": ', "return (").replace("(seed))}", "(seed)))"),
            "not a dict",
        ),
    ],
    ids=["import", "syntax", "raises", "no model", "no module", "class", "no batch", "no dict"],
)
def test_a_model_file_that_is_none(tmp_path: Path, model: str, said: str) -> None:
    """Each mistake in a model file is refused in words that name it."""
    assert said in _refusal_text(tmp_path, _schedule_text(TP), model=model)


def test_no_model_file(tmp_path: Path) -> None:
    """A missing model file is refused, beside the schedule and with `--model`."""
    path = tmp_path / "x.sched"
    path.write_text(_schedule_text(TP))
    for options in ([], ["--model", str(tmp_path / "nix.py")]):
        result = CliRunner().invoke(app, ["verify", str(path), *options])
        assert result.exit_code == 2 and "there is no model file" in result.stderr
    (tmp_path / "own.py").write_text("")  # a name counts from the folder of now
    result = CliRunner().invoke(app, ["verify", str(path), "--model", "own.py"])
    assert result.exit_code == 2 and f"--model {tmp_path / 'own.py'}" in "".join(
        result.stderr.split("\n")
    )
    result = CliRunner().invoke(app, ["verify", str(path), "--model", "no.such.package"])
    assert result.exit_code == 2 and "No module named 'no'" in result.stderr


@pytest.mark.parametrize(
    "batch, said",
    [
        ('{"idz": torch.zeros(4, 3).long()}', "idz"),
        ('{"ids": torch.zeros(4, 3)}', "rejects this batch"),
        ('{"ids": torch.zeros((), dtype=torch.long)}', "no rows"),
        ('{"ids": torch.zeros(1, 3).long()}', "the batch has 1 row, but 2 are needed"),
    ],
    ids=["name", "dtype", "no rows", "too few"],
)
def test_a_batch_that_the_model_rejects(tmp_path: Path, batch: str, said: str) -> None:
    """A wrong batch is refused with the model's own error, or with what a batch needs."""
    start = MODEL.index("def batch")
    model = textwrap.dedent(MODEL[:start]) + f"def batch(seed):\n    return {batch}\n"
    assert said in _refusal_text(
        tmp_path, _schedule_text("  zero(stage=0, over=dp)", "dp=2"), model=model
    )


def test_an_unknown_version_of_the_language(tmp_path: Path) -> None:
    """A schedule of a later edition is refused."""
    message = _refusal_text(tmp_path, _schedule_text(TP, header="schedule 2 for Net"))
    assert "schedule 2" in message and "1" in message


@pytest.mark.parametrize("part", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_truncated_file(tmp_path: Path, part: float) -> None:
    """A truncated schedule is refused with a place, never half executed."""
    text = _schedule_text(TP)
    assert "x.sched" in _refusal_text(tmp_path, text[: int(len(text) * part)].rstrip())


def test_wrong_options(tmp_path: Path) -> None:
    """Unknown axes and knobs, wrong sizes, lines and dtypes are refused."""
    assert "no axis `pp`" in _refusal_text(tmp_path, _schedule_text(TP), "--mesh", "pp=2")
    assert "cannot read `--mesh tp=0`" in _refusal_text(
        tmp_path, _schedule_text(TP), "--mesh", "tp=0"
    )
    assert "knob" in _refusal_text(tmp_path, _schedule_text(TP), "--knob", "tpp=2")
    assert "no row is" in _refusal_text(tmp_path, _schedule_text(TP), "--only", "900")
    assert "not a working dtype" in _refusal_text(tmp_path, _schedule_text(TP), "--dtype", "float3")
