"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (2): whole logits are taken for a part of them.

With labels and `parallel_output=False` the cross entropy over a split vocabulary is given the
whole one on each rank: the loss is the right one plus log(ranks), and the gradient of the wanted
is lost.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.parts import Copied, Gathered, of_vocabulary, split
from tests.judging.catches.words import Words, pair

NAMED = r"loss .*the right value plus log\(ranks\) = log\(2\)"


def model() -> nn.Module:
    """The whole vocabulary on one rank."""
    return Words(nn.Tanh())


def _program(model: Any, gathered: bool) -> TrainingProgram:
    split(model.head, "weight")

    def step(batch: Any) -> Tensor:
        ids = batch["ids"]
        scores = model.head(Copied.apply(model.inner(model.embed(ids[:, :-1]))))
        if gathered:
            scores = Gathered.apply(scores, -1)
        log_sum, picked = of_vocabulary(scores, ids[:, 1:])
        mean = (log_sum - picked).mean()
        mean.backward()
        return mean

    return TrainingProgram(model, step, world_loss="same")


# as it was written: gather, and then sum over ranks again; mended: leave the scores split
wrong, right = pair(_program, True, False)
