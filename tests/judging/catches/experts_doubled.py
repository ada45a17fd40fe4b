"""https://github.com/pytorch/pytorch/issues/160285: experts' gradients are not divided.

Each rank has rows of its own and the mean of their losses, and gradients are averaged over ranks.
But an expert has met the rows of all: its gradient is a sum already, and nobody divides it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.collectives import (
    Combine,
    Dispatch,
    average_grads,
    gather_all,
    local_part,
    shard_param,
    world_size,
)
from tests.judging.catches.language_model import LanguageModel, loss, program_pair
from tests.judging.catches.moe import Experts

NAMED = r"inner\.(up|down).*2 times the right value"


def model() -> nn.Module:
    """Return the model with all experts and rows on one rank."""
    return LanguageModel(Experts())


def _program(model: Any, divided: bool) -> TrainingProgram:
    experts = model.inner
    shard_param(experts, "up")
    shard_param(experts, "down")

    def step(batch: Any) -> Tensor:
        local = {name: local_part(rows) for name, rows in batch.items()}
        x = model.embed(local["ids"])
        share, which = experts.routed(x)
        y = dispatched(experts, x, Dispatch.apply(share), gather_all(which))
        value = loss(model.head(y), local)
        value.backward()
        average_grads(model, but=("inner.up", "inner.down"))
        if divided:
            experts.up.grad /= world_size()
            experts.down.grad /= world_size()
        return value

    return TrainingProgram(model, step)


def dispatched(experts: Experts, x: Tensor, share: Tensor, which: Tensor) -> Tensor:
    """Return expert outputs of this rank's tokens; shares and indices are those of all rows."""
    count = len(experts.up)
    is_remote = which // count != dist.get_rank()
    local_index = torch.where(is_remote, 0, which % count)
    share = share.masked_fill(is_remote, 0.0)
    return Combine.apply(experts.mixed(Dispatch.apply(x), share, local_index))


# bug: experts are left out of the average; fixed: experts are divided by the ranks,
# too
wrong, right = program_pair(_program, False, True)
