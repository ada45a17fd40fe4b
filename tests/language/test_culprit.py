"""Errors in a model file's own functions: refused at the line of the user's file."""

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
    """A function that raises is refused (exit 2) with its own line, its error and no traceback."""
    code, broken, line, note = BROKEN[name]
    told = _run(tmp_path, verb, **{name: broken})
    assert told.exit_code == 2, told.output
    assert f"error[{code}]: `{name}` of the model file raises " in told.output
    assert f"model.py:{line}:5" in told.output and broken in told.output and note in told.output
    assert "Traceback" not in told.output


def test_a_loss_of_another_signature(tmp_path: Path) -> None:
    """A call that the function does not take names no line, and says how it is called."""
    (tmp_path / "x.sched").write_text(SCHEDULE)
    text = MODEL.format(**dict.fromkeys(BROKEN, "pass")).replace("loss(output, batch)", "loss(out)")
    (tmp_path / "model.py").write_text(text)
    told = CliRunner().invoke(app, ["plan", str(tmp_path / "x.sched")])
    assert told.exit_code == 2 and "error[S865]" in told.output
    assert "it is called with the model's output and the batch" in told.output


def _run(folder: Path, verb: str, **broken: str):  # type: ignore[no-untyped-def]
    (folder / "x.sched").write_text(SCHEDULE)
    (folder / "model.py").write_text(MODEL.format(**(dict.fromkeys(BROKEN, "pass") | broken)))
    return CliRunner().invoke(app, [verb, str(folder / "x.sched")])
