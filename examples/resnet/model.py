"""A small residual network (He et al. 2016) with grouped convolutions and batch norms."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Wider, each group by itself, and back; added to what came in."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.up = nn.Conv2d(width, 2 * width, 1, bias=False)
        self.first = nn.BatchNorm2d(2 * width)
        self.deep = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=groups, bias=False)
        self.second = nn.BatchNorm2d(2 * width)
        self.down = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """What came in, [rows, channels, height, width], with what the branch adds to it."""
        h = F.relu(self.first(self.up(x)))
        return F.relu(x + self.down(F.relu(self.second(self.deep(h)))))


class ResNet(nn.Module):
    """A stem that halves both sides twice, blocks, and a class for the mean of all positions."""

    def __init__(self, width: int = 16, depth: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.ModuleList(Block(width, groups=4) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The loss of pictures against their classes, and the scores of each."""
        h = self.pool(F.relu(self.stem(x)))
        for block in self.blocks:
            h = block(h)
        out = self.head(h.mean((2, 3)))
        return {"loss": F.cross_entropy(out, y), "out": out}


def model() -> ResNet:
    """Three blocks of sixteen channels."""
    return ResNet()


def batch(seed: int) -> dict[str, Tensor]:
    """Six or seven pictures with their classes; every third batch has smaller ones."""
    generator = torch.Generator().manual_seed(seed)
    rows, side = 6 + seed % 2, 16 if seed % 3 == 1 else 32
    return {
        "x": torch.randn(rows, 3, side, side, generator=generator),
        "y": torch.randint(10, (rows,), generator=generator),
    }
