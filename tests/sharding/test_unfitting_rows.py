"""Rows that do not match the modules around them: legal cases run, and helps of refusals work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.passes.autoshard.propose import propose
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan, refusal_text


class Attention(nn.Module):
    """Attention with the number of heads as an attribute."""

    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (part(x) for part in (self.q, self.k, self.v))
        size = k.shape[-1] // self.heads
        q, k, v = (t.view(rows, length, self.heads, size).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        output: Tensor = self.o(mixed.reshape(rows, length, self.heads * size))
        return output


class Twice(nn.Module):
    """Two attentions of one class, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.near, self.far = Attention(), Attention()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.far(x + self.near(x)).square().mean()


@pytest.mark.parametrize("gathered, split", [("near", "far"), ("far", "near")])
def test_one_attention_gathers_where_another_is_split(
    gathered: str, split: str, threads: Threads
) -> None:
    """The number of heads is divided only in the attention whose heads are split."""
    rows = f"""{gathered}.{{q,k,v}}  shard(col, output=R, over=tp)
{gathered}.o  shard(row, over=tp)
{split}.{{q,k,v}}  shard(col, over=tp)
{split}.o  shard(row, over=tp)"""
    batches = [
        {"x": torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(k))}
        for k in range(2)
    ]
    assert_proven(threads, make_plan(Twice(), rows, "tp=2"), batches)


class Convolved(nn.Module):
    """A convolution, a norm of groups, and a mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.enter(x)).square().mean()


PICTURES = {"x": torch.zeros(4, 3, 6, 6, dtype=torch.float64)}


def test_all_parameters_of_a_norm_stand_in_one_help() -> None:
    """The offered row for a norm shards its weight and its bias."""
    message = refusal_text(Convolved(), "block.0  shard(col, over=tp)", "tp=2", PICTURES)
    assert "`block.1 shard(weight=S(0), bias=S(0), over=tp)`" in " ".join(message.split())
    assert "block.1  shard(bias=S(0), over=tp)" not in message


def test_a_block_that_is_given_parts() -> None:
    """If the row itself splits the module's input, the help is to drop `input=`."""
    message = refusal_text(Convolved(), "block  shard(input=S(1), over=tp)", "tp=2", PICTURES)
    assert "`block.0` needs the full tensor" in message
    assert "drop `input=` of this row" in message and "output=R" not in message


def test_what_is_gathered_already_is_not_offered_again() -> None:
    """`output=R` is not offered for a row that has it."""
    rows = "block  shard(output=R, over=tp)\nblock.0  shard(weight=S(0), bias=S(0), over=tp)"
    message = refusal_text(Convolved(), rows, "tp=2", PICTURES)
    assert "S405" in message and message.count("output=R") <= 1, message


class Sequence(nn.Module):
    """A recurrence, or an attention with padding: modules that check shapes in Python."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.enter, self.kind = nn.Linear(8, 8), kind
        recurrent = nn.GRU(8, 8, batch_first=True)
        self.mix = recurrent if kind == "gru" else nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        h = self.enter(x)
        if self.kind == "gru":
            return self.mix(h)[0].square().mean()
        return self.mix(h, h, h, key_padding_mask=pad, need_weights=False)[0].square().mean()


@pytest.mark.parametrize(
    "kind, rows, said",
    [
        ("gru", "enter  shard(col, over=tp)", "`mix` needs the full tensor"),
        ("attention", "enter  shard(row, output=S(seq), over=tp)", "`mix` needs the full tensor"),
    ],
)
def test_checks_that_modules_make_themselves(kind: str, rows: str, said: str) -> None:
    """Shape errors that modules raise in Python on shards are refused as a mismatch of the row."""
    batch = {"x": torch.randn(4, 6, 8), "pad": torch.zeros(4, 6, dtype=torch.bool)}
    refusal = refusal_text(Sequence(kind), rows, "tp=2", batch)
    assert "S405" in refusal and said in refusal


def test_operators_that_torch_has_for_values_alone() -> None:
    """A loss without a meta backward does not prevent a proposal."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    batch = {"input": torch.randn(4, 8), "y": torch.tensor([0, 1, 2, 3])}
    loss = lambda output, batch: F.multi_margin_loss(output, batch["y"])  # noqa: E731
    assert "shard(row, over=tp)" in propose(model, batch, {"tp": 2}, loss).text
