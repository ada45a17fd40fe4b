"""https://github.com/NVIDIA-NeMo/RL/pull/3788: the norm for clipping counts replicas again.

One all-reduce over tensor parallel ranks is right for split parameters; a replicated parameter
enters the norm once per rank. So gradients are clipped by too large a norm.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.attention import Attention, split_heads
from tests.judging.catches.collectives import CopyToSplit, ReduceFromSplit, rank_sum
from tests.judging.catches.language_model import LanguageModel, loss, program_pair
from tests.judging.catches.sink_norm import REPLICAS

NAMED = r"it counts each rank\'s copy of `embed\.weight`, `inner\.shared_key\.weight`"


def model() -> nn.Module:
    """Return the model with all heads on one rank."""
    return LanguageModel(Attention())


def _program(model: Any, once: bool) -> TrainingProgram:
    split_heads(model.inner)

    def step(batch: Any) -> Tensor:
        x = model.embed(batch["ids"])
        y = model.inner.heads(CopyToSplit.apply(x), CopyToSplit.apply(model.inner.shared_key(x)))
        value = loss(model.head(ReduceFromSplit.apply(model.inner.out(y))), batch)
        value.backward()
        return value

    def clip(max_norm: float) -> Tensor:
        square = Tensor([0.0]).to(model.head.weight)
        for name, p in model.named_parameters():
            if not once or name not in REPLICAS or dist.get_rank() == 0:
                square += p.grad.square().sum()
        norm = rank_sum(square).sqrt()
        for p in model.parameters():
            p.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    return TrainingProgram(model, step, world_loss="same", clip=clip)


# bug: one sum for all; fixed: replicas are counted on one rank
wrong, right = program_pair(_program, False, True)
