"""Statements between a column and a row split: equal on shards, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from tests.engine import Threads
from tests.proofs import make_plan, train_on_ranks

WIDTH, HIDDEN = 8, 16
ROWS = "up  shard(col, over=tp)\ndown  shard(row, over=tp)"
PARTWISE = """
h.flip(1)
h.cumsum(1)
F.softmax(h, dim=1)
F.normalize(h, 2.0, 1)
torch.fft.fft(h, dim=1).real
h.roll(1, 1)
h.unflatten(-1, (-1, 4)).sort(-1).values.flatten(-2)
h.view(*h.shape[:-1], -1, 2).flip(-1).flatten(-2)
h.renorm(2, 2, 1.0)
h.index_fill(1, torch.tensor([0]), 0.0)
h / h.shape[1]
torch.msort(h.mT).mT
"""
MIXING = """
h.roll(1, -1)
torch.roll(h, (1, 1), (1, -1))
h.flip(-1)
torch.flip(h, (0, 2))
h.flip(0, 2)
torch.rot90(h, 2, (1, 2))
h.cumsum(-1)
h.cummax(-1).values
h.cummin(dim=-1).values
h.topk(h.shape[-1], -1).values
F.normalize(h, dim=-1)
F.gumbel_softmax(h, 1.0)
torch.fft.fft(h, dim=-1).real
torch.fft.fftn(h).real
torch.tril(h)
F.channel_shuffle(h.mT.contiguous(), 4).mT
F.local_response_norm(h.mT, 3).mT
h.index_fill(-1, torch.tensor([0]), 0.0)
h.renorm(2, 0, 1.0)
h / h.shape[-1]
h * h.size(-1) ** -0.5
h.mul(h.numel())
h - h.shape[-1]
h ** (1 + h.shape[-1] / 16)
"""


class Pair(nn.Module):
    """Two layers, and a statement between them."""

    def __init__(self, statement: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.statement = statement

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = eval(self.statement, {"h": self.up(x), "F": F, "torch": torch})  # noqa: S307
        return {"loss": self.down(h).square().mean()}


def _lines(text: str) -> list[str]:
    return text.strip().split("\n")


def _batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, 4, WIDTH, generator=generator, dtype=torch.float64)}


@pytest.mark.parametrize("statement", _lines(PARTWISE))
def test_what_each_part_does_by_itself_is_equal(statement: str, threads: Threads) -> None:
    """Statements on shards give the losses and gradients of a plain torch loop."""
    model, batches = Pair(statement).double(), [_batch(0), _batch(1)]
    observed = train_on_ranks(threads, make_plan(model, ROWS, "tp=2"), batches, _sgd)
    optimizer = _sgd(model.named_parameters())
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        expected = model(**batch)["loss"]
        expected.backward()
        torch.testing.assert_close(
            observed[f"loss {step}"], expected.detach(), rtol=1e-9, atol=1e-12
        )
        for name, parameter in model.named_parameters():
            actual = observed[f"grad {step} {name}"]
            torch.testing.assert_close(actual, parameter.grad, rtol=1e-9, atol=1e-12)
        optimizer.step()


@pytest.mark.parametrize("statement", _lines(MIXING))
def test_what_needs_all_parts_is_refused(statement: str, threads: Threads) -> None:
    """Statements that mix shards or read the size of a shard are refused."""
    model = Pair(statement).double()
    model(**_batch(0))
    with pytest.raises(Refusal) as caught:
        train_on_ranks(threads, make_plan(model, ROWS, "tp=2"), [_batch(0)], _sgd)
    assert caught.value.diagnostic.code == "S405"


def _sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters], lr=0.1)  # type: ignore[attr-defined]
