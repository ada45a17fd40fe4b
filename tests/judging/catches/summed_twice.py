"""https://github.com/InternLM/xtuner/pull/1004: a sum with a gradient multiplies it by the ranks.

`torch.distributed.nn.functional.all_reduce` sums over ranks backward, too: right where each rank
has a loss of its own, but where all compute the same loss it is counted once for each of them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from schedlang import TrainingProgram
from tests.judging.catches.parts import Copied, Summed, split
from tests.judging.catches.words import WIDTH, Words, loss, pair

NAMED = r"the gradient of the output of `inner\.2`: ranks = 2 times the right value"


def model() -> nn.Module:
    """All of a feed-forward on one rank."""
    up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
    return Words(nn.Sequential(up, nn.GELU(), down))


def _program(model: Any, summed: Any) -> TrainingProgram:
    up, between, down = model.inner
    split(up, "weight")
    split(up, "bias")
    split(down, "weight", 1)

    def step(batch: Any) -> Tensor:
        x = Copied.apply(model.embed(batch["ids"]))
        value = loss(model.head(summed(down(between(up(x))))), batch)
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same")


# as it was written: as if losses differed; mended: backward, the gradient as it is
wrong, right = pair(_program, all_reduce, Summed.apply)
