"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (11): the norm of a gated delta net.

Heads are split, and share one norm: ranks have partial gradients of its weight. Megatron's
finalization of gradients sums them under sequence parallelism only.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.attention import HEADS
from tests.judging.catches.collectives import CopyToSplit, ReduceFromSplit, shard_param
from tests.judging.catches.language_model import WIDTH, LanguageModel, batch, loss
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT, init_groups

NAMED = r"`inner\.norm\.weight`\): ranks differ and their sum is right: a sum over ranks is missing"
RANKS = 2

__all__ = ["PACKAGE", "WITH", "WITHOUT", "batch", "loss"]


class Gated(nn.Module):
    """Value heads with a shared norm, and gates."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of all heads."""
        value, gate = (f(x).unflatten(-1, (HEADS, -1)) for f in (self.value, self.gate))
        return self.out((self.norm(value) * nn.functional.silu(gate)).flatten(-2))


def model() -> nn.Module:
    """Return the model with all heads on one rank."""
    return LanguageModel(Gated())


def program(model: Any) -> TrainingProgram:
    """Return the program with split heads; gated norm and finalization are Megatron's."""
    from megatron.core.distributed.finalize_model_grads import (
        _allreduce_non_tensor_model_parallel_grads as finish,
    )
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.transformer import TransformerConfig

    init_groups()
    inner = model.inner
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=dist.get_world_size(),
    )
    for layer in (inner.value, inner.gate):
        shard_param(layer, "weight")
        shard_param(layer, "bias")
    shard_param(inner.out, "weight", 1)
    # all that `_apply_gated_norm` reads of a layer, whose constructor needs a Triton kernel
    net: Any = SimpleNamespace(out_norm=inner.norm, act_fn=nn.functional.silu)
    model.ddp_config = SimpleNamespace(use_megatron_fsdp=False)

    def step(batch: Any) -> Tensor:
        x = CopyToSplit.apply(model.embed(batch["ids"]))
        value, gate = (
            f(x).unflatten(-1, (HEADS // dist.get_world_size(), -1))
            for f in (inner.value, inner.gate)
        )
        with torch.compiler.set_stance("force_eager"):
            normed = GatedDeltaNet._apply_gated_norm(net, value, gate)
        mixed = ReduceFromSplit.apply(inner.out(normed.reshape(*x.shape[:-1], -1)))
        total = loss(model.head(mixed), batch)
        total.backward()
        finish([model], config)
        return total

    return TrainingProgram(model, step, world_loss="same")
