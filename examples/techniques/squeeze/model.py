"""A network of two linear layers, with inputs of very different sizes."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).parent))
import squeeze  # noqa: E402, F401  (the verb of this folder)


class Net(nn.Module):
    """Two layers and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean squared error of a shortcut beside the layers."""
        out = x + self.down(self.up(x).relu())
        return {"loss": nn.functional.mse_loss(out, y), "out": out}


def model() -> nn.Module:
    """The model."""
    return Net()


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Four sequences of five tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 5, 6, generator=generator) for name in "xy"}
