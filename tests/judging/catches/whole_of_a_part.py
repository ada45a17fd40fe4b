"""https://github.com/pytorch/pytorch/issues/153016: the whole of a DTensor, and its gradient.

Ranks gather tokens by `full_tensor`, and each continues with its part of a layer. Backward takes
this rank's slice of its own gradient, unless it is told that the gradient is a partial sum.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from schedlang import TrainingProgram
from tests.judging.catches.collectives import (
    ReduceFromSplit,
    local_part,
    rank_sum,
    shard_param,
    world_size,
)
from tests.judging.catches.language_model import WIDTH, LanguageModel, loss, program_pair

NAMED = r"the gradient of the output of `embed`: .*right before it: `inner.0`"


def model() -> nn.Module:
    """Return the model with all tokens on one rank."""
    return LanguageModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


def _program(model: Any, placements: Any) -> TrainingProgram:
    """Tokens in two around a layer in two."""
    mesh = init_device_mesh("cpu", (world_size(),))
    shard_param(model.inner[0], "weight")
    shard_param(model.inner[0], "bias")
    shard_param(model.inner[2], "weight", 1)

    def step(batch: Any) -> Tensor:
        local = model.embed(local_part(batch["ids"], 1))
        sharded = DTensor.from_local(local, mesh, [Shard(1)])
        up = model.inner[1](model.inner[0](sharded.full_tensor(grad_placements=placements)))
        mixed = ReduceFromSplit.apply(up @ model.inner[2].weight.T) + model.inner[2].bias
        value = loss(model.head(mixed), batch)
        value.backward()
        model.embed.weight.grad = rank_sum(model.embed.weight.grad)
        return value

    return TrainingProgram(model, step, world_loss="same")


# bug: nothing is said of the gradient; fixed: each rank has a term of it
wrong, right = program_pair(_program, None, [Partial()])
