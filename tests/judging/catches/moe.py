"""Experts of which a word meets two: an original for the bugs of expert parallelism."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.judging.catches.words import WIDTH

EXPERTS, INNER = 4, 6


class Experts(nn.Module):
    """A router, and experts of two layers each."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Every word's two experts, each by its share."""
        return self.mixed(x, *self.routed(x))

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The shares of two experts, and which they are."""
        found = self.router(x).softmax(-1).topk(2)
        return found.values, found.indices

    def mixed(self, x: Tensor, share: Tensor, which: Tensor) -> Tensor:
        """What those experts that are here make of words."""
        inner = torch.einsum("...d,...kdi->...ki", x, self.up[which]).tanh()
        return torch.einsum("...k,...ki,...kid->...d", share, inner, self.down[which])
