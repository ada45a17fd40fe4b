"""Model file: a list of layers with norms and a head, for schedules that name no model."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Layer(nn.Module):
    """A norm, two projections and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Layered(nn.Module):
    """A language model: token ids in, a loss out."""

    def __init__(self, width: int = 16, words: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(4))
        self.lm_head = nn.Linear(width, words)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), labels.flatten())


def model() -> Layered:
    return Layered()


def batch(seed: int) -> dict[str, Tensor]:
    """Return rows for eight microbatches, or one row more."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(24, (8 + seed % 2, 6), generator=generator)
    return {"words": words, "labels": (words * 5 + 1) % 24}
