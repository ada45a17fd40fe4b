"""https://github.com/huggingface/transformers/issues/46731: gradients grow with accumulation.

The label smoother ignores `num_items_in_batch` and gives the mean of its micro-batch; the
trainer, which believes that it was counted, does not divide by the number of micro-batches.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram
from tests.judging.catches.parts import own
from tests.judging.catches.words import Words, loss, pair

NAMED = r"gradients +2 of 2 .*: microbatches = 2 times the right value everywhere"
STEPS = 2


def model() -> nn.Module:
    """All rows at once."""
    return Words(nn.Tanh())


def _program(model: Any, divided: bool) -> TrainingProgram:
    replica = DistributedDataParallel(model)

    def step(batch: Any) -> float:
        found = 0.0
        for ids in own(batch["ids"]).chunk(STEPS):
            value = loss(replica(ids), {"ids": ids})
            value = value / STEPS if divided else value
            value.backward()
            found += float(value)
        return found

    return TrainingProgram(replica, step)


# as it was written: means are added; mended: means are averaged
wrong, right = pair(_program, False, True)
