"""https://github.com/pytorch/torchtitan/issues/1805: experts' inputs get one rank's gradient.

Each expert is split over ranks inside. Its input was taken out of a DTensor by `to_local()`
without `grad_placements`: the gradients that ranks compute for it are parts of a sum, and are not
summed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from schedlang import TrainingProgram
from tests.judging.catches.moe import Experts
from tests.judging.catches.parts import Copied, Summed, ranks, split
from tests.judging.catches.words import Words, loss, pair

NAMED = r"the output of `embed`: .* `einsum` in `inner` sends back is a term of a sum .* not summed"


def model() -> nn.Module:
    """Whole experts on one rank."""
    return Words(Experts())


def _program(model: Any, grad_placements: Any) -> TrainingProgram:
    experts, mesh = model.inner, init_device_mesh("cpu", (ranks(),), mesh_dim_names=("tp",))
    split(experts, "up", 2)
    split(experts, "down", 1)

    def step(batch: Any) -> Tensor:
        x = model.embed(batch["ids"])
        share, which = experts.routed(x)
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        local = whole.to_local(grad_placements=grad_placements)
        y = Summed.apply(experts.mixed(local, Copied.apply(share), which))
        value = loss(model.head(y), batch)
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same")


# as it was written: the gradient is taken for the whole one; mended: the gradient is a pending sum
wrong, right = pair(_program, None, [Partial()])
