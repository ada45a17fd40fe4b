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
from tests.judging.catches.moe import Experts
from tests.judging.catches.parts import Combined, Dispatched, average, everyone, own, ranks, split
from tests.judging.catches.words import Words, loss, pair

NAMED = r"inner\.(up|down).*2 times the right value"


def model() -> nn.Module:
    """All experts and rows on one rank."""
    return Words(Experts())


def _program(model: Any, divided: bool) -> TrainingProgram:
    experts = model.inner
    split(experts, "up")
    split(experts, "down")

    def step(batch: Any) -> Tensor:
        mine = {name: own(rows) for name, rows in batch.items()}
        x = model.embed(mine["ids"])
        share, which = experts.routed(x)
        y = dispatched(experts, x, Dispatched.apply(share), everyone(which))
        value = loss(model.head(y), mine)
        value.backward()
        average(model, but=("inner.up", "inner.down"))
        if divided:
            experts.up.grad /= ranks()
            experts.down.grad /= ranks()
        return value

    return TrainingProgram(model, step)


def dispatched(experts: Experts, x: Tensor, share: Tensor, which: Tensor) -> Tensor:
    """Send words to their experts' ranks and back; shares and choices are those of all rows."""
    count = len(experts.up)
    elsewhere = which // count != dist.get_rank()
    here = torch.where(elsewhere, 0, which % count)
    share = share.masked_fill(elsewhere, 0.0)
    return Combined.apply(experts.mixed(Dispatched.apply(x), share, here))


# as it was written: experts are left out of the average; mended: experts are divided by the ranks,
# too
wrong, right = pair(_program, False, True)
