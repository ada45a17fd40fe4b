"""https://github.com/huggingface/transformers/pull/46204: words that nobody predicts count.

The trainer counts the labels of all words, the model's loss those of all but the first of each row:
gradients are smaller than they are without accumulation, by as much as rows are short.
"""

from __future__ import annotations

from typing import Any

from schedlang import TrainingProgram
from tests.judging.versions.trainer import even as batch
from tests.judging.versions.trainer import model, trained

PACKAGE, WITH, WITHOUT = (
    "transformers",
    ("4.46.3",),
    ("4.45.2", "4.46.0", "5.12.1", "5.20.0", "5.23.0", "5.24.0"),
)
NAMED = r"0\.9 times the right value everywhere"
RANKS, loss = 1, None

__all__ = ["batch", "model"]


def program(model: Any) -> TrainingProgram:
    """One rank, two micro-batches of rows of ten words, of which nine are predicted."""
    return trained(model, accumulated=2)
