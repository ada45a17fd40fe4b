"""Small models with the structures in which Slapo makes silent errors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 12


class Net(nn.Module):
    """An embedding, a given body, a head and a loss."""

    def __init__(self, body: nn.Module, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, width)
        self.body = body
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(self.embed(ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Mlp(nn.Module):
    """Three projections with functions between them."""

    def __init__(self, middle: Any = torch.sigmoid) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc10 = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.fc10(torch.sigmoid(self.fc2(self.middle(self.fc1(x)))))


class FunctionNet(nn.Module):
    """A module whose forward is a given function."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.fc, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(self, x)
        return out


class Scaled(nn.Module):
    """A forward with default arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return self.fc(x).tanh() * scale + shift


class KeywordCall(nn.Module):
    """A module that calls its child with a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, shift=10.0)
        return out


class TiedHead(nn.Module):
    """A head that uses the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embed(ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class ConvNet(nn.Module):
    """Two convolutions with biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, image: Tensor, labels: Tensor) -> dict[str, Tensor]:
        features = self.second(F.relu(self.first(image))).mean((2, 3))
        logits = self.head(features)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def token_batch(seed: int) -> dict[str, Tensor]:
    """Tokens that include each id of the vocabulary, also the first of each shard."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(CLASSES, generator=generator) for _ in range(4)])
    return {"ids": ids, "labels": ids.roll(1, 1)}


def image_batch(seed: int) -> dict[str, Tensor]:
    """Images with a class each."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(4, 3, 6, 6, generator=generator)
    return {"image": image, "labels": torch.randint(CLASSES, (4,), generator=generator)}
