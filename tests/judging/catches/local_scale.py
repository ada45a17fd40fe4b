"""https://github.com/pytorch/torchtitan/pull/2532: the local part of a replicated weight.

`to_local` of a replicated DTensor takes the incoming gradient as complete, unless it is told that
it is partial. Here a norm's weight scales the heads of each rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from schedlang import TrainingProgram
from tests.judging.catches.collectives import CopyToSplit, ReduceFromSplit, shard_param, world_size
from tests.judging.catches.language_model import WIDTH, LanguageModel, loss, program_pair

NAMED = r"`inner\.scale`\): ranks differ and their sum is right: a sum over ranks is missing"


class Heads(nn.Module):
    """Heads of two features, each scaled by the same two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(nn.Linear(1, 2).weight.detach()[:, 0])
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of all heads."""
        return self.down(self.heads(x, self.scale))

    def heads(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return as many heads as there are features."""
        return (self.up(x).unflatten(-1, (-1, 2)).tanh() * scale).flatten(-2)


def model() -> nn.Module:
    """Return the model with all heads on one rank."""
    return LanguageModel(Heads())


def _program(model: Any, placements: Any) -> TrainingProgram:
    mesh, inner = init_device_mesh("cpu", (world_size(),)), model.inner
    for layer, name, dim in (
        (inner.up, "weight", 0),
        (inner.up, "bias", 0),
        (inner.down, "weight", 1),
    ):
        shard_param(layer, name, dim)
    inner.scale = nn.Parameter(distribute_tensor(inner.scale.detach(), mesh, [Replicate()]))

    def step(batch: Any) -> Tensor:
        scale = inner.scale
        assert isinstance(scale, DTensor)
        x = CopyToSplit.apply(model.embed(batch["ids"]))
        y = inner.heads(x, scale.to_local(grad_placements=placements))
        value = loss(model.head(ReduceFromSplit.apply(inner.down(y))), batch)
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same")


# bug: nothing is said of the gradient; fixed: each rank has a term of it
wrong, right = program_pair(_program, None, [Partial()])
