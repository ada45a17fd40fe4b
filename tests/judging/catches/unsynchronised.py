"""https://github.com/huggingface/accelerate/pull/1726: gradients of ranks are never averaged.

DistributedDataParallel decides in its forward whether the next backward averages.  Where the
forward of the last micro-batch is inside `no_sync`, too, a backward outside of it averages nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram
from tests.judging.catches.parts import own
from tests.judging.catches.words import Words, loss, pair

NAMED = r"ranks differ and their mean is right"
STEPS = 2


def model() -> nn.Module:
    """All rows at once."""
    return Words(nn.Tanh())


def _program(model: Any, last_is_outside: bool) -> TrainingProgram:
    replica = DistributedDataParallel(model)

    def step(batch: Any) -> float:
        found = 0.0
        for at, ids in enumerate(own(batch["ids"]).chunk(STEPS)):
            outside = last_is_outside and at == STEPS - 1
            with nullcontext() if outside else replica.no_sync():
                value = loss(replica(ids), {"ids": ids}) / STEPS
            value.backward()
            found += float(value)
        return found

    return TrainingProgram(replica, step)


# as it was written: every forward is inside; mended: the last forward is outside
wrong, right = pair(_program, False, True)
