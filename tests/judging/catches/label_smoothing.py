"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (1): smoothing counts a part of the vocabulary.

The cross entropy over a split vocabulary takes the size of its part for the whole, and the mean
of log probabilities over its part only: ranks have different losses, and wrong gradients.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.parts import Copied, Summed, of_vocabulary, ranks, split
from tests.judging.catches.words import VOCAB, Words, pair

ALPHA = 0.1
NAMED = r"the loss: .* a constant is added: .*"


def model() -> nn.Module:
    """The whole vocabulary on one rank."""
    return Words(nn.Tanh())


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Smoothed as Megatron does: by alpha over what is not wanted."""
    wanted = batch["ids"][:, 1:].flatten()
    smoothing = ALPHA * VOCAB / (VOCAB - 1)
    return F.cross_entropy(output[:, :-1].flatten(0, 1), wanted, label_smoothing=smoothing)


def _program(model: Any, whole: bool) -> TrainingProgram:
    split(model.head, "weight")

    def step(batch: Any) -> Tensor:
        ids = batch["ids"]
        scores = model.head(Copied.apply(model.inner(model.embed(ids[:, :-1]))))
        log_sum, picked = of_vocabulary(scores, ids[:, 1:])
        vocab, sum_of_scores = scores.shape[-1], scores.sum(-1)
        if whole:
            vocab, sum_of_scores = vocab * ranks(), Summed.apply(sum_of_scores)
        smoothing = ALPHA * vocab / (vocab - 1)
        mean_log_probability = sum_of_scores / vocab - log_sum
        losses = (1 - smoothing) * (log_sum - picked) - smoothing * mean_log_probability
        losses.mean().backward()
        return losses.mean()

    return TrainingProgram(model, step, world_loss="same")


# as it was written: the part of this rank; mended: the whole vocabulary
wrong, right = pair(_program, False, True)
