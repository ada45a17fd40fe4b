"""halve equals the model that it is applied to, on two ranks; and what it refuses."""

import pytest
import torch
from torch import nn

import schedlang


class Net(nn.Module):
    """Two layers, and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean squared error of a shortcut beside the layers."""
        out = x + self.mlp(x)
        return {"loss": nn.functional.mse_loss(out, y), "out": out}


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Six samples."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, 8, generator=generator) for name in "xy"}


def test_it_equals_the_model() -> None:
    """Outputs, loss, gradients and three steps, under data parallelism too."""
    sch = schedlang.create_schedule(Net())
    sch.mesh(dp=2)
    with sch.step("halves"):
        sch["mlp"].halve()
        sch.zero(stage=1, over="dp")
    schedlang.assert_equivalent(sch, batch=batch)


def test_one_part_is_refused() -> None:
    """A row that changes nothing is a mistake."""
    with pytest.raises(schedlang.Refusal, match="use 2 or more"):
        schedlang.create_schedule(Net())["mlp"].halve(parts=1)
