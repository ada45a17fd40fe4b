"""Two towers and their contrastive loss over all pairs of rows: CLIP (Radford et al. 2021)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def contrast(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Return CLIP's loss: each row of `a` finds its row of `b` among all, and the other way."""
    logits = scale.exp() * F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t()
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


class Towers(nn.Module):
    """Two towers with dropout, and their contrastive loss, or what it is made of."""

    def __init__(self, inside: bool = True) -> None:
        super().__init__()
        self.inside = inside
        self.image = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.2))
        self.text = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> Any:
        """Return loss and features, or the features and the scale."""
        a, b = self.image(image), self.text(text)
        if not self.inside:
            return a, b, self.scale
        return {"loss": contrast(a, b, self.scale), "image": a, "text": b}


def model() -> nn.Module:
    """Return the towers with their loss."""
    return Towers()


def batch(seed: int, rows: int = 8) -> dict[str, Tensor]:
    """Return images and texts, a pair a row."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randn(rows, 12, generator=generator),
        "text": torch.randn(rows, 6, generator=generator),
    }
