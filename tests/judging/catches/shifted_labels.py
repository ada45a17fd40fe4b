"""https://github.com/huggingface/transformers/pull/36607: labels at the border of ranks are lost.

Under sequence parallelism each rank shifts the labels of its own tokens, and pads with ignored
labels: the last token of a rank, whose label is on the next rank, is not trained.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.collectives import average_grads, local_part, world_size
from tests.judging.catches.language_model import LanguageModel, program_pair

NAMED = r"right, but for places \[2\] of dim 1, which are zero \(rank 0\)"


def model() -> nn.Module:
    """Return the model with all tokens on one rank."""
    return LanguageModel(nn.Tanh())


def _program(model: Any, shift_first: bool) -> TrainingProgram:
    def shifted(ids: Tensor) -> Tensor:
        return F.pad(ids[:, 1:], (0, 1), value=-100)

    def step(batch: Any) -> Tensor:
        ids = batch["ids"]
        local = local_part(ids, 1)
        labels = local_part(shifted(ids), 1) if shift_first else shifted(local)
        scores = model(local).flatten(0, 1)
        summed = F.cross_entropy(scores, labels.flatten(), reduction="sum")
        value = summed / ids[:, 1:].numel() * world_size()
        value.backward()
        average_grads(model)
        return value

    return TrainingProgram(model, step)


# bug: split, then shift; fixed: shift, then split
wrong, right = program_pair(_program, False, True)
