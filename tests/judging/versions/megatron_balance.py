"""https://github.com/NVIDIA/Megatron-LM/pull/3769: the balance of all ranks' tokens.

`global_aux_loss` counts the tokens of all ranks, and takes the mean over them of this rank's. Then
gradients are averaged: the balance shrinks with the ranks that have rows of their own.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from schedlang import TrainingProgram
from tests.judging.catches.collectives import average_grads, local_part
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


def program(model: Any, mended: bool = False) -> TrainingProgram:
    """Return the program with rows split over two ranks."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    put_router(model, "global_aux_loss")
    if mended:
        MoEAuxLossAutoScaler.main_loss_backward_scale *= dist.get_world_size()

    def step(batch: Any) -> Tensor:
        local = {name: local_part(rows) for name, rows in batch.items()}
        x = model.embed(local["ids"])
        shares, _ = model.router(x)
        value = token_loss(model.mixed(x, shares.reshape(*x.shape[:2], -1)), local)
        value.backward()
        average_grads(model)
        model.router.reset_global_aux_loss_tracker()
        return value + tracked_balance("global_load_balancing_loss") * dist.get_world_size()

    return TrainingProgram(model, step)


def mended(model: Any) -> TrainingProgram:
    """The fixed program: the balance times the ranks, by which averaging divides."""
    return program(model, mended=True)
