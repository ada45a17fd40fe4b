"""A cumulative sum over tokens that are split over ranks, in torch 2.13.0 itself.

A DTensor's `cumsum(-1)` over a sharded dim sums this rank's part only, where `cumsum(1)` gathers
first. docs/found.md describes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from schedlang import TrainingProgram
from tests.judging.catches.collectives import local_part, rank_sum, world_size
from tests.judging.catches.language_model import WIDTH, LanguageModel, loss, program_pair

NAMED = r"the output of `inner.running`: .*right before it: `inner.gate`"


class RunningSum(nn.Module):
    """A cumulative sum of gates, as in a linear recurrence."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, gates: Any) -> Any:
        """Return the cumulative sum; tokens are the last of two dims."""
        return gates.cumsum(self.dim)


class Gated(nn.Module):
    """A gate for each token, and their cumulative sum."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.running = nn.Linear(WIDTH, 1), RunningSum()

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens scaled by the cumulative sum."""
        return x * self.running(torch.tanh(self.gate(x)[..., 0]))[..., None]


def model() -> nn.Module:
    """Return the model with all tokens on one rank."""
    return LanguageModel(Gated())


def _program(model: Any, dim: int) -> TrainingProgram:
    """Return the program with tokens split over two ranks."""
    mesh = init_device_mesh("cpu", (world_size(),))
    inner = model.inner
    inner.running.dim = dim

    def step(batch: Any) -> Tensor:
        x = model.embed(local_part(batch["ids"], 1))
        gates = DTensor.from_local(torch.tanh(inner.gate(x)[..., 0]), mesh, [Shard(1)])
        sums = inner.running(gates).redistribute(placements=[Shard(1)]).to_local()
        scores = DTensor.from_local(model.head(x * sums[..., None]), mesh, [Shard(1)])
        value = loss(scores.redistribute(placements=[Replicate()]).to_local(), batch)
        value.backward()
        for p in model.parameters():
            p.grad = rank_sum(p.grad)
        return value

    return TrainingProgram(model, step, world_loss="same")


# bug: the last dim; fixed: the same dim, by its number
wrong, right = program_pair(_program, -1, 1)
