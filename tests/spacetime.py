"""A video model with attention along patches (space) and along frames (time)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 8, 2


class Attend(nn.Module):
    """Attention along dim 2 of [rows, frames, patches, width], or along dim 1."""

    def __init__(self, along: int) -> None:
        super().__init__()
        self.along, self.norm = along, nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) if self.along == 2 else self.norm(x).transpose(1, 2)
        y = self.qkv(y)
        q, k, v = y.view(*y.shape[:3], 3, HEADS, -1).permute(3, 0, 1, 4, 2, 5)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(3)
        return x + self.out(mixed if self.along == 2 else mixed.transpose(1, 2))


class Block(nn.Module):
    """Space, then time."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = Attend(2), Attend(1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.time(self.space(x))
        return output


class Video(nn.Module):
    """Predicts a number for each patch of each frame."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, video: Tensor, target: Tensor) -> Tensor:
        x = self.stem(video)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x).squeeze(-1), target)


def batch(seed: int, rows: int = 3, frames: int = 4, patches: int = 6) -> dict[str, Tensor]:
    """A random batch."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, frames, patches)
    video = torch.randn(*shape, 4, generator=generator, dtype=torch.float64)
    return {"video": video, "target": torch.randn(shape, generator=generator, dtype=torch.float64)}


def model() -> Video:
    """Build the video model."""
    return Video()
