"""A small language model of plain torch modules that can be cut between blocks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a feed-forward, each with a norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_width = width // heads

    def forward(self, x: Tensor) -> Tensor:
        """Attend to what came before, then compute each position by itself."""
        y = self.before_attention(x)
        parts = (linear(y) for linear in (self.query, self.key, self.value))
        heads = (part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class Model(nn.Module):
    """Embedding, blocks and head; a part that is gone is passed over."""

    def __init__(self, vocab: int = 64, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token at each position."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model() -> Model:
    """Four blocks of four heads."""
    return Model()


def batch(seed: int) -> dict[str, Tensor]:
    """Eight rows of ten tokens."""
    return {"ids": torch.randint(64, (8, 10), generator=torch.Generator().manual_seed(seed))}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """How badly the next tokens are predicted."""
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())
