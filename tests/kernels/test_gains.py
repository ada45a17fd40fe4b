"""A row that gains nothing is refused wherever a schedule is used, and what others gain is told."""

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
from tests.proofs import planned
from tests.tiers import thinned

IDLE = "act  fuse(backend=rowwise)"


class Net(nn.Module):
    """A layer and its function, which is one kernel as it is."""

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
    """`verify` and `build` end in the refusal that `plan` gives; without such rows they do not."""
    with pytest.raises(Refusal, match="S888.*gains nothing at `act`"):
        prove(Case(planned(Net(), IDLE), (batch(),) * 3), pool=threads)
    sch = schedlang.create_schedule(Net())
    sch["act"].fuse(backend="rowwise")
    with pytest.raises(Refusal, match="S888"):
        sch.build(batch=batch())
    with pytest.raises(Refusal, match="S888"):
        sch.build().train_step(batch())
    assert count_step_gains(planned(Net(), "up  decompose(bias)"), batch()) == ()


@pytest.mark.parametrize("verb", thinned(["check", "run", "verify", "plan"], 4))
def test_it_is_refused_by_verbs(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 2 and the row's place, before any rank starts."""
    monkeypatch.chdir(Path(__file__).parents[2])
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "x.sched").write_text(f"schedule 1 for Net\n\n{IDLE}\n")
    more = ["--model", str(tmp_path / "model.py")] if verb == "check" else []
    done = CliRunner().invoke(app, [verb, str(tmp_path / "x.sched"), *more])
    assert done.exit_code == 2, done.output
    assert "error[S888]" in done.stderr and "x.sched:3:6" in done.stderr


class Wide(Net):
    """The function is several kernels."""

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        h = self.up(x)
        return self.down(F.silu(h) * h).square().mean()


@pytest.mark.deep
def test_what_is_gained_is_told(threads: Any) -> None:
    """The report says kernels and bytes before and after."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Wide()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    rows = 'net  fuse("p(x) { silu(x) * x }", backend=rowwise)'
    report = prove(Case(planned(Inner(), rows), (batch(),) * 3), pool=threads)
    (said,) = [value for name, value in report.facts if name == "fused"]
    assert "at `net`: 2 kernels forward and" in said and "become 1 and 1" in said
