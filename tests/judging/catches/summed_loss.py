"""https://github.com/verl-project/verl-SpeCo/pull/29: a sum over ranks that has no gradient.

The losses of ranks are summed before backward, and divided by the words of all. The sum hands no
gradient on: each rank derives its own loss, and then gradients are averaged.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.parts import average, own, ranks, total
from tests.judging.catches.words import Words

NAMED = r"1/ranks = 1/2 times the right value everywhere"


def model() -> nn.Module:
    """All rows at once."""
    return Words(nn.Tanh())


def _program(model: Any, scale: int) -> TrainingProgram:
    def step(batch: Any) -> Tensor:
        ids = own(batch["ids"])
        scores = model(ids)[:, :-1].flatten(0, 1)
        value = F.cross_entropy(scores, ids[:, 1:].flatten(), reduction="sum")
        count = batch["ids"][:, 1:].numel()
        (value * scale / count).backward()
        average(model)
        return total(value.detach()) / count

    return TrainingProgram(model, step, world_loss="same")


def wrong(model: Any) -> TrainingProgram:
    """Divided by all words, and by the ranks."""
    return _program(model, 1)


def right(model: Any) -> TrainingProgram:
    """Times the ranks, by which the average divides."""
    return _program(model, ranks())
