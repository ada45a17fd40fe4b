"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (7): tokens and images, part by part.

A model of images and text scatters their embeddings over the global tensor parallel group. Its
language model, which has its own groups, gathers over those.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.language_model import WIDTH, LanguageModel, batch, loss
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT, RankGrid

NAMED = r"the output of `inner`: along dim 1 it holds the places \[0, 1, 2, 0, 1, 2\] of what"
RANKS = 4

__all__ = ["PACKAGE", "WITH", "WITHOUT", "batch", "loss"]


def model() -> nn.Module:
    """Return the model with all tokens on one rank."""
    return LanguageModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))


class SplitLayer(nn.Module):
    """A layer of the language model on this rank's tokens; the head sees all tokens."""

    def __init__(self, layer: nn.Module, square: RankGrid, mended: bool) -> None:
        super().__init__()
        self.layer, self.square, self.mended = layer, square, mended

    def forward(self, x: Tensor) -> Tensor:
        """Scatter as the model of images and text does, and gather."""
        from megatron.core import tensor_parallel
        from megatron.core.models.multimodal.llava_model import LLaVAModel

        embeddings, group = x.transpose(0, 1).contiguous(), self.square.split
        llava: Any = SimpleNamespace(pre_process=True, post_process=True, tp_comm_overlap_lm=False)
        llava.context_parallel_lm, llava.sequence_parallel_lm = 1, True
        llava.tensor_model_parallel_size_lm = 2
        local, *_ = LLaVAModel._process_embedding_token_parallel(
            llava, embeddings, None, None, None
        )
        if self.mended:
            local = tensor_parallel.scatter_to_sequence_parallel_region(embeddings, group)
        gathered = tensor_parallel.gather_from_sequence_parallel_region(
            self.layer(local), False, group
        )
        return gathered.transpose(0, 1)


def program(model: Any, mended: bool = False) -> TrainingProgram:
    """Return the program on 2 x 2 ranks: tokens over every other rank, rows over neighbours."""
    square, layer = RankGrid.made(), model.inner
    model.inner = SplitLayer(layer, square, mended)

    def step(batch: Any) -> Tensor:
        value = square.step(model, batch, loss)
        for p in layer.parameters():  # of this rank's tokens
            assert p.grad is not None
            dist.all_reduce(p.grad, group=square.split)
        return value

    return TrainingProgram(model, step)


def mended(model: Any) -> TrainingProgram:
    """The fixed program: scattered over the language model's own group."""
    return program(model, mended=True)
