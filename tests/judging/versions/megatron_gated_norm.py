"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (11): the norm of a gated delta net.

Heads are split, and one norm is for all of them: ranks have terms of the gradient of its weight.
What finishes gradients sums them under sequence parallelism alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.attention import HEADS
from tests.judging.catches.parts import Copied, Summed, split
from tests.judging.catches.words import WIDTH, Words, batch, loss
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT, groups

NAMED = r"`inner\.norm\.weight`\): ranks differ and their sum is right: a sum over ranks is missing"
RANKS = 2

__all__ = ["PACKAGE", "WITH", "WITHOUT", "batch", "loss"]


class Gated(nn.Module):
    """Heads of values, each by the same norm and then by its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """All heads."""
        value, gate = (f(x).unflatten(-1, (HEADS, -1)) for f in (self.value, self.gate))
        return self.out((self.norm(value) * nn.functional.silu(gate)).flatten(-2))


def model() -> nn.Module:
    """All heads on one rank."""
    return Words(Gated())


def program(model: Any) -> TrainingProgram:
    """Heads in two; the gated norm, and what finishes gradients, are Megatron's."""
    from megatron.core.distributed.finalize_model_grads import (
        _allreduce_non_tensor_model_parallel_grads as finish,
    )
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.transformer import TransformerConfig

    groups()
    inner = model.inner
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=dist.get_world_size(),
    )
    for layer in (inner.value, inner.gate):
        split(layer, "weight")
        split(layer, "bias")
    split(inner.out, "weight", 1)
    # all that `_apply_gated_norm` takes of a layer, whose constructor needs a kernel of Triton
    net: Any = SimpleNamespace(out_norm=inner.norm, act_fn=nn.functional.silu)
    model.ddp_config = SimpleNamespace(use_megatron_fsdp=False)

    def step(batch: Any) -> Tensor:
        x = Copied.apply(model.embed(batch["ids"]))
        value, gate = (
            f(x).unflatten(-1, (HEADS // dist.get_world_size(), -1))
            for f in (inner.value, inner.gate)
        )
        with torch.compiler.set_stance("force_eager"):
            made = GatedDeltaNet._apply_gated_norm(net, value, gate)
        mixed = Summed.apply(inner.out(made.reshape(*x.shape[:-1], -1)))
        total = loss(model.head(mixed), batch)
        total.backward()
        finish([model], config)
        return total

    return TrainingProgram(model, step, world_loss="same")
