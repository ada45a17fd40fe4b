"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (1): smoothed labels, part by part.

`vocab_parallel_cross_entropy` takes the size and the mean of this rank's part of the vocabulary for
those of all of it: ranks have different losses, and a wrong gradient.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.collectives import CopyToSplit, shard_param
from tests.judging.catches.language_model import VOCAB, LanguageModel, batch
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT, init_groups

NAMED = r"the loss: .* a constant is added: "
RANKS, SMOOTHING = 2, 0.1

__all__ = ["PACKAGE", "WITH", "WITHOUT", "batch"]


def model() -> nn.Module:
    """Return the model with the full vocabulary."""
    return LanguageModel(nn.Tanh())


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the smoothed loss as Megatron computes it on one rank."""
    scores, targets = output[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten()
    return F.cross_entropy(scores, targets, label_smoothing=SMOOTHING * VOCAB / (VOCAB - 1))


def program(model: Any) -> TrainingProgram:
    """Return the program with Megatron's loss on a split head."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    init_groups()
    shard_param(model.head, "weight")

    def step(batch: Any) -> Tensor:
        ids = batch["ids"]
        scores = model.head(CopyToSplit.apply(model.inner(model.embed(ids[:, :-1]))))
        mean: Tensor = vocab_parallel_cross_entropy(scores.clone(), ids[:, 1:], SMOOTHING).mean()
        mean.backward()
        return mean

    return TrainingProgram(model, step, world_loss="same")
