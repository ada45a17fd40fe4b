"""https://github.com/NVIDIA-NeMo/Automodel/pull/3853: all tokens have the weight of the first.

A cross-entropy over a split vocabulary gives the loss of each token, and its backward scales all by
what comes back to the first of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.collectives import CopyToSplit, shard_param, vocab_log_sum
from tests.judging.catches.language_model import LanguageModel, program_pair

NAMED = r"the loss: the gradient that it sends back to `head` is not right"


def model() -> nn.Module:
    """Return the model with the full vocabulary."""
    return LanguageModel(nn.Tanh())


def weights(like: Tensor) -> Tensor:
    """Return weights that grow with the position."""
    return torch.arange(1.0, like.shape[1] + 1).expand_as(like).to(like.dtype)


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean of weighted token losses."""
    targets = batch["ids"][:, 1:]
    losses = F.cross_entropy(output[:, :-1].mT, targets, reduction="none")
    return (losses * weights(losses)).mean()


class FirstGradForAll(torch.autograd.Function):
    """Wrong: backward gives all tokens the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor) -> Tensor:
        """Return a copy."""
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Repeat the first gradient."""
        return grad.reshape(-1)[:1].expand(grad.numel()).reshape(grad.shape)


def _program(model: Any, first_only: bool) -> TrainingProgram:
    shard_param(model.head, "weight")

    def step(batch: Any) -> Tensor:
        ids = batch["ids"]
        scores = model.head(CopyToSplit.apply(model.inner(model.embed(ids))))
        log_sum, picked = vocab_log_sum(scores[:, :-1], ids[:, 1:])
        losses = log_sum - picked
        value = ((FirstGradForAll.apply(losses) if first_only else losses) * weights(losses)).mean()
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same")


# bug: the weight of the first; fixed: each its own
wrong, right = program_pair(_program, True, False)
