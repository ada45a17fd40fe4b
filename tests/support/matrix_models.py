"""Small models of the support matrix, and their batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import models, small_models


@dataclass(frozen=True)
class Subject:
    """A model that can be built with any number of layers, its batches, and the paths of its parts.

    trunk    the list of repeated blocks
    frozen   what `freeze` takes
    """

    name: str
    make: Callable[[int], nn.Module]
    batches: Callable[[], tuple[Mapping[str, Any], ...]]
    trunk: str
    frozen: str


class Residual(nn.Module):
    """Two convolutions with a group norm between them, and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.down = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out: Tensor = x + self.down(torch.tanh(self.norm(self.up(x))))
        return out


class ConvNet(nn.Module):
    """A stem, residual blocks of convolutions, mean pooling, and a classifier."""

    def __init__(self, layers: int, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Conv2d(2, width, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(layers))
        self.head = nn.Linear(width, 6)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The loss and the logits."""
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        out = self.head(h.flatten(2).mean(2))
        return {"loss": F.cross_entropy(out, y), "out": out}


def whisper(layers: int) -> nn.Module:
    """A Whisper classifier, whose encoder begins with two convolutions."""
    return models.hf(
        "WhisperForAudioClassification",
        vocab_size=models.VOCAB,
        num_mel_bins=4,
        **models.HALVES
        | {"encoder_layers": layers, "decoder_layers": layers}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
        max_source_positions=8,
        num_labels=3,
        classifier_proj_size=8,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def _token_batches() -> tuple[Mapping[str, Any], ...]:
    # rows that end early; the second batch is shorter and has rows without labels
    return models.tokens(8, 8, seed=1), models.tokens(8, 8, seed=2)


def _image_batches() -> tuple[Mapping[str, Any], ...]:
    g = torch.Generator().manual_seed(5)
    return tuple(
        {
            "x": torch.randn(8, 2, 8, 8, generator=g).double(),
            "y": torch.randint(6, (8,), generator=g),
        }
        for _ in range(2)
    )


def _sound_batches() -> tuple[Mapping[str, Any], ...]:
    g = torch.Generator().manual_seed(5)
    return tuple(
        {
            "input_features": torch.randn(8, 4, 16, generator=g).double(),
            "labels": torch.randint(3, (8,), generator=g),
        }
        for _ in range(2)
    )


LLAMA = Subject("Llama", models.llama, _token_batches, "model.layers", "model.embed_tokens")
GPT2 = Subject("GPT-2", models.gpt2, _token_batches, "transformer.h", "transformer.wpe")
MIXTRAL = Subject(
    "Mixtral", small_models.mixtral, _token_batches, "model.layers", "model.embed_tokens"
)
PICTURES = Subject("conv net", ConvNet, _image_batches, "blocks", "stem")
WHISPER = Subject("Whisper", whisper, _sound_batches, "encoder.layers", "encoder.conv1")


@functools.cache
def build_model(model: Subject, layers: int) -> nn.Module:
    """The model, built once; nothing changes it."""
    return model.make(layers)
