"""https://github.com/tenstorrent/tt-metal/issues/53205: a ring derives each turn's own softmax.

What the softmax takes off is the mean over all words of what comes back; backward takes that over
the words of a turn. Values have the right gradients, queries and keys do not.
"""

from __future__ import annotations

from typing import Any

from schedlang import TrainingProgram
from tests.judging.catches.ring import model, program
from tests.judging.catches.words import batch, loss

NAMED = r"the gradient of the output of `inner\.(key|query)`: .*right before it: `inner(\.value)?`"

__all__ = ["batch", "loss", "model"]


def wrong(model: Any) -> TrainingProgram:
    """The mean of a turn."""
    return program(model, "alone")


def right(model: Any) -> TrainingProgram:
    """That of all words."""
    return program(model, "")
