"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (8): the norm for clipping misses split sinks.

`DotProductAttention` does not mark its learned `softmax_offset` as split, so that on ranks but the
first it is a duplicate, which the norm leaves out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.attention import HEADS
from tests.judging.catches.collectives import (
    CopyToSplit,
    ReduceFromSplit,
    local_part,
    rank_sum,
    shard_param,
)
from tests.judging.catches.language_model import WIDTH, LanguageModel, batch, loss
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT, init_groups

NAMED = r"it leaves out what ranks but the first hold of `inner\.sinks`"
RANKS = 2

__all__ = ["PACKAGE", "WITH", "WITHOUT", "batch", "loss"]


class Attention(nn.Module):
    """Causal attention with a sink for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of all heads."""
        query, key, value = (
            f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        scores = query @ key.mT / (WIDTH // HEADS) ** 0.5
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        sinks = self.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        share = torch.cat([scores.masked_fill(later, -1e4), sinks], -1).softmax(-1)[..., :-1]
        return self.out((share @ value).transpose(1, 2).flatten(2))


def model() -> nn.Module:
    """Return the model with all heads on one rank."""
    return LanguageModel(Attention())


def program(model: Any) -> TrainingProgram:
    """Return the program with split heads; attention and norm filter are Megatron's."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    init_groups()
    inner = model.inner
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        tensor_model_parallel_size=dist.get_world_size(),
        softmax_type="learnable",
        masked_softmax_fusion=False,
        params_dtype=inner.sinks.dtype,
        use_cpu_initialization=True,
    )
    core = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    with torch.no_grad():
        core.softmax_offset.copy_(local_part(inner.sinks))
    inner.sinks = core.softmax_offset
    for layer in (inner.query, inner.key, inner.value):
        for kind in ("weight", "bias"):
            shard_param(layer, kind)
            getattr(layer, kind).tensor_model_parallel = True
    shard_param(inner.out, "weight", 1)
    inner.out.weight.tensor_model_parallel = True

    def step(batch: Any) -> Tensor:
        x = model.embed(batch["ids"])
        heads = (
            f(CopyToSplit.apply(x))
            .unflatten(-1, (HEADS // dist.get_world_size(), -1))
            .transpose(0, 1)
            for f in (inner.query, inner.key, inner.value)
        )
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)[None, None]
        mixed = core(*(head.contiguous() for head in heads), later).transpose(0, 1)
        value = loss(model.head(ReduceFromSplit.apply(inner.out(mixed))), batch)
        value.backward()
        return value

    def clip(max_norm: float) -> Tensor:
        counted = [p for p in model.parameters() if param_is_not_tensor_parallel_duplicate(p)]
        squares = torch.stack([p.grad.square().sum() for p in counted]).sum()
        norm = rank_sum(squares).sqrt()
        for p in model.parameters():
            p.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    return TrainingProgram(model, step, world_loss="same", clip=clip)
