"""Model file: blocks of attention and of an MLP with the projections `up` and `down`."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """An MLP with the projections `up` and `down`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """Attention without a mask, then the MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)  # without it twelve of them diverge within two steps
        self.qkv, self.mlp = nn.Linear(width, 3 * width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v).squeeze(1)
        out: Tensor = x + self.mlp(x)
        return out


class Net(nn.Module):
    """Twelve blocks and a mean squared error."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(12))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, target)


def model() -> Net:
    return Net()


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 + seed % 2, 5, 8, generator=generator)
    return {"x": x, "target": x.flip(1)}
