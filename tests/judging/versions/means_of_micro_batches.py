"""https://github.com/huggingface/transformers/pull/34191: the mean of means.

Every micro-batch has the mean over its own labels, and the trainer averages the means: those with
few labels weigh as all do.  Mended in 4.46.0 for one rank.
"""

from __future__ import annotations

from typing import Any

from schedlang import TrainingProgram
from tests.judging.versions.trainer import model, trainer_program
from tests.judging.versions.trainer import ragged_batch as batch

PACKAGE, WITH, WITHOUT = (
    "transformers",
    ("4.45.2",),
    ("4.46.0", "4.46.3", "5.12.1", "5.20.0", "5.23.0", "5.24.0"),
)
NAMED = r"gradients +12 of 12 .*the plain mean of what 2 parts"
RANKS, loss = 1, None

__all__ = ["batch", "model"]


def program(model: Any) -> TrainingProgram:
    """One rank, two micro-batches."""
    return trainer_program(model, accumulated=2)
