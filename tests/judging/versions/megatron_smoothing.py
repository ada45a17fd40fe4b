"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (1): smoothed labels, part by part.

`vocab_parallel_cross_entropy` takes the size and the mean of this rank's part of the vocabulary for
those of all of it: ranks have different losses, and a wrong gradient.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.parts import Copied, split
from tests.judging.catches.words import VOCAB, Words, batch
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT, groups

NAMED = r"the loss: .* a constant is added: "
RANKS, SMOOTHING = 2, 0.1

__all__ = ["PACKAGE", "WITH", "WITHOUT", "batch"]


def model() -> nn.Module:
    """The whole vocabulary on one rank."""
    return Words(nn.Tanh())


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """A tenth is spread over the words but the wanted one, as Megatron has it on one rank."""
    scores, wanted = output[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten()
    return F.cross_entropy(scores, wanted, label_smoothing=SMOOTHING * VOCAB / (VOCAB - 1))


def program(model: Any) -> TrainingProgram:
    """Megatron's loss on a head in two."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    groups()
    split(model.head, "weight")

    def step(batch: Any) -> Tensor:
        ids = batch["ids"]
        scores = model.head(Copied.apply(model.inner(model.embed(ids[:, :-1]))))
        mean: Tensor = vocab_parallel_cross_entropy(scores.clone(), ids[:, 1:], SMOOTHING).mean()
        mean.backward()
        return mean

    return TrainingProgram(model, step, world_loss="same")
