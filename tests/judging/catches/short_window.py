"""https://github.com/modelscope/ms-swift/pull/10084: the last steps of an epoch are too small.

There are fewer micro-batches than are accumulated otherwise, and their losses are divided by the
count that is configured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.parts import average, own
from tests.judging.catches.words import Words, loss, pair

NAMED = r"1/2 times the right value everywhere"
CONFIGURED, LEFT = 4, 2


def model() -> nn.Module:
    """All rows at once."""
    return Words(nn.Tanh())


def _program(model: Any, count: int) -> TrainingProgram:
    def step(batch: Any) -> Tensor:
        value = torch.zeros(())
        for rows in own(batch["ids"]).chunk(LEFT):
            one = loss(model(rows), {"ids": rows}) / count
            one.backward()
            value = value + one.detach()
        average(model)
        return value

    return TrainingProgram(model, step)


# as it was written: as many as are configured; mended: as many as there are
wrong, right = pair(_program, CONFIGURED, LEFT)
