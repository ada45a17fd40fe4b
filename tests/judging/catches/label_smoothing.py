"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (1): smoothing counts a part of the vocabulary.

The cross entropy over a split vocabulary takes the size of its part for the whole, and the mean
of log probabilities over its part only: ranks have different losses, and wrong gradients.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.collectives import (
    CopyToSplit,
    ReduceFromSplit,
    shard_param,
    vocab_log_sum,
    world_size,
)
from tests.judging.catches.language_model import VOCAB, LanguageModel, program_pair

ALPHA = 0.1
NAMED = r"the loss: .* a constant is added: .*"


def model() -> nn.Module:
    """Return the model with the full vocabulary."""
    return LanguageModel(nn.Tanh())


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the smoothed loss as Megatron defines it: alpha is spread over the non-targets."""
    targets = batch["ids"][:, 1:].flatten()
    smoothing = ALPHA * VOCAB / (VOCAB - 1)
    return F.cross_entropy(output[:, :-1].flatten(0, 1), targets, label_smoothing=smoothing)


def _program(model: Any, full_vocab: bool) -> TrainingProgram:
    shard_param(model.head, "weight")

    def step(batch: Any) -> Tensor:
        ids = batch["ids"]
        scores = model.head(CopyToSplit.apply(model.inner(model.embed(ids[:, :-1]))))
        log_sum, picked = vocab_log_sum(scores, ids[:, 1:])
        vocab, sum_of_scores = scores.shape[-1], scores.sum(-1)
        if full_vocab:
            vocab, sum_of_scores = vocab * world_size(), ReduceFromSplit.apply(sum_of_scores)
        smoothing = ALPHA * vocab / (vocab - 1)
        mean_log_probability = sum_of_scores / vocab - log_sum
        losses = (1 - smoothing) * (log_sum - picked) - smoothing * mean_log_probability
        losses.mean().backward()
        return losses.mean()

    return TrainingProgram(model, step, world_loss="same")


# bug: the part of this rank; fixed: the whole vocabulary
wrong, right = program_pair(_program, False, True)
