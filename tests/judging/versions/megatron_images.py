"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (7): words and images, part by part.

A model of images and text scatters both, put together, over the global group of tensor parallelism.
Its language model, which was given groups of its own, puts them together over those.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.words import WIDTH, Words, batch, loss
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT, Square

NAMED = r"the output of `inner`: along dim 1 it holds the places \[0, 1, 2, 0, 1, 2\] of what"
RANKS = 4

__all__ = ["PACKAGE", "WITH", "WITHOUT", "batch", "loss"]


def model() -> nn.Module:
    """All words on one rank."""
    return Words(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))


class Spread(nn.Module):
    """A layer of the language model, of this rank's words; the head sees them all."""

    def __init__(self, layer: nn.Module, square: Square, mended: bool) -> None:
        super().__init__()
        self.layer, self.square, self.mended = layer, square, mended

    def forward(self, x: Tensor) -> Tensor:
        """Scatter, as the model of images and text does, and put together."""
        from megatron.core import tensor_parallel
        from megatron.core.models.multimodal.llava_model import LLaVAModel

        both, group = x.transpose(0, 1).contiguous(), self.square.split
        given: Any = SimpleNamespace(pre_process=True, post_process=True, tp_comm_overlap_lm=False)
        given.context_parallel_lm, given.sequence_parallel_lm = 1, True
        given.tensor_model_parallel_size_lm = 2
        mine, *_ = LLaVAModel._process_embedding_token_parallel(given, both, None, None, None)
        if self.mended:
            mine = tensor_parallel.scatter_to_sequence_parallel_region(both, group)
        made = tensor_parallel.gather_from_sequence_parallel_region(self.layer(mine), False, group)
        return made.transpose(0, 1)


def program(model: Any, mended: bool = False) -> TrainingProgram:
    """Two by two ranks: words over every other rank, rows over neighbours."""
    square, layer = Square.made(), model.inner
    model.inner = Spread(layer, square, mended)

    def step(batch: Any) -> Tensor:
        value = square.step(model, batch, loss)
        for p in layer.parameters():  # of this rank's words
            assert p.grad is not None
            dist.all_reduce(p.grad, group=square.split)
        return value

    return TrainingProgram(model, step)


def mended(model: Any) -> TrainingProgram:
    """The same, scattered over the language model's own group."""
    return program(model, mended=True)
