"""https://github.com/NVIDIA-NeMo/Automodel/pull/2995 (2): a gather detaches the router.

Routing probabilities are sent to the experts' ranks by `dist.all_gather`, which autograd does
not see: the router gets no gradient of the loss.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.collectives import (
    Dispatch,
    average_grads,
    gather_all,
    local_part,
    shard_param,
    world_size,
)
from tests.judging.catches.experts_doubled import dispatched
from tests.judging.catches.language_model import LanguageModel, loss, program_pair
from tests.judging.catches.moe import Experts

NAMED = r"`inner\.router`: no rank has one: detached"


def model() -> nn.Module:
    """Return the model with all experts and rows on one rank."""
    return LanguageModel(Experts())


def _program(model: Any, differentiable: bool) -> TrainingProgram:
    experts = model.inner
    shard_param(experts, "up")
    shard_param(experts, "down")

    def step(batch: Any) -> Tensor:
        local = {name: local_part(rows) for name, rows in batch.items()}
        x = model.embed(local["ids"])
        share, which = experts.routed(x)
        share = Dispatch.apply(share) if differentiable else gather_all(share.detach())
        value = loss(model.head(dispatched(experts, x, share, gather_all(which))), local)
        value.backward()
        average_grads(model, but=("inner.up", "inner.down"))
        for p in (experts.up, experts.down):
            p.grad /= world_size()
        return value

    return TrainingProgram(model, step)


# bug: `dist.all_gather`; fixed: a gather that has a gradient
wrong, right = program_pair(_program, False, True)
