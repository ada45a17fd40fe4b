"""Tests of `init --adapt`: adapters beside the projections of blocks, in a schedule that holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedlang.cli import app

ROOT = Path(__file__).parents[2]
RUNNER = CliRunner()


@pytest.mark.parametrize(
    "model, kind, rows",
    [
        ("llama", "lora", ("self_attn.{q,k,v,o}_proj", "mlp.{gate,up,down}_proj")),
        ("gpt2", "dora", ("attn.c_{attn,proj}", "mlp.c_{fc,proj}")),
    ],
)
def test_what_is_written_is_proven(tmp_path: Path, model: str, kind: str, rows: tuple[str]) -> None:
    """All projections of the blocks have adapters, and none beside them; split with these the
    program is equal to the original so changed."""
    named = str(ROOT / "examples" / model / "model.py")
    words = ["init", named, "--mesh", "dp=2,tp=2", "--adapt", kind, "--rank", "4"]
    made = RUNNER.invoke(app, words)
    assert made.exit_code == 0, made.output
    text = made.stdout
    assert 'step "adapters" relax(model)' in text and text.count("adapt(") == len(rows)
    for row in rows:
        assert f"{row} adapt({kind}, rank=4)" in " ".join(text.split()), text
    (tmp_path / "x.sched").write_text(text)
    done = RUNNER.invoke(app, ["verify", str(tmp_path / "x.sched"), "--model", named])
    assert done.exit_code == 0 and "PASS" in done.stdout, done.output


def test_what_cannot_have_any(tmp_path: Path) -> None:
    """A kind that is not known (S109); a model whose blocks have no projections (S212)."""
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "def model():\n    return nn.Sequential(*(nn.Conv1d(4, 4, 1) for _ in range(4)))\n\n\n"
        'def batch(seed):\n    return {"input": torch.randn(4, 4, 8)}\n\n\n'
        "def loss(output, batch):\n    return output.pow(2).mean()\n"
    )
    for kind, code in (("qlora", "S109"), ("lora", "S212")):
        words = ["init", str(tmp_path / "model.py"), "--mesh", "dp=2", "--adapt", kind]
        done = RUNNER.invoke(app, words)
        assert done.exit_code == 2 and code in done.stderr, done.output
