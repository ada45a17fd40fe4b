"""https://github.com/modelscope/ms-swift/pull/10084: the last steps of an epoch are too small.

The last step has fewer micro-batches, but their losses are divided by the configured number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.collectives import average_grads, local_part
from tests.judging.catches.language_model import LanguageModel, loss, program_pair

NAMED = r"1/2 times the right value everywhere"
CONFIGURED, LEFT = 4, 2


def model() -> nn.Module:
    """Return the model with all rows at once."""
    return LanguageModel(nn.Tanh())


def _program(model: Any, count: int) -> TrainingProgram:
    def step(batch: Any) -> Tensor:
        value = torch.zeros(())
        for rows in local_part(batch["ids"]).chunk(LEFT):
            micro_loss = loss(model(rows), {"ids": rows}) / count
            micro_loss.backward()
            value = value + micro_loss.detach()
        average_grads(model)
        return value

    return TrainingProgram(model, step)


# bug: as many as are configured; fixed: as many as there are
wrong, right = program_pair(_program, CONFIGURED, LEFT)
