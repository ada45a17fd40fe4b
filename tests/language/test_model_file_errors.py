"""Errors raised by functions of the model file: refused with the user's own file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedlang.cli import app

MODEL = """
import torch
from torch import nn
def model():
    {model}
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
def batch(seed):
    {batch}
    return {{"input": torch.ones(4, 4), }}
def loss(output, batch):
    {loss}
    return output.square().mean()
def weight(batch):
    {weight}
    return 4.0
"""
SCHEDULE = 'schedule 1 for Sequential\nmesh(dp=2)\nstep "a" {\n  zero(stage=1, over=dp)\n}\n'
BROKEN = {
    "model": ("S863", "nn.Linear('a', 4)", 5, "raised at "),
    "batch": ("S864", "torch.ones(2).view(3)", 8, ""),
    "loss": ("S865", 'batch["labels"]', 11, ""),
    "weight": ("S865", "batch.numel()", 14, ""),
}


@pytest.mark.parametrize("verb", ["plan", "verify"])
@pytest.mark.parametrize("name", BROKEN)
def test_the_line_of_the_users_file_is_named(verb: str, name: str, tmp_path: Path) -> None:
    """A function that raises is refused (exit 2) with its line and its error, and no traceback."""
    code, broken, line, note = BROKEN[name]
    result = _run_verb(tmp_path, verb, **{name: broken})
    assert result.exit_code == 2, result.output
    assert f"error[{code}]: `{name}` of the model file raises " in result.output
    assert (
        f"model.py:{line}:5" in result.output and broken in result.output and note in result.output
    )
    assert "Traceback" not in result.output


def test_a_loss_of_another_signature(tmp_path: Path) -> None:
    """A loss with the wrong parameters has no line to name; the message says how it is called."""
    (tmp_path / "x.sched").write_text(SCHEDULE)
    text = MODEL.format(**dict.fromkeys(BROKEN, "pass")).replace("loss(output, batch)", "loss(out)")
    (tmp_path / "model.py").write_text(text)
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "x.sched")])
    assert result.exit_code == 2 and "error[S865]" in result.output
    assert "it is called with the model's output and the batch" in result.output


def _run_verb(folder: Path, verb: str, **broken: str):  # type: ignore[no-untyped-def]
    """Run a verb on a model file in which some functions are broken."""
    (folder / "x.sched").write_text(SCHEDULE)
    (folder / "model.py").write_text(MODEL.format(**(dict.fromkeys(BROKEN, "pass") | broken)))
    return CliRunner().invoke(app, [verb, str(folder / "x.sched")])
