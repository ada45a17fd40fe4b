"""https://github.com/huggingface/transformers/pull/46204: tokens that nobody predicts count.

The trainer counts the labels of all tokens, the model's loss those of all but the first of each
row: gradients are too small with accumulation, and more so for short rows.
"""

from __future__ import annotations

from typing import Any

from schedlang import TrainingProgram
from tests.judging.versions.trainer import even_batch as batch
from tests.judging.versions.trainer import model, trainer_program

PACKAGE, WITH, WITHOUT = (
    "transformers",
    ("4.46.3",),
    ("4.45.2", "4.46.0", "5.12.1", "5.20.0", "5.23.0", "5.24.0"),
)
NAMED = r"0\.9 times the right value everywhere"
RANKS, loss = 1, None

__all__ = ["batch", "model"]


def program(model: Any) -> TrainingProgram:
    """Return the program: two micro-batches of rows of ten tokens, of which nine are predicted."""
    return trainer_program(model, accumulated=2)
