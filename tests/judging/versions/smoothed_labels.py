"""https://github.com/huggingface/transformers/issues/46731: gradients grow with accumulation.

The smoother of labels ignores the count of the batch and gives the mean of its micro-batch, which
nobody divides by the number of micro-batches.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from schedlang import TrainingProgram
from tests.judging.versions.trainer import even_batch as batch
from tests.judging.versions.trainer import model, trainer_program

PACKAGE, WITH, WITHOUT = (
    "transformers",
    ("4.46.0", "4.46.3", "5.12.1"),
    ("5.20.0", "5.23.0", "5.24.0"),
)
NAMED = r"2 times the right value everywhere"
RANKS = 1

__all__ = ["batch", "model"]


def loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the label-smoothed mean over all tokens except the first of each row."""
    scores, labels = output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return F.cross_entropy(scores, labels, label_smoothing=0.1)


def program(model: Any) -> TrainingProgram:
    """One rank, two micro-batches."""
    return trainer_program(model, accumulated=2, label_smoothing_factor=0.1)
