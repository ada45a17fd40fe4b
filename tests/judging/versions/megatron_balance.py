"""https://github.com/NVIDIA/Megatron-LM/pull/3769: the balance of all ranks' words.

`global_aux_loss` counts the words of all ranks, and takes the mean over them of this rank's. Then
gradients are averaged: the balance shrinks with the ranks that have rows of their own.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from schedlang import TrainingProgram
from tests.judging.catches.parts import average, own
from tests.judging.versions.balanced import Balanced as model
from tests.judging.versions.balanced import loss, of_words, on_ranks, padded, tracked
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT

NAMED = r"what `softmax` in `router` sends back counts 0\.5 times"
RANKS = 2

__all__ = ["PACKAGE", "WITH", "WITHOUT", "loss", "model"]


def batch(seed: int) -> dict[str, Tensor]:
    """Four full rows."""
    return padded(seed, 4, 8)


def program(model: Any, mended: bool = False) -> TrainingProgram:
    """Rows in two."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    on_ranks(model, "global_aux_loss")
    if mended:
        MoEAuxLossAutoScaler.main_loss_backward_scale *= dist.get_world_size()

    def step(batch: Any) -> Tensor:
        mine = {name: own(rows) for name, rows in batch.items()}
        x = model.embed(mine["ids"])
        shares, _ = model.router(x)
        value = of_words(model.mixed(x, shares.reshape(*x.shape[:2], -1)), mine)
        value.backward()
        average(model)
        model.router.reset_global_aux_loss_tracker()
        return value + tracked("global_load_balancing_loss") * dist.get_world_size()

    return TrainingProgram(model, step)


def mended(model: Any) -> TrainingProgram:
    """The balance times the ranks, by which the average divides."""
    return program(model, mended=True)
