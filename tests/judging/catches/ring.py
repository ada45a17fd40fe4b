"""Ring attention with a backward of its own: keys and values go around, and gradients with them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.parts import everyone, ranks
from tests.judging.catches.words import WIDTH, Words, in_words


def turned(x: Tensor) -> Tensor:
    """What the rank before has."""
    return everyone(x[None])[dist.get_rank() - 1]


class Ring(torch.autograd.Function):
    """Attend to the words of all ranks, those of one after the other.

    stale  backward takes this rank's own keys and values in each turn
    alone  backward takes the softmax of each turn by itself
    kept   gradients of keys and values stay where they are made
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, wrong: str) -> Tensor:
        """The sum of what turns give, by how much of the softmax each has."""
        sizes, outputs = [], []
        for _ in range(ranks()):
            scores = q @ k.mT
            sizes.append(scores.logsumexp(-1, keepdim=True))
            outputs.append(scores.softmax(-1) @ v)
            k, v = turned(k), turned(v)
        size = torch.cat(sizes, -1).logsumexp(-1, keepdim=True)
        out = sum(o * (s - size).exp() for o, s in zip(outputs, sizes))
        assert isinstance(out, Tensor)
        ctx.save_for_backward(q, k, v, out, size)
        ctx.wrong = wrong
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Each turn's part; those of keys and values come home with them."""
        q, k, v, out, size = ctx.saved_tensors
        of_q, of_k, of_v = (torch.zeros_like(one) for one in (q, k, v))
        own = k, v
        for _ in range(ranks()):
            keys, values = own if ctx.wrong == "stale" else (k, v)
            scores = q @ keys.mT
            share = (scores - size).exp()
            given = (grad * out).sum(-1, keepdim=True)
            if ctx.wrong == "alone":
                given = (grad * (scores.softmax(-1) @ values)).sum(-1, keepdim=True)
            of_scores = share * (grad @ values.mT - given)
            of_q += of_scores @ keys
            of_k += of_scores.mT @ q
            of_v += share.mT @ grad
            k, v = turned(k), turned(v)
            if ctx.wrong != "kept":
                of_k, of_v = turned(of_k), turned(of_v)
        return of_q, of_k, of_v, None


class Attention(nn.Module):
    """One head that sees all words."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.around: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all, here or around the ring."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.around is None:
            return x + (q @ k.mT).softmax(-1) @ v
        return x + Ring.apply(q, k, v, self.around)


def model() -> nn.Module:
    """All words on one rank."""
    return Words(Attention())


def program(model: Any, wrong: str) -> TrainingProgram:
    """Words in two."""
    model.inner.around = wrong
    return in_words(model)
