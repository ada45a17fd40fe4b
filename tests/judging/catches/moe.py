"""A layer of experts, two for each token: the original of bugs of expert parallelism."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.judging.catches.language_model import WIDTH

EXPERTS, INNER = 4, 6


class Experts(nn.Module):
    """A router, and experts of two layers each."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of each token's two experts."""
        return self.mixed(x, *self.routed(x))

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shares of each token's two experts, and their indices."""
        best = self.router(x).softmax(-1).topk(2)
        return best.values, best.indices

    def mixed(self, x: Tensor, share: Tensor, which: Tensor) -> Tensor:
        """Return the weighted sum of the given local experts."""
        inner = torch.einsum("...d,...kdi->...ki", x, self.up[which]).tanh()
        return torch.einsum("...k,...ki,...kid->...d", share, inner, self.down[which])
