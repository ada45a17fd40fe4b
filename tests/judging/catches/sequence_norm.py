"""https://github.com/NVIDIA/Megatron-LM/issues/1446: the last norm's gradient differs on each rank.

Under sequence parallelism a norm sees the tokens of its rank. Its weights are replicated, and their
gradients must be all-reduced before the optimizer steps; those of the last norm were not.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.collectives import GatherFromSplit, ScatterToSplit, rank_sum
from tests.judging.catches.language_model import WIDTH, LanguageModel, loss, program_pair

NAMED = r"inner\.weight.*a sum over ranks is missing"


def model() -> nn.Module:
    """Return the model with all tokens on one rank."""
    return LanguageModel(nn.LayerNorm(WIDTH))


def _program(model: Any, summed: bool) -> TrainingProgram:
    def step(batch: Any) -> Tensor:
        local = ScatterToSplit.apply(model.embed(batch["ids"]), 1)
        value = loss(model.head(GatherFromSplit.apply(model.inner(local), 1)), batch)
        value.backward()
        if summed:
            for p in model.inner.parameters():
                p.grad = rank_sum(p.grad)
        return value

    return TrainingProgram(model, step, world_loss="same")


# bug: the norm is forgotten; fixed: its gradients are summed
wrong, right = program_pair(_program, False, True)
