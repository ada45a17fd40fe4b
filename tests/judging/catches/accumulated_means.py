"""https://github.com/huggingface/transformers/issues/46731: gradients grow with accumulation.

The label smoother ignores `num_items_in_batch` and returns the mean of its micro-batch; the
trainer assumes that it was used, and does not divide by the number of micro-batches.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram
from tests.judging.catches.collectives import local_part
from tests.judging.catches.language_model import LanguageModel, loss, program_pair

NAMED = r"gradients +2 of 2 .*: microbatches = 2 times the right value everywhere"
STEPS = 2


def model() -> nn.Module:
    """Return the model with all rows at once."""
    return LanguageModel(nn.Tanh())


def _program(model: Any, divided: bool) -> TrainingProgram:
    replica = DistributedDataParallel(model)

    def step(batch: Any) -> float:
        loss_sum = 0.0
        for ids in local_part(batch["ids"]).chunk(STEPS):
            value = loss(replica(ids), {"ids": ids})
            value = value / STEPS if divided else value
            value.backward()
            loss_sum += float(value)
        return loss_sum

    return TrainingProgram(replica, step)


# bug: means are added; fixed: means are averaged
wrong, right = program_pair(_program, False, True)
