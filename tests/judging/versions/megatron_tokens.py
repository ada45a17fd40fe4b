"""https://github.com/NVIDIA/Megatron-LM/pull/5007: the balance of experts, token by token.

With a loss per token, all gradients are divided by the tokens at the end of a step, and the balance
is multiplied by them before: by those of this rank, where tensor parallel ranks have each a part of
the words, and not by those of all.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from schedlang import TrainingProgram
from tests.judging.catches.parts import own, total
from tests.judging.versions.balanced import Balanced as model
from tests.judging.versions.balanced import loss, of_words, on_ranks, padded, tracked
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT

NAMED = r"what `softmax` in `router` sends back counts 0\.5 times"
RANKS = 2

__all__ = ["PACKAGE", "WITH", "WITHOUT", "loss", "model"]


def batch(seed: int) -> dict[str, Tensor]:
    """Four full rows."""
    return padded(seed, 4, 8)


def program(model: Any, per_token: bool = True, masked: bool = False) -> TrainingProgram:
    """Words in two, as under sequence parallelism; `masked`: with a mask of padding."""
    on_ranks(model, "aux_loss", words=True, calculate_per_token_loss=per_token)

    def step(batch: Any) -> Tensor:
        mine = {name: own(words, 1) for name, words in batch.items()}
        x, padding = model.embed(mine["ids"]), mine["labels"] == -100
        shares, _ = model.router(x, padding) if masked else model.router(x)
        value = of_words(model.mixed(x, shares.reshape(*x.shape[:2], -1)), mine, "sum")
        count = (batch["labels"] != -100).sum()
        (value if per_token else value / count).backward()
        for p in model.parameters():
            p.grad = total(p.grad) / (count if per_token else 1)
        return value / count + tracked("load_balancing_loss")

    return TrainingProgram(model, step, world_loss="sum")


def mended(model: Any) -> TrainingProgram:
    """The same with a loss that is divided before backward."""
    return program(model, per_token=False)


def masked(model: Any) -> TrainingProgram:
    """With a mask, where the count is overwritten with that of all ranks: issue 7452 (10)."""
    return program(model, masked=True)
