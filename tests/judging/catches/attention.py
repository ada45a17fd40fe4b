"""Attention with heads split over ranks, a sink for each head, and a key part shared by all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.judging.catches.collectives import shard_param
from tests.judging.catches.language_model import WIDTH

HEADS, SHARED = 4, 2


class Attention(nn.Module):
    """Causal; heads have own keys and one shared key part; a sink takes a share of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * (WIDTH // HEADS + SHARED))
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shared_key = nn.Linear(WIDTH, SHARED, bias=False)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of all heads."""
        return self.out(self.heads(x, self.shared_key(x)))

    def heads(self, x: Tensor, shared: Tensor) -> Tensor:
        """Return the output of as many heads as there are sinks."""
        count = len(self.sinks)
        query, key, value = (
            f(x).unflatten(-1, (count, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        key = torch.cat([key, shared[:, None].expand(-1, count, -1, -1)], -1)
        scores = query @ key.mT
        causal = torch.ones_like(scores, dtype=torch.bool).tril()
        scores = scores.masked_fill(~causal, -torch.inf)
        sinks = self.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        share = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return (share @ value).transpose(1, 2).flatten(2)


def split_heads(attention: Attention) -> None:
    """Keep this rank's heads only."""
    for layer in (attention.query, attention.key, attention.value):
        shard_param(layer, "weight")
        shard_param(layer, "bias")
    shard_param(attention, "sinks")
    shard_param(attention.out, "weight", 1)
