"""Attention whose heads are split over ranks, with a sink for each head and a key part for all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.judging.catches.parts import split
from tests.judging.catches.words import WIDTH

HEADS, SHARED = 4, 2


class Attention(nn.Module):
    """Causal; heads have own keys, and one key part together; a sink takes a share of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * (WIDTH // HEADS + SHARED))
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shared_key = nn.Linear(WIDTH, SHARED, bias=False)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """All heads."""
        return self.out(self.heads(x, self.shared_key(x)))

    def heads(self, x: Tensor, shared: Tensor) -> Tensor:
        """As many heads as there are sinks."""
        count = len(self.sinks)
        query, key, value = (
            f(x).unflatten(-1, (count, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        key = torch.cat([key, shared[:, None].expand(-1, count, -1, -1)], -1)
        scores = query @ key.mT
        before = torch.ones_like(scores, dtype=torch.bool).tril()
        scores = scores.masked_fill(~before, -torch.inf)
        sinks = self.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        share = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return (share @ value).transpose(1, 2).flatten(2)


def split_heads(attention: Attention) -> None:
    """Keep this rank's heads."""
    for layer in (attention.query, attention.key, attention.value):
        split(layer, "weight")
        split(layer, "bias")
    split(attention, "sinks")
    split(attention.out, "weight", 1)
