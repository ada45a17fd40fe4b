"""https://github.com/NVIDIA/Megatron-LM/pull/5007: the balance of experts, token by token.

With a loss per token, all gradients are divided by the tokens at the end of a step, and the balance
is multiplied by them before: by those of this rank, where tensor parallel ranks have each a part of
the tokens, and not by those of all.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from schedlang import TrainingProgram
from tests.judging.catches.collectives import local_part, rank_sum
from tests.judging.versions.balanced import Balanced as model
from tests.judging.versions.balanced import (
    loss,
    padded_batch,
    put_router,
    token_loss,
    tracked_balance,
)
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT

NAMED = r"what `softmax` in `router` sends back counts 0\.5 times"
RANKS = 2

__all__ = ["PACKAGE", "WITH", "WITHOUT", "loss", "model"]


def batch(seed: int) -> dict[str, Tensor]:
    """Return four rows without padding."""
    return padded_batch(seed, 4, 8)


def program(model: Any, per_token: bool = True, masked: bool = False) -> TrainingProgram:
    """Return the program with tokens split over two ranks; `masked`: with a padding mask."""
    put_router(model, "aux_loss", words=True, calculate_per_token_loss=per_token)

    def step(batch: Any) -> Tensor:
        local = {name: local_part(tensor, 1) for name, tensor in batch.items()}
        x, padding = model.embed(local["ids"]), local["labels"] == -100
        shares, _ = model.router(x, padding) if masked else model.router(x)
        value = token_loss(model.mixed(x, shares.reshape(*x.shape[:2], -1)), local, "sum")
        count = (batch["labels"] != -100).sum()
        (value if per_token else value / count).backward()
        for p in model.parameters():
            p.grad = rank_sum(p.grad) / (count if per_token else 1)
        return value / count + tracked_balance("load_balancing_loss")

    return TrainingProgram(model, step, world_loss="sum")


def mended(model: Any) -> TrainingProgram:
    """The fixed program: the loss is divided before backward."""
    return program(model, per_token=False)


def masked(model: Any) -> TrainingProgram:
    """The program with a mask, where the count becomes that of all ranks: issue 7452 (10)."""
    return program(model, masked=True)
