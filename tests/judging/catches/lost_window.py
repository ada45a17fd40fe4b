"""https://github.com/huggingface/accelerate/pull/4177: a sliding window becomes full attention.

Context parallelism drops a layer's mask, and attends causally.  A layer with a stricter mask
attends to more than it should.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.collectives import GatherTokens
from tests.judging.catches.language_model import WIDTH, LanguageModel, program_pair, token_parallel

NAMED = r"the output of `inner`: .*depends on .* original's does not: a mask lets through too much"
WINDOW = 2


class Attention(nn.Module):
    """One head with a sliding window."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.split, self.window = False, WINDOW

    def forward(self, x: Tensor) -> Tensor:
        """Attend to the previous tokens within the window."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.split:
            k, v = GatherTokens.apply(k), GatherTokens.apply(v)
        first = q.shape[1] * dist.get_rank() if self.split else 0
        distance = first + torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
        scores = (q @ k.mT).masked_fill((distance < 0) | (distance >= self.window), float("-inf"))
        return x + scores.softmax(-1) @ v


def model() -> nn.Module:
    """Return the model with all tokens on one rank."""
    return LanguageModel(Attention())


def _program(model: Any, window: int) -> TrainingProgram:
    model.inner.split, model.inner.window = True, window
    return token_parallel(model)


# bug: causal is all that is left of the mask; fixed: the window stays
wrong, right = program_pair(_program, 1000, WINDOW)
