"""A network of two blocks of two linear layers, with dropout."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).parent))
import sum_in_parts  # noqa: E402, F401  (the verb of this folder)


class Block(nn.Module):
    """Two layers beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both."""
        return x + self.drop(self.down(self.up(x).tanh()))


class Net(nn.Module):
    """Two blocks and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean squared error of what comes out."""
        out = self.blocks(x)
        return {"loss": nn.functional.mse_loss(out, y), "out": out}


def model() -> nn.Module:
    """The model."""
    return Net()


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Four sequences of five tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 5, 6, generator=generator) for name in "xy"}
