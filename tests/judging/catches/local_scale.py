"""https://github.com/pytorch/torchtitan/pull/2532: the local part of a replicated weight.

`to_local` of a DTensor that all ranks have takes what comes back for whole, unless it is told that
each rank has a term of it. Here a norm's weight scales the heads of each rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from schedlang import TrainingProgram
from tests.judging.catches.parts import Copied, Summed, ranks, split
from tests.judging.catches.words import WIDTH, Words, loss, pair

NAMED = r"`inner\.scale`\): ranks differ and their sum is right: a sum over ranks is missing"


class Heads(nn.Module):
    """Heads of two features, each scaled by the same two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(nn.Linear(1, 2).weight.detach()[:, 0])
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """All heads."""
        return self.down(self.heads(x, self.scale))

    def heads(self, x: Tensor, scale: Tensor) -> Tensor:
        """As many as there are features."""
        return (self.up(x).unflatten(-1, (-1, 2)).tanh() * scale).flatten(-2)


def model() -> nn.Module:
    """All heads on one rank."""
    return Words(Heads())


def _program(model: Any, placements: Any) -> TrainingProgram:
    mesh, inner = init_device_mesh("cpu", (ranks(),)), model.inner
    for layer, name, dim in (
        (inner.up, "weight", 0),
        (inner.up, "bias", 0),
        (inner.down, "weight", 1),
    ):
        split(layer, name, dim)
    inner.scale = nn.Parameter(distribute_tensor(inner.scale.detach(), mesh, [Replicate()]))

    def step(batch: Any) -> Tensor:
        scale = inner.scale
        assert isinstance(scale, DTensor)
        x = Copied.apply(model.embed(batch["ids"]))
        y = inner.heads(x, scale.to_local(grad_placements=placements))
        value = loss(model.head(Summed.apply(inner.down(y))), batch)
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same")


# as it was written: nothing is said of the gradient; mended: each rank has a term of it
wrong, right = pair(_program, None, [Partial()])
