"""Ring attention with its own backward: keys, values and their gradients go around the ring."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.collectives import gather_all, world_size
from tests.judging.catches.language_model import WIDTH, LanguageModel, token_parallel


def from_previous(x: Tensor) -> Tensor:
    """Return the tensor of the previous rank."""
    return gather_all(x[None])[dist.get_rank() - 1]


class Ring(torch.autograd.Function):
    """Attend to the tokens of all ranks, one rank after the other.

    stale  backward uses this rank's own keys and values in each turn
    alone  backward uses the softmax of each turn by itself
    kept   gradients of keys and values stay on the rank that computes them
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, wrong: str) -> Tensor:
        """Return the sum over turns, weighted by each turn's share of the softmax."""
        sizes, outputs = [], []
        for _ in range(world_size()):
            scores = q @ k.mT
            sizes.append(scores.logsumexp(-1, keepdim=True))
            outputs.append(scores.softmax(-1) @ v)
            k, v = from_previous(k), from_previous(v)
        size = torch.cat(sizes, -1).logsumexp(-1, keepdim=True)
        out = sum(o * (s - size).exp() for o, s in zip(outputs, sizes))
        assert isinstance(out, Tensor)
        ctx.save_for_backward(q, k, v, out, size)
        ctx.wrong = wrong
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Add each turn's gradients; those of keys and values return to their ranks."""
        q, k, v, out, size = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
        local_kv = k, v
        for _ in range(world_size()):
            keys, values = local_kv if ctx.wrong == "stale" else (k, v)
            scores = q @ keys.mT
            share = (scores - size).exp()
            delta = (grad * out).sum(-1, keepdim=True)
            if ctx.wrong == "alone":
                delta = (grad * (scores.softmax(-1) @ values)).sum(-1, keepdim=True)
            grad_scores = share * (grad @ values.mT - delta)
            grad_q += grad_scores @ keys
            grad_k += grad_scores.mT @ q
            grad_v += share.mT @ grad
            k, v = from_previous(k), from_previous(v)
            if ctx.wrong != "kept":
                grad_k, grad_v = from_previous(grad_k), from_previous(grad_v)
        return grad_q, grad_k, grad_v, None


class Attention(nn.Module):
    """One head that attends to all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.around: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all tokens, locally or around the ring."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.around is None:
            return x + (q @ k.mT).softmax(-1) @ v
        return x + Ring.apply(q, k, v, self.around)


def model() -> nn.Module:
    """Return the model with all tokens on one rank."""
    return LanguageModel(Attention())


def program(model: Any, wrong: str) -> TrainingProgram:
    """Return the program with tokens split over two ranks."""
    model.inner.around = wrong
    return token_parallel(model)
