"""https://github.com/huggingface/diffusers/issues/14265: a ring derives its first turn only.

Forward keys and values go around. Backward they go around, too, but what derives a turn reads those
that were saved in the first one: the rank's own.
"""

from __future__ import annotations

from typing import Any

from schedlang import TrainingProgram
from tests.judging.catches.ring import model, program
from tests.judging.catches.words import batch, loss

NAMED = r"the gradient of the output of `inner\.(key|query|value)`: .*right before it: `inner`"

__all__ = ["batch", "loss", "model"]


def wrong(model: Any) -> TrainingProgram:
    """The rank's own keys and values."""
    return program(model, "stale")


def right(model: Any) -> TrainingProgram:
    """Those of the turn."""
    return program(model, "")
