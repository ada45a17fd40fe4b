"""The smallest language model, its batches and its loss: an original for several of the bugs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.parts import own, total

VOCAB, WIDTH = 12, 8


class Words(nn.Module):
    """An embedding, something between, and a head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.inner = inner
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next word at each place."""
        return self.head(self.inner(self.embed(ids)))


def batch(seed: int) -> dict[str, Tensor]:
    """Four rows of six words."""
    return {"ids": torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(seed))}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all words that have one before them."""
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


def original(catch: Any) -> dict[str, Any]:
    """The model, batches and loss of a bug: its own, or these."""
    made = {"batch": batch, "loss": loss} | vars(catch)
    return {"model": catch.model(), "batch": made["batch"], "loss": made["loss"]}


def pair(program: Any, wrong: Any, right: Any) -> tuple[Any, Any]:
    """The same program with a bug and without, as an argument says."""
    return lambda model: program(model, wrong), lambda model: program(model, right)


def in_words(model: Any) -> TrainingProgram:
    """Train on words in parts: losses are divided by the count of all, and gradients summed."""

    def step(batch: Any) -> Tensor:
        ids = batch["ids"]
        wanted = own(F.pad(ids[:, 1:], (0, 1), value=-100), 1)
        scores = model(own(ids, 1)).reshape(-1, VOCAB)
        value = F.cross_entropy(scores, wanted.flatten(), reduction="sum") / ids[:, 1:].numel()
        value.backward()
        for p in model.parameters():
            p.grad = total(p.grad)
        return value

    return TrainingProgram(model, step, world_loss="sum")
