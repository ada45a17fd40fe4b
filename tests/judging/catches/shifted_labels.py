"""https://github.com/huggingface/transformers/pull/36607: labels at the border of ranks are lost.

Under sequence parallelism each rank shifts the labels of its own words, and fills up with what
does not count: the last word of a rank, whose label lies with the next rank, learns nothing.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.parts import average, own, ranks
from tests.judging.catches.words import Words, pair

NAMED = r"right, but for places \[2\] of dim 1, which are zero \(rank 0\)"


def model() -> nn.Module:
    """All words on one rank."""
    return Words(nn.Tanh())


def _program(model: Any, first: bool) -> TrainingProgram:
    def shifted(ids: Tensor) -> Tensor:
        return F.pad(ids[:, 1:], (0, 1), value=-100)

    def step(batch: Any) -> Tensor:
        ids = batch["ids"]
        mine = own(ids, 1)
        labels = own(shifted(ids), 1) if first else shifted(mine)
        scores = model(mine).flatten(0, 1)
        summed = F.cross_entropy(scores, labels.flatten(), reduction="sum")
        value = summed / ids[:, 1:].numel() * ranks()
        value.backward()
        average(model)
        return value

    return TrainingProgram(model, step)


# as it was written: split, then shift; mended: shift, then split
wrong, right = pair(_program, False, True)
