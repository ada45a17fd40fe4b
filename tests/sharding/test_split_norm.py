"""Norms along a split hidden dim: the module's own forward, with statistics over all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine import Threads
from tests.proofs import (
    assert_near,
    make_plan,
    refusal_text,
    static_holds,
    train_on_ranks,
    train_sequential,
)
from tests.sharding.test_grid import points


class Gemma(nn.Module):
    """Gemma's norm: 1 + weight, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        x_float = x.float()
        x_float = x_float * torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x_float * (1.0 + self.weight.float())).type_as(x)


class Plain(nn.Module):
    """A norm from mean, std, var and norm, with a scale by the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / torch.std(x, -1, keepdim=True)
        x = x + x.var(-1, unbiased=False, keepdim=True) * x.shape[-1] ** -0.5
        return self.weight * x / x.norm(dim=-1, keepdim=True) + (x * x).sum(-1, keepdim=True)


class Unit(nn.Module):
    """Vectors of length one, by functions of torch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return self.weight * F.normalize(x, dim=-1) + x / (x.size(-1) * length)


class Normed(nn.Module):
    """A norm between a column-split and a row-split layer."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(5, 8), norm, nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.down(self.norm(self.up(x)))
        return {"loss": F.cross_entropy(logits, labels), "out": logits}


AROUND = "up  shard(col, over=c)\n{}\ndown  shard(row, over=c)"
NORMS = {
    "layer": lambda: nn.LayerNorm(8, eps=1e-3),
    "rms": lambda: nn.RMSNorm(8),
    "gemma": lambda: Gemma(8),
    "plain": lambda: Plain(8),
    "unit": lambda: Unit(8),
}


def build_normed(name: str) -> nn.Module:
    """A model with one of the norms, with random parameters."""
    torch.manual_seed(1)
    model = Normed(NORMS[name]()).double()
    for parameter in model.norm.parameters():
        nn.init.normal_(parameter, 1.0, 0.5)
    return model


@pytest.mark.parametrize("name", list(NORMS))
def test_norms_take_their_statistics_over_all_parts(threads: Threads, name: str) -> None:
    """Norms of any form along a split hidden dim equal the original; each rank has its part of
    the gradients of weights."""
    tensors = "weight=S(0), bias=S(0)" if name == "layer" else "weight=S(0)"
    row = f"norm  shard({tensors}, input=S(-1), output=S(-1), over=c)"
    plan, batches = (
        make_plan(build_normed(name), AROUND.format(row), "c=2"),
        [points(0, 4), points(1, 3)],
    )
    assert_near(
        train_on_ranks(threads, plan, batches), train_sequential(build_normed(name), batches)
    )
    static_holds(plan, batches[0])


class Sorted(Gemma):
    """No norm: a cumulative sum."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.cumsum(-1)


class Turned(Gemma):
    """Returns a statistic, replicated on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).mean(-1, keepdim=True) * torch.ones(8)


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        (Sorted(8), "`cumsum` needs the full hidden dim"),
        (Turned(8), "its output is not sharded as its input"),
    ],
)
def test_what_needs_the_whole_is_refused(norm: nn.Module, said: str) -> None:
    """A module that does more along the split dim than sums and means is refused when planned."""
    model = Normed(norm).double()
    row = "norm  shard(weight=S(0), input=S(-1), output=S(-1), over=c)"
    text = refusal_text(model, AROUND.format(row), "c=2", points(0, 4))
    assert "error[S405]" in text and said in text
    assert "output=R" in text
