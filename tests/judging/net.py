"""A small decoder, its batches and its loss: the original model of the judged programs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, LENGTH, ROWS = 22, 8, 4, 6, 8


class Attention(nn.Module):
    """Causal attention over as many heads as its projections have."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attend, and project the result."""
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in self.three)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    @property
    def three(self) -> tuple[nn.Module, ...]:
        """The query, key and value projections."""
        return self.q, self.k, self.v


class Block(nn.Module):
    """Attention and an MLP, each behind its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and MLP to the residual."""
        x = x + self.attention(self.n1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.n2(x)))))


class Net(nn.Module):
    """Embedding, blocks, a norm, and a head that is tied to the embedding or not."""

    def __init__(self, tied: bool = False, frozen: bool = False, depth: int = 2) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))
        if tied:
            self.head.weight = self.emb.weight
        if frozen:
            self.norm.weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


def batch(seed: int) -> dict[str, Any]:
    """Return token ids, and labels of which some are -100 (ignored)."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=draw)
    labels = ids.roll(1, 1)
    labels[:, -1] = torch.where(torch.arange(ROWS) % 3 > 0, -100, labels[:, -1])
    return {"ids": ids, "labels": labels}


def loss(output: Tensor, batch: Any) -> Tensor:
    """Return the mean cross-entropy over labels that count."""
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def loss_share(output: Tensor, part: Any, full_batch: Any) -> Tensor:
    """Return what a part of a batch contributes to the mean over the full batch."""
    total = F.cross_entropy(output.flatten(0, 1), part["labels"].flatten(), reduction="sum")
    return total / (full_batch["labels"] != -100).sum()


def batch_part(batch: Any, index: int, count: int) -> dict[str, Any]:
    """Return the rows of one of several equal parts of a batch."""
    return {name: value.chunk(count)[index] for name, value in batch.items()}
