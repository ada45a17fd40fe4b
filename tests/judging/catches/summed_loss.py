"""https://github.com/verl-project/verl-SpeCo/pull/29: a sum over ranks that has no gradient.

Losses of ranks are summed before backward, and divided by all tokens. The sum has no gradient:
each rank differentiates its own loss, and then gradients are averaged.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.collectives import average_grads, local_part, rank_sum, world_size
from tests.judging.catches.language_model import LanguageModel

NAMED = r"1/ranks = 1/2 times the right value everywhere"


def model() -> nn.Module:
    """Return the model with all rows at once."""
    return LanguageModel(nn.Tanh())


def _program(model: Any, scale: int) -> TrainingProgram:
    def step(batch: Any) -> Tensor:
        ids = local_part(batch["ids"])
        scores = model(ids)[:, :-1].flatten(0, 1)
        value = F.cross_entropy(scores, ids[:, 1:].flatten(), reduction="sum")
        count = batch["ids"][:, 1:].numel()
        (value * scale / count).backward()
        average_grads(model)
        return rank_sum(value.detach()) / count

    return TrainingProgram(model, step, world_loss="same")


def wrong(model: Any) -> TrainingProgram:
    """Divide by all tokens; averaging divides by the ranks too."""
    return _program(model, 1)


def right(model: Any) -> TrainingProgram:
    """Multiply by the ranks, by which averaging divides."""
    return _program(model, world_size())
