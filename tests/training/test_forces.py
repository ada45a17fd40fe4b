"""Models whose forward takes a gradient (energies and forces) are evaluated with a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan

SPLIT = "up  shard(col, over=tp)\nout  shard(row, over=tp)"
LAYOUTS = {
    "one rank": ("up  checkpoint()", ""),
    "zero3": ("zero(stage=3, over=dp)", "dp=2"),
    "tp": (SPLIT, "tp=2"),
}


class Energy(nn.Module):
    """The energy of some atoms, and the forces on them: its negative gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.out = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, positions: Tensor, energy: Tensor, force: Tensor) -> dict[str, Tensor]:
        x = positions.detach().requires_grad_()
        e = self.out(torch.tanh(self.up(x)))[..., 0].sum(-1)
        (gradient,) = torch.autograd.grad(e.sum(), x, create_graph=True)
        loss = F.mse_loss(e, energy) + F.mse_loss(-gradient, force)
        return {"loss": loss, "energy": e, "force": -gradient}


def atoms(rows: int, seed: int) -> dict[str, Tensor]:
    """Return molecules of five atoms."""
    g = torch.Generator().manual_seed(seed)
    positions, force = torch.randn(2, rows, 5, 3, generator=g)
    return {"positions": positions, "energy": torch.randn(rows, generator=g), "force": force}


def _evaluate(plan: Plan, batch: dict[str, Tensor]) -> Any:
    return build(plan, batch).eval_step(batch)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_evaluated(layout: str, threads: Threads) -> None:
    """An evaluation gives the forces, without a graph."""
    model, batch = Energy(), atoms(4, 0)
    plan, expected = make_plan(model, *LAYOUTS[layout]), model(**batch)
    for output in threads.run(_evaluate, plan.mesh.world, plan, batch):
        assert not any(value.requires_grad for value in output.values())
        for name, value in output.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-5, atol=1e-5)


def test_is_proven(threads: Threads) -> None:
    """A proof compares its outputs in evaluation, too."""
    report = assert_proven(threads, make_plan(Energy(), *LAYOUTS["zero3"]), [atoms(4, 0)])
    assert any(row.kind == "outputs" for row in report.rows)
