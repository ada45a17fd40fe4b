"""https://github.com/pytorch/pytorch/issues/153016: the whole of a DTensor, and its gradient.

Ranks put words together by `full_tensor`, and each goes on with its part of a layer. Backward takes
this rank's slice of the gradient for that of all, unless it is told that it is a term of a sum.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from schedlang import TrainingProgram
from tests.judging.catches.parts import Summed, own, ranks, split, total
from tests.judging.catches.words import WIDTH, Words, loss, pair

NAMED = r"the gradient of the output of `embed`: .*right before it: `inner.0`"


def model() -> nn.Module:
    """All words on one rank."""
    return Words(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


def _program(model: Any, placements: Any) -> TrainingProgram:
    """Words in two around a layer in two."""
    mesh = init_device_mesh("cpu", (ranks(),))
    split(model.inner[0], "weight")
    split(model.inner[0], "bias")
    split(model.inner[2], "weight", 1)

    def step(batch: Any) -> Tensor:
        mine = model.embed(own(batch["ids"], 1))
        whole = DTensor.from_local(mine, mesh, [Shard(1)])
        up = model.inner[1](model.inner[0](whole.full_tensor(grad_placements=placements)))
        mixed = Summed.apply(up @ model.inner[2].weight.T) + model.inner[2].bias
        value = loss(model.head(mixed), batch)
        value.backward()
        model.embed.weight.grad = total(model.embed.weight.grad)
        return value

    return TrainingProgram(model, step, world_loss="same")


# as it was written: nothing is said of the gradient; mended: each rank has a term of it
wrong, right = pair(_program, None, [Partial()])
