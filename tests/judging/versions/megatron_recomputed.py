"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (4): recomputation and process groups.

A layer that predicts more tokens is given the groups that it is split over. Where it is computed
again, and what is saved for that is spread over ranks, it is cut and put together in the global
group: each rank computes again from what another one with other rows had. The thread has it of the
function of Transformer Engine; the one of Megatron-Core itself does the same.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.language_model import WIDTH, LanguageModel, batch, loss
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT, RankGrid

NAMED = r"the gradient of the output of `embed`: .*right before it: `inner`"
RANKS = 4

__all__ = ["PACKAGE", "WITH", "WITHOUT", "batch", "loss"]


class TwoLayers(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both layers."""
        return self.down(torch.tanh(self.up(x)))


class Recomputed(nn.Module):
    """A rank's part of the layers, recomputed in backward by Megatron's layer."""

    def __init__(self, layers: Any, group: Any, spread: bool) -> None:
        super().__init__()
        index = dist.get_rank(group)
        self.up = nn.Parameter(layers.up.weight.detach().chunk(2)[index].clone())
        self.down = nn.Parameter(layers.down.weight.detach().chunk(2, 1)[index].clone())
        config = {"fp8": None, "recompute_method": "uniform", "recompute_num_layers": 1}
        config["distribute_saved_activations"] = spread
        self.group, self.config = group, SimpleNamespace(**config)

    def split(self, x: Tensor) -> Tensor:
        """Return the split layers' output, with Megatron's collectives in the layer's group."""
        from megatron.core.tensor_parallel.mappings import (
            copy_to_tensor_model_parallel_region as copied,
        )
        from megatron.core.tensor_parallel.mappings import (
            reduce_from_tensor_model_parallel_region as summed,
        )

        output = torch.tanh(copied(x, group=self.group) @ self.up.T) @ self.down.T
        return summed(output, group=self.group)

    def forward(self, x: Tensor) -> Tensor:
        """Run `split` with recomputation."""
        from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

        layer: Any = SimpleNamespace(config=self.config)
        return MultiTokenPredictionLayer._checkpointed_forward(layer, self.split, x)


def model() -> nn.Module:
    """Return the model on one rank."""
    return LanguageModel(TwoLayers())


def program(model: Any, spread: bool = True) -> TrainingProgram:
    """Return the program on 2 x 2 ranks: layers over every other rank, rows over neighbours."""
    from megatron.core.tensor_parallel import random

    square = RankGrid.made()
    random._get_all_rng_states = tuple  # they need a GPU, and nothing is random here
    random._set_all_rng_states = lambda *states: None
    random._fork_rng = contextlib.nullcontext
    model.inner = Recomputed(model.inner, square.split, spread)
    return TrainingProgram(model, lambda batch: square.step(model, batch, loss))


def mended(model: Any) -> TrainingProgram:
    """The fixed program: each rank saves the full activation."""
    return program(model, spread=False)
