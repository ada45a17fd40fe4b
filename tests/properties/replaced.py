"""What drawn rows put in the place of blocks: the same in other words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class OtherMLP(nn.Module):
    """The residual pair of layers; it takes over norm, layers and dropout."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = old.norm, old.up, old.down, old.drop
        self.pre = old.pre

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        before = self.norm(x) if self.pre else x
        wide = self.up(before)
        wide = 0.5 * wide * (1 + torch.erf(wide * 0.5**0.5))
        after = self.drop(self.down(self.drop(wide))).add(x)
        return after if self.pre else self.norm(after)


class OtherChain(nn.Module):
    """A linear layer of its own, made of the one there, and a function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix, self.shift = (
            nn.Parameter(torch.ones(width, width)),
            nn.Parameter(torch.ones(width)),
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return torch.tanh(F.linear(x, self.matrix) + self.shift)


def other_chain(old: Any) -> Any:
    """The function that a row names."""
    return OtherChain(old.lin.weight.shape[0]), {"matrix": "lin.weight", "shift": "lin.bias"}


REPLACEMENTS = {"other_mlp": OtherMLP, "other_chain": other_chain}
