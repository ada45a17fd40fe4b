"""https://github.com/NVIDIA/Megatron-LM/pull/5798: the balance of each row, token by token.

With a loss per token the balance of rows is multiplied by the words of one row, and all gradients
are divided by those of all rows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from schedlang import TrainingProgram
from tests.judging.catches.parts import own, total
from tests.judging.versions.balanced import Balanced as model
from tests.judging.versions.balanced import balance, of_words, on_ranks, padded, tracked
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT

NAMED = r"what `softmax` in `router` sends back counts 0\.3333 times"
RANKS, ROWS = 2, 3

__all__ = ["PACKAGE", "WITH", "WITHOUT", "model"]


def batch(seed: int) -> dict[str, Tensor]:
    """Full rows, some for each rank."""
    return padded(seed, RANKS * ROWS, 8)


def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """How badly words are predicted, and the mean of the balance of rows."""
    scores, likely = output
    each = [balance(*row) for row in zip(likely, batch["labels"])]
    return of_words(scores, batch) + sum(each) / len(each)


def program(model: Any, per_token: bool = True) -> TrainingProgram:
    """Rows in two."""
    on_ranks(model, "seq_aux_loss", calculate_per_token_loss=per_token)

    def step(batch: Any) -> Tensor:
        mine = {name: own(rows) for name, rows in batch.items()}
        x = model.embed(mine["ids"]).transpose(0, 1).contiguous()  # words before rows
        shares, _ = model.router(x)
        mixed = model.mixed(x, shares.reshape(*x.shape[:2], -1)).transpose(0, 1)
        value, count = of_words(mixed, mine, "sum"), mine["labels"].numel()
        (value if per_token else value / count).backward()
        for p in model.parameters():
            p.grad = total(p.grad) / RANKS / (count if per_token else 1)
        return value / count + tracked("seq_load_balancing_loss")

    return TrainingProgram(model, step)


def mended(model: Any) -> TrainingProgram:
    """The same with a loss that is divided before backward."""
    return program(model, per_token=False)
