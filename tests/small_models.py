"""One small model of each architecture for tests of pipelines, with its batches and trunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests import models

Batches = Callable[[int], dict[str, Tensor]]


@dataclass(frozen=True)
class SmallModel:
    """An architecture.

    make    builds a model with an even number of layers, without dropout, in float64
    batch   makes the batch of a seed
    trunk   the module lists that a schedule cuts
    """

    name: str
    make: Callable[[int], nn.Module]
    batch: Batches
    trunk: str


class Chain(nn.Module):
    """Linear layers with shortcuts, and a squared error."""

    def __init__(self, layers: int, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 1)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return ((self.head(x)[..., 0] - y) ** 2).mean()


class Level(nn.Module):
    """A convolution of a U-Net, normalised by groups of channels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.convolve(x)))


class UNet(nn.Module):
    """A U-Net: each level up reads the output of the level down of the same height."""

    def __init__(self, layers: int, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        half = layers // 2
        self.enter = nn.Conv2d(1, width, 1)
        self.down = nn.ModuleList(Level(width, width) for _ in range(half))
        self.up = nn.ModuleList(Level(2 * width, width) for _ in range(half))
        self.leave = nn.Conv2d(width, 1, 1)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, skips = self.enter(x), []
        for level in self.down:
            h = level(h)
            skips.append(h)
        for level in self.up:
            h = level(torch.cat([h, skips.pop()], 1))
        return ((self.leave(h) - y) ** 2).mean()


def t5(layers: int) -> nn.Module:
    """T5: half of the layers in the encoder."""
    return models.t5(layers // 2, use_cache=False)


def vit(layers: int) -> nn.Module:
    """ViT that classifies small pictures."""
    return models.hf(
        "ViTForImageClassification",
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_channels=2,
        num_labels=3,
    )


def mixtral(layers: int) -> nn.Module:
    """Mixtral: four experts in each layer, two for each token."""
    return models.llama_like(
        "MixtralForCausalLM",
        num_hidden_layers=layers,
        num_local_experts=4,
        experts_implementation="batched_mm",
    )


def tokens(seed: int) -> dict[str, Tensor]:
    """Eight rows, padded to unequal lengths; some labels are ignored."""
    return models.tokens(rows=8, seed=seed)


def points(seed: int) -> dict[str, Tensor]:
    """Eight points with their sums."""
    return models.points(rows=8, seed=seed)


def pictures(seed: int) -> dict[str, Tensor]:
    """Eight pictures of one channel; the target is a brighter picture."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 1, 6, 6, generator=g, dtype=torch.float64)
    return {"x": x, "y": x + 0.5}


def labelled(seed: int) -> dict[str, Tensor]:
    """Eight pictures of two channels with their classes."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 2, 8, 8, generator=g, dtype=torch.float64)
    return {"pixel_values": x, "labels": torch.randint(3, (8,), generator=g)}


SMALL_MODELS: tuple[SmallModel, ...] = (
    SmallModel("MLP", Chain, points, "layers"),
    SmallModel("GPT-2 (tied)", models.gpt2, tokens, "transformer.h"),
    SmallModel("Llama", models.llama, tokens, "model.layers"),
    SmallModel("T5", t5, tokens, "encoder.block, decoder.block"),
    SmallModel("ViT", vit, labelled, "vit.layers"),
    SmallModel("U-Net", UNet, pictures, "down, up"),
    SmallModel("Mixtral", mixtral, tokens, "model.layers"),
)


def small_model(name: str) -> SmallModel:
    """The architecture of this name."""
    return next(model for model in SMALL_MODELS if model.name == name)


def step_batches(batch: Batches, count: int) -> tuple[Any, ...]:
    """The batches of some steps."""
    return tuple(batch(1 + step) for step in range(count))
