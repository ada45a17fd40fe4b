"""A network of four blocks, which counts how often their forwards run."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).parent))
import except_last  # noqa: E402, F401  (the verb of this folder)

calls: list[int] = []  # the rows of each forward of a block


class Block(nn.Module):
    """One layer beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(6, 6), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both."""
        calls.append(len(x))
        return x + self.drop(self.up(x).tanh())


class Net(nn.Module):
    """Four blocks and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean squared error of what comes out."""
        for block in self.blocks:
            x = block(x)
        return {"loss": nn.functional.mse_loss(x, y), "out": x}


def model() -> nn.Module:
    """The model."""
    return Net()


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Twelve rows."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(12, 6, generator=generator) for name in "xy"}
