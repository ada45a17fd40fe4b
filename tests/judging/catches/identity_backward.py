"""https://github.com/pytorch/pytorch/issues/190746: a log-softmax without its gradient.

Inside `loss_parallel` torch takes every backward of `log_softmax` for that of its cross-entropy,
which has done it already.  What else uses one, here a penalty, sends its gradient back as it is.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

from schedlang import TrainingProgram
from tests.judging.catches.language_model import LanguageModel, program_pair

NAMED = r"the loss: .*`log_softmax` .* sends back what it is sent: its derivative is left out"


def model() -> nn.Module:
    """Return the model with the full vocabulary."""
    return LanguageModel(nn.Tanh())


def penalty(scores: Tensor) -> Tensor:
    """Return how far the scores are from uniform."""
    return -scores.log_softmax(-1).mean()


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all tokens that have one before them, and a penalty."""
    scores = output[:, :-1].flatten(0, 1)
    return F.cross_entropy(scores, batch["ids"][:, 1:].flatten()) + penalty(scores)


def _program(model: Any, inside: bool) -> TrainingProgram:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"head": style})

    def step(batch: Any) -> Tensor:
        ids = batch["ids"]
        scores = model(ids)[:, :-1].flatten(0, 1)
        with loss_parallel():
            value = F.cross_entropy(scores, ids[:, 1:].flatten())
            if inside:
                value = value + penalty(scores)
            value.backward(retain_graph=True)
        if not inside:
            penalty_loss = penalty(scores.redistribute(placements=[Replicate()]))
            penalty_loss.backward()
            value = value.detach() + penalty_loss.detach()
        return value.full_tensor()

    return TrainingProgram(model, step, world_loss="same")


# bug: the penalty inside; fixed: the penalty outside, of whole scores
wrong, right = program_pair(_program, True, False)
