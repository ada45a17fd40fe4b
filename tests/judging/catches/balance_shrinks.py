"""https://github.com/NVIDIA/Megatron-LM/pull/3769: the balance of experts shrinks with ranks.

Expert use is counted over all ranks, and the mean of router shares divides this rank's sum by the
tokens of all ranks.  Averaging gradients over ranks then divides once more.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.collectives import average_grads, gather_all, local_part, world_size
from tests.judging.catches.language_model import WIDTH, LanguageModel, program_pair
from tests.judging.catches.language_model import loss as of_words
from tests.judging.catches.moe import EXPERTS, Experts

NAMED = r"inner\.router\.weight.*1/ranks = 1/2 times the right value"


class Balanced(nn.Module):
    """A language model with experts, and a router whose shares are returned beside the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.words = LanguageModel(Experts())
        self.inner = nn.ModuleDict({"router": nn.Linear(WIDTH, EXPERTS, bias=False)})

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores, and shares of a router that only the balance trains."""
        return self.words(ids), self.inner["router"](self.words.embed(ids).detach()).softmax(-1)


def model() -> nn.Module:
    """Return the model with all rows on one rank."""
    return Balanced()


def balance(shares: Tensor, all_shares: Tensor) -> Tensor:
    """Return the balance loss of top-1 counts and mean shares over the tokens of all ranks."""
    top_share = F.one_hot(all_shares.argmax(-1), EXPERTS).flatten(0, -2).double().mean(0)
    return EXPERTS * (top_share * shares.flatten(0, -2).sum(0) / all_shares[..., 0].numel()).sum()


def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the token loss plus a tenth of the balance."""
    scores, shares = output
    return of_words(scores, batch) + balance(shares, shares) / 10


def _program(model: Any, scaled: bool) -> TrainingProgram:
    def step(batch: Any) -> Tensor:
        local = {name: local_part(rows) for name, rows in batch.items()}
        scores, shares = model(local["ids"])
        balance_loss = balance(shares, gather_all(shares.detach()))
        value = of_words(scores, local) + balance_loss * (world_size() if scaled else 1) / 10
        value.backward()
        average_grads(model)
        return value

    return TrainingProgram(model, step)


# bug: the balance as it is; fixed: the balance times the ranks, by which the average
# divides
wrong, right = program_pair(_program, False, True)
