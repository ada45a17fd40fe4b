"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (2): whole logits are taken for a part of them.

With labels and `parallel_output=False` the vocabulary-parallel cross entropy gets full logits on
each rank: the loss is the right one plus log(ranks), and the gradient of the target is
lost.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.collectives import (
    CopyToSplit,
    GatherFromSplit,
    shard_param,
    vocab_log_sum,
)
from tests.judging.catches.language_model import LanguageModel, program_pair

NAMED = r"loss .*the right value plus log\(ranks\) = log\(2\)"


def model() -> nn.Module:
    """Return the model with the full vocabulary."""
    return LanguageModel(nn.Tanh())


def _program(model: Any, gathered: bool) -> TrainingProgram:
    shard_param(model.head, "weight")

    def step(batch: Any) -> Tensor:
        ids = batch["ids"]
        scores = model.head(CopyToSplit.apply(model.inner(model.embed(ids[:, :-1]))))
        if gathered:
            scores = GatherFromSplit.apply(scores, -1)
        log_sum, picked = vocab_log_sum(scores, ids[:, 1:])
        mean = (log_sum - picked).mean()
        mean.backward()
        return mean

    return TrainingProgram(model, step, world_loss="same")


# bug: gather, and then sum over ranks again; fixed: leave the scores split
wrong, right = program_pair(_program, True, False)
