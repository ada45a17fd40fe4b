"""Causal language models as users write them, and some that are not causal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, WORDS, LONGEST = 16, 2, 61, 32


class Mixer(nn.Module):
    """One block; `attend`: `flag` is_causal, `mask` a table, `products` and `where` no fused call.

    `full` attends to every token, `conv` also mixes neighbouring tokens by a convolution.
    """

    def __init__(self, attend: str, dropout: float) -> None:
        super().__init__()
        self.attend, self.dropout = attend, dropout
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1) if attend == "conv" else None
        self.register_buffer("seen", torch.ones(LONGEST, LONGEST).tril().bool())

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        rows, tokens, _ = x.shape
        split = self.qkv(self.norm(x)).view(rows, tokens, 3, HEADS, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # [rows, heads, tokens, size] each
        if self.attend == "products":
            scores = (q @ k.mT).masked_fill(~self.seen[:tokens, :tokens], -1e9)
            y = scores.softmax(-1) @ v
        elif self.attend == "where":
            scores = q @ k.mT
            scores /= 2.0
            y = torch.where(~self.seen[:tokens, :tokens], -1e9, scores).softmax(-1) @ v
        elif self.attend == "mask":
            mask = self.seen[:tokens, :tokens]
            mask = mask if keep is None else mask & keep.bool()[:, None, None, :]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.attend != "full")
        y = self.out(y.transpose(1, 2).reshape(rows, tokens, WIDTH))
        x = x + F.dropout(y, self.dropout, self.training)
        return x + torch.tanh(self.mlp(x) if self.conv is None else self.conv(x.mT).mT)


class Causal(nn.Module):
    """`positions`: `arange`, `table` (a sliced parameter), `counted` (a cumulative sum).

    `shift`: the loss predicts the next token; otherwise each position has its own label.
    """

    def __init__(
        self,
        attend: str = "flag",
        positions: str = "arange",
        *,
        shift: bool = True,
        layers: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions, self.shift = positions, shift
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.table = nn.Parameter(torch.randn(1, LONGEST, WIDTH))
        self.blocks = nn.ModuleList(Mixer(attend, dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)
        self.double()

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        x, tokens = self.words(input_ids), input_ids.shape[1]
        if self.positions == "arange":
            x = x + self.places(torch.arange(tokens))
        elif self.positions == "table":
            x = x + self.table[:, :tokens]
        else:
            x = x + self.places(torch.ones_like(input_ids).cumsum(1))
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.loss(self.head(x), labels)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of the next token, or of the label at each position."""
        if not self.shift:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
