"""https://github.com/NVIDIA-NeMo/Automodel/pull/3853: all words have the weight of the first.

A cross-entropy over a split vocabulary gives the loss of each word, and its backward scales all by
what comes back to the first of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.parts import Copied, of_vocabulary, split
from tests.judging.catches.words import Words, pair

NAMED = r"the loss: the gradient that it sends back to `head` is not right"


def model() -> nn.Module:
    """The whole vocabulary on one rank."""
    return Words(nn.Tanh())


def weights(like: Tensor) -> Tensor:
    """Later words weigh more."""
    return torch.arange(1.0, like.shape[1] + 1).expand_as(like).to(like.dtype)


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean over words of what each weighs."""
    wanted = batch["ids"][:, 1:]
    each = F.cross_entropy(output[:, :-1].mT, wanted, reduction="none")
    return (each * weights(each)).mean()


class Alike(torch.autograd.Function):
    """Backward gives all words what comes back to the first."""

    @staticmethod
    def forward(ctx: Any, each: Tensor) -> Tensor:
        """As it is."""
        return each.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """That of the first everywhere."""
        return grad.reshape(-1)[:1].expand(grad.numel()).reshape(grad.shape)


def _program(model: Any, alike: bool) -> TrainingProgram:
    split(model.head, "weight")

    def step(batch: Any) -> Tensor:
        ids = batch["ids"]
        scores = model.head(Copied.apply(model.inner(model.embed(ids))))
        log_sum, picked = of_vocabulary(scores[:, :-1], ids[:, 1:])
        each = log_sum - picked
        value = ((Alike.apply(each) if alike else each) * weights(each)).mean()
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same")


# as it was written: the weight of the first; mended: each its own
wrong, right = pair(_program, True, False)
