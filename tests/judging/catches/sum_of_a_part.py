"""A running sum over words that ranks have in parts, in torch 2.13.0 itself.

A DTensor's `cumsum(-1)` over a dim that is sharded sums up this rank's part, where `cumsum(1)` puts
all together before. The page of findings has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from schedlang import TrainingProgram
from tests.judging.catches.parts import own, ranks, total
from tests.judging.catches.words import WIDTH, Words, loss, pair

NAMED = r"the output of `inner.running`: .*right before it: `inner.gate`"


class Running(nn.Module):
    """Gates of all words before, as a linear recurrence has them."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, gates: Any) -> Any:
        """The sum of logarithms: words are the last of two dims."""
        return gates.cumsum(self.dim)


class Gated(nn.Module):
    """A gate for each word, and what all up to it let through."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.running = nn.Linear(WIDTH, 1), Running()

    def forward(self, x: Tensor) -> Tensor:
        """Words scaled by a running sum."""
        return x * self.running(torch.tanh(self.gate(x)[..., 0]))[..., None]


def model() -> nn.Module:
    """All words on one rank."""
    return Words(Gated())


def _program(model: Any, dim: int) -> TrainingProgram:
    """Words in two."""
    mesh = init_device_mesh("cpu", (ranks(),))
    inner = model.inner
    inner.running.dim = dim

    def step(batch: Any) -> Tensor:
        x = model.embed(own(batch["ids"], 1))
        gates = DTensor.from_local(torch.tanh(inner.gate(x)[..., 0]), mesh, [Shard(1)])
        sums = inner.running(gates).redistribute(placements=[Shard(1)]).to_local()
        scores = DTensor.from_local(model.head(x * sums[..., None]), mesh, [Shard(1)])
        value = loss(scores.redistribute(placements=[Replicate()]).to_local(), batch)
        value.backward()
        for p in model.parameters():
            p.grad = total(p.grad)
        return value

    return TrainingProgram(model, step, world_loss="same")


# as it was written: the last dim; mended: the same dim, by its number
wrong, right = pair(_program, -1, 1)
