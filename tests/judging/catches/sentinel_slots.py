"""https://github.com/huggingface/transformers/issues/48687: routers learn from experts elsewhere.

A rank also computes slots of other ranks' experts, with one of its own experts and share zero:
that hides them in forward, but not in backward, where the share's gradient is the expert's output.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.collectives import CopyToSplit, ReduceFromSplit, shard_param
from tests.judging.catches.language_model import LanguageModel, loss, program_pair
from tests.judging.catches.moe import Experts

NAMED = r"the output of `inner\.router`: .*`topk` in `inner` gives: each .* is not masked"


def model() -> nn.Module:
    """Return the model with all experts on one rank."""
    return LanguageModel(Experts())


def _program(model: Any, masked: bool) -> TrainingProgram:
    experts = model.inner
    shard_param(experts, "up")
    shard_param(experts, "down")
    count = len(experts.up)

    def step(batch: Any) -> Tensor:
        x = model.embed(batch["ids"])
        share, which = experts.routed(x)
        share = CopyToSplit.apply(share)
        is_remote = which // count != dist.get_rank()
        local_index = torch.where(is_remote, count - 1, which % count)
        if masked:
            share = share.masked_fill(is_remote, 0.0)
        else:
            share.detach()[is_remote] = 0.0
        y = ReduceFromSplit.apply(experts.mixed(CopyToSplit.apply(x), share, local_index))
        value = loss(model.head(y), batch)
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same")


# bug: shares are zero, and have gradients; fixed: shares are masked, and so are
# their gradients
wrong, right = program_pair(_program, False, True)
