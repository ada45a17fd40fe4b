"""`init --adapt`: adapters on all projections of blocks, in a schedule that is verified."""

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
    """All projections of the blocks get adapters, and nothing else; the written schedule is
    verified."""
    model_file = str(ROOT / "examples" / model / "model.py")
    arguments = ["init", model_file, "--mesh", "dp=2,tp=2", "--adapt", kind, "--rank", "4"]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert 'step "adapters" relax(model)' in text and text.count("adapt(") == len(rows)
    for row in rows:
        assert f"{row} adapt({kind}, rank=4)" in " ".join(text.split()), text
    (tmp_path / "x.sched").write_text(text)
    verified = RUNNER.invoke(app, ["verify", str(tmp_path / "x.sched"), "--model", model_file])
    assert verified.exit_code == 0 and "PASS" in verified.stdout, verified.output


def test_what_cannot_have_any(tmp_path: Path) -> None:
    """Unknown kinds (S109) and models without projections (S212) are refused."""
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "def model():\n    return nn.Sequential(*(nn.Conv1d(4, 4, 1) for _ in range(4)))\n\n\n"
        'def batch(seed):\n    return {"input": torch.randn(4, 4, 8)}\n\n\n'
        "def loss(output, batch):\n    return output.pow(2).mean()\n"
    )
    for kind, code in (("qlora", "S109"), ("lora", "S212")):
        arguments = ["init", str(tmp_path / "model.py"), "--mesh", "dp=2", "--adapt", kind]
        result = RUNNER.invoke(app, arguments)
        assert result.exit_code == 2 and code in result.stderr, result.output
