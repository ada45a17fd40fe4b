"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (2): whole logits are taken for a part of them.

`GPTModel` with `parallel_output=False` gathers the scores, and its loss sums over ranks again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from schedlang import TrainingProgram
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT, example

NAMED = r"loss .*the right value plus log\(ranks\) = log\(2\)"
RANKS = 2
_ORIGINAL = example("original")
model, batch, loss = _ORIGINAL.model, _ORIGINAL.batch, _ORIGINAL.loss

__all__ = ["PACKAGE", "WITH", "WITHOUT"]


def program(model: Any) -> TrainingProgram:
    """The example's program, which passes, but for that."""
    right = example("megatron_tp")
    right.GPTModel = partial(right.GPTModel, parallel_output=False)
    made: TrainingProgram = right.program(model)
    return made
