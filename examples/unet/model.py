"""A small U-Net (Ronneberger et al. 2015): what each level down made is joined on the way up."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Level(nn.Module):
    """A convolution with a norm, moved by the time step; `turn` may halve the sides."""

    def __init__(self, inputs: int, outputs: int, turn: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, outputs)
        self.time = nn.Linear(8, outputs)
        self.turn = turn

    def forward(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        kept = F.silu(self.norm(self.conv(x)) + self.time(time)[:, :, None, None])
        return self.turn(kept), kept


class UNet(nn.Module):
    """Three levels down, two in the middle, three up; `up` is declared before it is called."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, width, 1)
        self.up = nn.ModuleList(Level(2 * width, width, nn.Identity()) for _ in range(3))
        self.down = nn.ModuleList(Level(width, width, nn.AvgPool2d(2)) for _ in range(3))
        self.middle = nn.ModuleList(Level(width, width, nn.Identity()) for _ in range(2))
        self.leave = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor, t: Tensor, target: Tensor) -> dict[str, Tensor]:
        time = torch.sin(t[:, None] * torch.arange(1, 9, dtype=x.dtype, device=x.device))
        h, skips = self.enter(x), []
        for level in self.down:
            h, kept = level(h, time)
            skips.append(kept)
        for level in self.middle:
            h, _ = level(h, time)
        for level in self.up:
            h = F.interpolate(h, skips[-1].shape[-2:])
            h, _ = level(torch.cat([h, skips.pop()], 1), time)
        out = self.leave(F.interpolate(h, x.shape[-2:]))
        return {"loss": (out - target).square().mean(), "out": out}


def model() -> UNet:
    """Eight channels on every level."""
    return UNet()


def batch(seed: int) -> dict[str, Tensor]:
    """Seven or eight squares with noise, and the noise; every third batch has smaller ones."""
    generator = torch.Generator().manual_seed(seed)
    rows, side = (8, 8) if seed % 3 == 1 else (7, 16)
    x, noise = torch.randn(2, rows, 1, side, side, generator=generator)
    return {"x": x + noise, "t": torch.rand(rows, generator=generator), "target": noise}
