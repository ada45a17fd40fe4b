"""https://github.com/NVIDIA-NeMo/Automodel/pull/2995 (2): a gather detaches the router.

Routing probabilities went to the experts' ranks by `dist.all_gather`, which autograd does not
see: the router is left out of the gradient of the loss.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.experts_doubled import dispatched
from tests.judging.catches.moe import Experts
from tests.judging.catches.parts import Dispatched, average, everyone, own, ranks, split
from tests.judging.catches.words import Words, loss, pair

NAMED = r"`inner\.router`: no rank has one: detached"


def model() -> nn.Module:
    """All experts and rows on one rank."""
    return Words(Experts())


def _program(model: Any, differentiable: bool) -> TrainingProgram:
    experts = model.inner
    split(experts, "up")
    split(experts, "down")

    def step(batch: Any) -> Tensor:
        mine = {name: own(rows) for name, rows in batch.items()}
        x = model.embed(mine["ids"])
        share, which = experts.routed(x)
        share = Dispatched.apply(share) if differentiable else everyone(share.detach())
        value = loss(model.head(dispatched(experts, x, share, everyone(which))), mine)
        value.backward()
        average(model, but=("inner.up", "inner.down"))
        for p in (experts.up, experts.down):
            p.grad /= ranks()
        return value

    return TrainingProgram(model, step)


# as it was written: `dist.all_gather`; mended: a gather that has a gradient
wrong, right = pair(_program, False, True)
