"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (8): the norm for clipping misses split sinks.

Attention sinks are split with their heads, but were not marked as split: they count as replicas,
of which only rank 0's enter the norm. So gradients are clipped by too small a norm.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.attention import Attention, split_heads
from tests.judging.catches.collectives import CopyToSplit, ReduceFromSplit, rank_sum
from tests.judging.catches.language_model import LanguageModel, loss, program_pair

NAMED = r"it leaves out what ranks but the first hold of `inner\.sinks`"


def model() -> nn.Module:
    """Return the model with all heads on one rank."""
    return LanguageModel(Attention())


def _program(model: Any, replicas: tuple[str, ...]) -> TrainingProgram:
    split_heads(model.inner)

    def step(batch: Any) -> Tensor:
        x = model.embed(batch["ids"])
        y = model.inner.heads(CopyToSplit.apply(x), CopyToSplit.apply(model.inner.shared_key(x)))
        value = loss(model.head(ReduceFromSplit.apply(model.inner.out(y))), batch)
        value.backward()
        return value

    def clip(max_norm: float) -> Tensor:
        gradients = {name: p.grad for name, p in model.named_parameters()}
        counted = [g for n, g in gradients.items() if n not in replicas or dist.get_rank() == 0]
        norm = rank_sum(sum(g.square().sum() for g in counted)).sqrt()
        for g in gradients.values():
            g.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    return TrainingProgram(model, step, world_loss="same", clip=clip)


REPLICAS = ("embed.weight", "inner.shared_key.weight", "head.weight")


# bug: sinks are taken for replicas; fixed: sinks are split, as heads are
wrong, right = program_pair(_program, (*REPLICAS, "inner.sinks"), REPLICAS)
