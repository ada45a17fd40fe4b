"""Gains of fused rows: rows without a gain are refused everywhere, gains are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import schedlang
from schedlang.cli import app
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.prove import Case, prove
from schedlang.passes.simulate.kernel_gains import count_step_gains
from tests.proofs import make_plan
from tests.tiers import thin_out

IDLE = "act  fuse(backend=rowwise)"


class Net(nn.Module):
    """A linear layer and an activation, which is one kernel already."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return self.down(self.act(self.up(x))).square().mean()


MODEL = """
import torch
from tests.kernels.test_gains import Net as model, batch
"""


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Eight rows."""
    return {"x": torch.rand(8, 8, generator=torch.Generator().manual_seed(seed))}


def test_it_is_refused_by_proofs_and_programs(threads: Any) -> None:
    """`verify` and `build` end with the refusal of `plan`; other rows pass."""
    with pytest.raises(Refusal, match="S888.*gains nothing at `act`"):
        prove(Case(make_plan(Net(), IDLE), (batch(),) * 3), pool=threads)
    sch = schedlang.create_schedule(Net())
    sch["act"].fuse(backend="rowwise")
    with pytest.raises(Refusal, match="S888"):
        sch.build(batch=batch())
    with pytest.raises(Refusal, match="S888"):
        sch.build().train_step(batch())
    assert count_step_gains(make_plan(Net(), "up  decompose(bias)"), batch()) == ()


@pytest.mark.parametrize("verb", thin_out(["check", "run", "verify", "plan"], 4))
def test_it_is_refused_by_verbs(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2 and the row's position, before any rank starts."""
    monkeypatch.chdir(Path(__file__).parents[2])
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "x.sched").write_text(f"schedule 1 for Net\n\n{IDLE}\n")
    options = ["--model", str(tmp_path / "model.py")] if verb == "check" else []
    result = CliRunner().invoke(app, [verb, str(tmp_path / "x.sched"), *options])
    assert result.exit_code == 2, result.output
    assert "error[S888]" in result.stderr and "x.sched:3:6" in result.stderr


class Wide(Net):
    """An activation of several kernels."""

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        h = self.up(x)
        return self.down(F.silu(h) * h).square().mean()


@pytest.mark.deep
def test_what_is_gained_is_told(threads: Any) -> None:
    """The report gives kernels and bytes before and after."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Wide()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    rows = 'net  fuse("p(x) { silu(x) * x }", backend=rowwise)'
    report = prove(Case(make_plan(Inner(), rows), (batch(),) * 3), pool=threads)
    (message,) = [value for name, value in report.facts if name == "fused"]
    assert "at `net`: 2 kernels forward and" in message and "become 1 and 1" in message
