"""A model that takes derivatives in its forward, which cannot run without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram, verify_program
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches.collectives import average_grads, world_size
from tests.judging.net import batch_part


class Critic(nn.Module):
    """Scores of rows, and the derivative of each by its row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both."""
        x = x.detach().requires_grad_()
        scores: Tensor = self.layers(x)[:, 0]
        return scores, torch.autograd.grad(scores.sum(), x, create_graph=True)[0]


def rows(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(6, 5, generator=draw), "y": torch.randn(6, generator=draw)}


def penalised(output: Any, batch: Any, over: int | None = 1) -> Tensor:
    """Return the loss of scores, and of norms of derivatives that are not 1."""
    scores, derivative = output
    norms: Tensor = derivative.norm(dim=over)
    return (scores * batch["y"]).mean() + 10 * (norms - 1).square().mean()


def critic(over: int | None) -> Any:
    """Return data parallel ranks; `over` None takes one norm of all rows."""

    def program(model: Any) -> TrainingProgram:
        def step(batch: Any) -> Tensor:
            part = batch_part(batch, dist.get_rank(), world_size())
            value = penalised(model(part["x"]), part, over)
            value.backward()
            average_grads(model)
            return value

        return TrainingProgram(model, step)

    return program


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_an_original_that_cannot_be_evaluated(dtype: Any, pool: Pool) -> None:
    """It is not evaluated if the program is not; one norm of all rows fails."""
    torch.manual_seed(0)
    inputs = {"model": Critic(), "batch": rows, "loss": penalised, "ranks": 2, "pool": pool}
    report = verify_program(critic(1), dtype=dtype, **inputs)
    assert report.ok, str(report)
    report = verify_program(critic(None), dtype=dtype, **inputs)
    assert report.exit_code == 1, str(report)
