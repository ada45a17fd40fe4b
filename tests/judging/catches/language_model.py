"""The smallest language model, its batches and its loss: the original of several bugs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.collectives import local_part, rank_sum

VOCAB, WIDTH = 12, 8


class LanguageModel(nn.Module):
    """An embedding, an inner module, and a head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.inner = inner
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return scores of the next token at each position."""
        return self.head(self.inner(self.embed(ids)))


def batch(seed: int) -> dict[str, Tensor]:
    """Return four rows of six tokens."""
    return {"ids": torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(seed))}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over all tokens except the first of each row."""
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


def original(catch: Any) -> dict[str, Any]:
    """Return the model, batches and loss of a bug: its own, or the defaults of this module."""
    names = {"batch": batch, "loss": loss} | vars(catch)
    return {"model": catch.model(), "batch": names["batch"], "loss": names["loss"]}


def program_pair(program: Any, wrong: Any, right: Any) -> tuple[Any, Any]:
    """Return a program with a bug and without it, chosen by its argument."""
    return lambda model: program(model, wrong), lambda model: program(model, right)


def token_parallel(model: Any) -> TrainingProgram:
    """Return a program that splits tokens: losses over the full count, gradients summed."""

    def step(batch: Any) -> Tensor:
        ids = batch["ids"]
        targets = local_part(F.pad(ids[:, 1:], (0, 1), value=-100), 1)
        scores = model(local_part(ids, 1)).reshape(-1, VOCAB)
        value = F.cross_entropy(scores, targets.flatten(), reduction="sum") / ids[:, 1:].numel()
        value.backward()
        for p in model.parameters():
            p.grad = rank_sum(p.grad)
        return value

    return TrainingProgram(model, step, world_loss="sum")
