"""https://github.com/huggingface/transformers/issues/34242: each rank counts its own labels.

The mean is over what this rank has in its micro-batches, and DistributedDataParallel averages over
ranks, which have fewer or more.  Mended by an option of 4.47.0, which became the default in 5.0.0.
"""

from __future__ import annotations

from typing import Any

from schedlang import TrainingProgram
from tests.judging.versions.trainer import model, trainer_program
from tests.judging.versions.trainer import ragged_batch as batch

PACKAGE, WITH, WITHOUT = (
    "transformers",
    ("4.46.0", "4.46.3"),
    ("5.12.1", "5.20.0", "5.23.0", "5.24.0"),
)
NAMED = r"the plain mean of .*2 parts"
RANKS, loss = 2, None

__all__ = ["batch", "model"]


def program(model: Any) -> TrainingProgram:
    """Two ranks, two micro-batches."""
    return trainer_program(model, accumulated=2)
