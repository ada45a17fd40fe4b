"""https://github.com/huggingface/accelerate/pull/4177: a sliding window becomes full attention.

Context parallelism drops the mask that a layer is given, and attends causally.  A layer whose mask
is stricter sees more than it should.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.parts import AllWords
from tests.judging.catches.words import WIDTH, Words, in_words, pair

NAMED = r"the output of `inner`: .*depends on .* original's does not: a mask lets through too much"
WINDOW = 2


class Attention(nn.Module):
    """One head that sees a window of words."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.split, self.window = False, WINDOW

    def forward(self, x: Tensor) -> Tensor:
        """Attend to the words before, as far as the window goes."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.split:
            k, v = AllWords.apply(k), AllWords.apply(v)
        first = q.shape[1] * dist.get_rank() if self.split else 0
        far = first + torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
        scores = (q @ k.mT).masked_fill((far < 0) | (far >= self.window), float("-inf"))
        return x + scores.softmax(-1) @ v


def model() -> nn.Module:
    """All words on one rank."""
    return Words(Attention())


def _program(model: Any, window: int) -> TrainingProgram:
    model.inner.split, model.inner.window = True, window
    return in_words(model)


# as it was written: causal is all that is left of the mask; mended: the window stays
wrong, right = pair(_program, 1000, WINDOW)
