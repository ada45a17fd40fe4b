"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (6): cross-attention and process groups.

`CrossAttention` is given the groups that it is split over, and gives them to its core and to its
last projection; those of queries, keys and values take the global group of tensor parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.language_model import WIDTH, LanguageModel, batch, loss
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT, RankGrid

NAMED = r"the gradient of the output of `embed`: .*right before it: `inner\.linear_q`"
RANKS, HEADS, SPLIT = 4, 4, 2

__all__ = ["PACKAGE", "WITH", "WITHOUT", "batch", "loss"]


class PlainCross(nn.Module):
    """Causal attention with keys and values in one projection, head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear_kv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.linear_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of all heads."""
        query = self.linear_q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key_value = self.linear_kv(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = key_value.chunk(2, -1)
        scores = query @ key.mT / (WIDTH // HEADS) ** 0.5
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        share = scores.masked_fill(later, -1e4).softmax(-1)
        return self.linear_proj((share @ value).transpose(1, 2).flatten(2))


class SequenceFirst(nn.Module):
    """Megatron's layer, with tokens before rows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Run self-attention with cross-attention's layer."""
        hidden = x.transpose(0, 1).contiguous()
        later = torch.ones(len(hidden), len(hidden), dtype=torch.bool).triu(1)[None, None]
        return self.layer(hidden, later, key_value_states=hidden)[0].transpose(0, 1)


def model() -> nn.Module:
    """Return the model with all heads on one rank."""
    return LanguageModel(PlainCross())


def program(model: Any, mended: bool = False) -> TrainingProgram:
    """Return the program on 2 x 2 ranks: heads over every other rank, rows over neighbours."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    square, inner = RankGrid.made(), model.inner
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        add_bias_linear=False,
        tensor_model_parallel_size=SPLIT,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=inner.linear_q.weight.dtype,
        use_cpu_initialization=True,
    )
    parts = CrossAttentionSubmodules(
        linear_q=ColumnParallelLinear,
        linear_kv=ColumnParallelLinear,
        core_attention=DotProductAttention,
        linear_proj=RowParallelLinear,
    )
    pg_groups = ProcessGroupCollection(tp=square.split, cp=square.alone)
    layer = CrossAttention(config, parts, 1, AttnMaskType.causal, pg_collection=pg_groups)
    if mended:
        layer.linear_q.tp_group = layer.linear_kv.tp_group = square.split
    with torch.no_grad():
        for name, dim in (("linear_q", 0), ("linear_kv", 0), ("linear_proj", 1)):
            parts_of_weight = getattr(inner, name).weight.chunk(SPLIT, dim)
            getattr(layer, name).weight.copy_(parts_of_weight[dist.get_rank(square.split)])
    model.inner = SequenceFirst(layer)
    return TrainingProgram(model, lambda batch: square.step(model, batch, loss))


def mended(model: Any) -> TrainingProgram:
    """The fixed program, with the layer's own groups."""
    return program(model, mended=True)
