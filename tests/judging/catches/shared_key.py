"""https://github.com/pytorch/torchtitan/pull/1373: a key part of all heads lacks gradients.

Forward is right: every rank has the same key part for its own heads. In backward a rank has the
gradient of its own heads only, and nothing is summed over ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.attention import Attention, split_heads
from tests.judging.catches.collectives import CopyToSplit, ReduceFromSplit
from tests.judging.catches.language_model import LanguageModel, loss, program_pair

NAMED = r"terms of a sum at `inner\.shared_key`(?s:.*)a sum over ranks is missing"


def model() -> nn.Module:
    """Return the model with all heads on one rank."""
    return LanguageModel(Attention())


def _program(model: Any, summed: bool) -> TrainingProgram:
    split_heads(model.inner)

    def step(batch: Any) -> Tensor:
        x = model.embed(batch["ids"])
        shared = model.inner.shared_key(x)
        shared = CopyToSplit.apply(shared) if summed else shared
        y = model.inner.heads(CopyToSplit.apply(x), shared)
        value = loss(model.head(ReduceFromSplit.apply(model.inner.out(y))), batch)
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same")


# bug: each rank's own gradient; fixed: the sum over ranks
wrong, right = program_pair(_program, False, True)
