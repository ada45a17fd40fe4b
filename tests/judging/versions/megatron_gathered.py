"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (2): whole logits are taken for a part of them.

`GPTModel` with `parallel_output=False` gathers the scores, and its loss sums over ranks again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from schedlang import TrainingProgram
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT, load_example

NAMED = r"loss .*the right value plus log\(ranks\) = log\(2\)"
RANKS = 2
_ORIGINAL = load_example("original")
model, batch, loss = _ORIGINAL.model, _ORIGINAL.batch, _ORIGINAL.loss

__all__ = ["PACKAGE", "WITH", "WITHOUT"]


def program(model: Any) -> TrainingProgram:
    """Return the example's right program with `parallel_output=False`."""
    right_example = load_example("megatron_tp")
    right_example.GPTModel = partial(right_example.GPTModel, parallel_output=False)
    result: TrainingProgram = right_example.program(model)
    return result
