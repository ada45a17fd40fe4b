"""https://github.com/huggingface/accelerate/pull/1726: gradients of ranks are never averaged.

DistributedDataParallel decides in forward whether the next backward averages.  If the forward of
the last micro-batch is inside `no_sync`, a backward outside of it averages nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram
from tests.judging.catches.collectives import local_part
from tests.judging.catches.language_model import LanguageModel, loss, program_pair

NAMED = r"ranks differ and their mean is right"
STEPS = 2


def model() -> nn.Module:
    """Return the model with all rows at once."""
    return LanguageModel(nn.Tanh())


def _program(model: Any, last_is_outside: bool) -> TrainingProgram:
    replica = DistributedDataParallel(model)

    def step(batch: Any) -> float:
        loss_sum = 0.0
        for k, ids in enumerate(local_part(batch["ids"]).chunk(STEPS)):
            outside = last_is_outside and k == STEPS - 1
            with nullcontext() if outside else replica.no_sync():
                value = loss(replica(ids), {"ids": ids}) / STEPS
            value.backward()
            loss_sum += float(value)
        return loss_sum

    return TrainingProgram(replica, step)


# bug: every forward is inside; fixed: the last forward is outside
wrong, right = program_pair(_program, False, True)
