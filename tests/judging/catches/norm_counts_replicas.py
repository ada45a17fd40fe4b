"""https://github.com/NVIDIA-NeMo/RL/pull/3788: the norm for clipping counts replicas again.

One sum over the tensor parallel ranks is right for what is split; a parameter that all ranks have
enters the norm as many times as there are ranks. So gradients are clipped by too large a norm.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.attention import Attention, split_heads
from tests.judging.catches.parts import Copied, Summed, total
from tests.judging.catches.sink_norm import REPLICAS
from tests.judging.catches.words import Words, loss, pair

NAMED = r"it counts each rank\'s copy of `embed\.weight`, `inner\.shared_key\.weight`"


def model() -> nn.Module:
    """All heads on one rank."""
    return Words(Attention())


def _program(model: Any, once: bool) -> TrainingProgram:
    split_heads(model.inner)

    def step(batch: Any) -> Tensor:
        x = model.embed(batch["ids"])
        y = model.inner.heads(Copied.apply(x), Copied.apply(model.inner.shared_key(x)))
        value = loss(model.head(Summed.apply(model.inner.out(y))), batch)
        value.backward()
        return value

    def clip(most: float) -> Tensor:
        square = Tensor([0.0]).to(model.head.weight)
        for name, p in model.named_parameters():
            if not once or name not in REPLICAS or dist.get_rank() == 0:
                square += p.grad.square().sum()
        norm = total(square).sqrt()
        for p in model.parameters():
            p.grad.mul_((most / (norm + 1e-6)).clamp(max=1.0))
        return norm

    return TrainingProgram(model, step, world_loss="same", clip=clip)


# as it was written: one sum for all; mended: replicas are counted on one rank
wrong, right = pair(_program, False, True)
