"""https://github.com/pytorch/torchtitan/issues/1805: experts' inputs get one rank's gradient.

Each expert is split over ranks. Its input was taken out of a DTensor by `to_local()`
without `grad_placements`: the gradients that ranks compute for it are parts of a sum, and are not
summed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from schedlang import TrainingProgram
from tests.judging.catches.collectives import CopyToSplit, ReduceFromSplit, shard_param, world_size
from tests.judging.catches.language_model import LanguageModel, loss, program_pair
from tests.judging.catches.moe import Experts

NAMED = r"the output of `embed`: .* `einsum` in `inner` sends back is a term of a sum .* not summed"


def model() -> nn.Module:
    """Return the model with unsplit experts."""
    return LanguageModel(Experts())


def _program(model: Any, grad_placements: Any) -> TrainingProgram:
    experts, mesh = model.inner, init_device_mesh("cpu", (world_size(),), mesh_dim_names=("tp",))
    shard_param(experts, "up", 2)
    shard_param(experts, "down", 1)

    def step(batch: Any) -> Tensor:
        x = model.embed(batch["ids"])
        share, which = experts.routed(x)
        replicated = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        local = replicated.to_local(grad_placements=grad_placements)
        y = ReduceFromSplit.apply(experts.mixed(local, CopyToSplit.apply(share), which))
        value = loss(model.head(y), batch)
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same")


# bug: the gradient is taken for the whole one; fixed: the gradient is a pending sum
wrong, right = program_pair(_program, None, [Partial()])
