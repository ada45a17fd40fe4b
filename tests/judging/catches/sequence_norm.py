"""https://github.com/NVIDIA/Megatron-LM/issues/1446: the last norm's gradient differs on each rank.

Under sequence parallelism a norm sees the words of its rank. Its weights are replicas, and their
gradients are to be summed over ranks before the optimizer steps; those of the last norm were not.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.parts import Gathered, Taken, total
from tests.judging.catches.words import WIDTH, Words, loss, pair

NAMED = r"inner\.weight.*a sum over ranks is missing"


def model() -> nn.Module:
    """All words on one rank."""
    return Words(nn.LayerNorm(WIDTH))


def _program(model: Any, summed: bool) -> TrainingProgram:
    def step(batch: Any) -> Tensor:
        mine = Taken.apply(model.embed(batch["ids"]), 1)
        value = loss(model.head(Gathered.apply(model.inner(mine), 1)), batch)
        value.backward()
        if summed:
            for p in model.inner.parameters():
                p.grad = total(p.grad)
        return value

    return TrainingProgram(model, step, world_loss="same")


# as it was written: the norm is forgotten; mended: its gradients are summed
wrong, right = pair(_program, False, True)
