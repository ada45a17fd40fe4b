"""https://github.com/pytorch/torchtitan/pull/1373: a key part of all heads lacks gradients.

Forward it is right, as every rank has the same part and gives it to its own heads. Backward a
rank sees what its heads did with it, and nobody sums over the ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.attention import Attention, split_heads
from tests.judging.catches.parts import Copied, Summed
from tests.judging.catches.words import Words, loss, pair

NAMED = r"terms of a sum at `inner\.shared_key`(?s:.*)a sum over ranks is missing"


def model() -> nn.Module:
    """All heads on one rank."""
    return Words(Attention())


def _program(model: Any, summed: bool) -> TrainingProgram:
    split_heads(model.inner)

    def step(batch: Any) -> Tensor:
        x = model.embed(batch["ids"])
        shared = model.inner.shared_key(x)
        shared = Copied.apply(shared) if summed else shared
        y = model.inner.heads(Copied.apply(x), shared)
        value = loss(model.head(Summed.apply(model.inner.out(y))), batch)
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same")


# as it was written: each rank's own gradient; mended: the sum over ranks
wrong, right = pair(_program, False, True)
