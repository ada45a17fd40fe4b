"""https://github.com/huggingface/transformers/issues/48687: routers learn from experts elsewhere.

A rank computes also the slots of other ranks' experts, with an expert of its own, and with share
zero: that hides them forward, not backward, where the share's gradient is the expert's output.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.moe import Experts
from tests.judging.catches.parts import Copied, Summed, split
from tests.judging.catches.words import Words, loss, pair

NAMED = r"the output of `inner\.router`: .*`topk` in `inner` gives: each .* is not masked"


def model() -> nn.Module:
    """All experts on one rank."""
    return Words(Experts())


def _program(model: Any, masked: bool) -> TrainingProgram:
    experts = model.inner
    split(experts, "up")
    split(experts, "down")
    count = len(experts.up)

    def step(batch: Any) -> Tensor:
        x = model.embed(batch["ids"])
        share, which = experts.routed(x)
        share = Copied.apply(share)
        elsewhere = which // count != dist.get_rank()
        here = torch.where(elsewhere, count - 1, which % count)
        if masked:
            share = share.masked_fill(elsewhere, 0.0)
        else:
            share.detach()[elsewhere] = 0.0
        y = Summed.apply(experts.mixed(Copied.apply(x), share, here))
        value = loss(model.head(y), batch)
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same")


# as it was written: shares are zero, and have gradients; mended: shares are masked, and so are
# their gradients
wrong, right = pair(_program, False, True)
