"""Replacements for blocks of drawn models: modules that compute the same differently."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class OtherMLP(nn.Module):
    """The residual pair of layers, built from the old norm, layers and dropout."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = old.norm, old.up, old.down, old.drop
        self.pre = old.pre

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        normed = self.norm(x) if self.pre else x
        hidden = self.up(normed)
        hidden = 0.5 * hidden * (1 + torch.erf(hidden * 0.5**0.5))
        result = self.drop(self.down(self.drop(hidden))).add(x)
        return result if self.pre else self.norm(result)


class OtherChain(nn.Module):
    """A linear layer with new parameter names, and tanh."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix, self.shift = (
            nn.Parameter(torch.ones(width, width)),
            nn.Parameter(torch.ones(width)),
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return torch.tanh(F.linear(x, self.matrix) + self.shift)


def other_chain(old: Any) -> Any:
    """Return the replacement of a chain, and the sources of its parameters."""
    return OtherChain(old.lin.weight.shape[0]), {"matrix": "lin.weight", "shift": "lin.bias"}


REPLACEMENTS = {"other_mlp": OtherMLP, "other_chain": other_chain}
