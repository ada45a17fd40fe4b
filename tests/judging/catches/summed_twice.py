"""https://github.com/InternLM/xtuner/pull/1004: a sum with a gradient multiplies it by the ranks.

`torch.distributed.nn.functional.all_reduce` also sums over ranks in backward: right if each rank
has its own loss, but if all compute the same loss it is counted once per rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from schedlang import TrainingProgram
from tests.judging.catches.collectives import CopyToSplit, ReduceFromSplit, shard_param
from tests.judging.catches.language_model import WIDTH, LanguageModel, loss, program_pair

NAMED = r"the gradient of the output of `inner\.2`: ranks = 2 times the right value"


def model() -> nn.Module:
    """Return the model with the full feed-forward on one rank."""
    up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
    return LanguageModel(nn.Sequential(up, nn.GELU(), down))


def _program(model: Any, summed: Any) -> TrainingProgram:
    up, between, down = model.inner
    shard_param(up, "weight")
    shard_param(up, "bias")
    shard_param(down, "weight", 1)

    def step(batch: Any) -> Tensor:
        x = CopyToSplit.apply(model.embed(batch["ids"]))
        value = loss(model.head(summed(down(between(up(x))))), batch)
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same")


# bug: as if losses differed; fixed: backward, the gradient as it is
wrong, right = program_pair(_program, all_reduce, ReduceFromSplit.apply)
