"""Two layers of attention, whose queries, keys and values read one input."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).parent))
import merge_products  # noqa: E402, F401  (the verb of this folder)


class Attention(nn.Module):
    """Attention with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of each token to all others."""
        return x + nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


class Reader(nn.Module):
    """Layers, and the loss of their sum."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(width), Attention(width)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean squared error."""
        for layer in self.layers:
            x = layer(x)
        return {"loss": nn.functional.mse_loss(x, y), "out": x}


def model() -> nn.Module:
    """The model."""
    return Reader()


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Four sequences of five tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 5, 8, generator=generator) for name in "xy"}
