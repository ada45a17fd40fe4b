"""https://github.com/NVIDIA/Megatron-LM/pull/3769: the balance of experts shrinks with ranks.

How often experts are met is counted over all ranks, and the mean of a router's shares is taken over
the words of all, but of this rank's words alone.  The average over ranks divides it once more.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.moe import EXPERTS, Experts
from tests.judging.catches.parts import average, everyone, own, ranks
from tests.judging.catches.words import WIDTH, Words, pair
from tests.judging.catches.words import loss as of_words

NAMED = r"inner\.router\.weight.*1/ranks = 1/2 times the right value"


class Balanced(nn.Module):
    """Words with experts, and the router's shares beside the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words(Experts())
        self.inner = nn.ModuleDict({"router": nn.Linear(WIDTH, EXPERTS, bias=False)})

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and shares of a router that only the balance trains."""
        return self.words(ids), self.inner["router"](self.words.embed(ids).detach()).softmax(-1)


def model() -> nn.Module:
    """All rows on one rank."""
    return Balanced()


def balance(shares: Tensor, of_all: Tensor) -> Tensor:
    """The balance by how often an expert is first, and the mean share over the words of all."""
    first = F.one_hot(of_all.argmax(-1), EXPERTS).flatten(0, -2).double().mean(0)
    return EXPERTS * (first * shares.flatten(0, -2).sum(0) / of_all[..., 0].numel()).sum()


def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """How badly words are predicted, and a tenth of the balance."""
    scores, shares = output
    return of_words(scores, batch) + balance(shares, shares) / 10


def _program(model: Any, times: bool) -> TrainingProgram:
    def step(batch: Any) -> Tensor:
        mine = {name: own(rows) for name, rows in batch.items()}
        scores, shares = model(mine["ids"])
        part = balance(shares, everyone(shares.detach()))
        value = of_words(scores, mine) + part * (ranks() if times else 1) / 10
        value.backward()
        average(model)
        return value

    return TrainingProgram(model, step)


# as it was written: the balance as it is; mended: the balance times the ranks, by which the average
# divides
wrong, right = pair(_program, False, True)
