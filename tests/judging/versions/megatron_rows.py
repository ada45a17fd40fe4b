"""https://github.com/NVIDIA/Megatron-LM/pull/5798: the balance of each row, token by token.

With a loss per token the balance of rows is multiplied by the tokens of one row, but all gradients
are divided by the tokens of all rows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from schedlang import TrainingProgram
from tests.judging.catches.collectives import local_part, rank_sum
from tests.judging.versions.balanced import Balanced as model
from tests.judging.versions.balanced import (
    balance,
    padded_batch,
    put_router,
    token_loss,
    tracked_balance,
)
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT

NAMED = r"what `softmax` in `router` sends back counts 0\.3333 times"
RANKS, ROWS = 2, 3

__all__ = ["PACKAGE", "WITH", "WITHOUT", "model"]


def batch(seed: int) -> dict[str, Tensor]:
    """Return rows without padding, several for each rank."""
    return padded_batch(seed, RANKS * ROWS, 8)


def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the token loss plus the mean of the rows' balances."""
    scores, probs = output
    balances = [balance(*row) for row in zip(probs, batch["labels"])]
    return token_loss(scores, batch) + sum(balances) / len(balances)


def program(model: Any, per_token: bool = True) -> TrainingProgram:
    """Return the program with rows split over two ranks."""
    put_router(model, "seq_aux_loss", calculate_per_token_loss=per_token)

    def step(batch: Any) -> Tensor:
        local = {name: local_part(rows) for name, rows in batch.items()}
        x = model.embed(local["ids"]).transpose(0, 1).contiguous()  # tokens before rows
        shares, _ = model.router(x)
        mixed = model.mixed(x, shares.reshape(*x.shape[:2], -1)).transpose(0, 1)
        value, count = token_loss(mixed, local, "sum"), local["labels"].numel()
        (value if per_token else value / count).backward()
        for p in model.parameters():
            p.grad = rank_sum(p.grad) / RANKS / (count if per_token else 1)
        return value / count + tracked_balance("seq_load_balancing_loss")

    return TrainingProgram(model, step)


def mended(model: Any) -> TrainingProgram:
    """The fixed program: the loss is divided before backward."""
    return program(model, per_token=False)
