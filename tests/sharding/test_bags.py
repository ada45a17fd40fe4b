"""Sharded embedding bags, by rows and by columns: sums, means, weights, offsets, padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.runtime.launch.pool import Pool
from tests.engine.threads import Threads
from tests.proofs import (
    assert_near,
    assert_proven,
    make_plan,
    refusal_text,
    train_on_ranks,
    train_sequential,
)

RAGGED = [0, 2, 2, 7]  # the second bag is empty


class Net(nn.Module):
    """Bags of twelve entries, looked up as the options say, before a linear layer."""

    def __init__(
        self, rows: int = 10, scaled: bool = False, ragged: bool = False, **options: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(rows, 6, **options)
        self.scales = nn.Linear(3, 3) if scaled else None
        last = [12] if options.get("include_last_offset") else []
        self.register_buffer("offsets", torch.tensor(RAGGED + last) if ragged else None)
        self.head = nn.Linear(6, 2)
        self.double()

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        scales = self.scales(weights).sigmoid() if self.scales is not None else None
        if self.offsets is not None:
            ids, scales = ids.flatten(), scales.flatten() if scales is not None else None
        bags = self.bag(ids, self.offsets, per_sample_weights=scales)
        return self.head(torch.tanh(bags)).square().mean()


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "ids": torch.randint(10, (4, 3), generator=generator),
            "weights": torch.randn(4, 3, generator=generator).double(),
        }
        for _ in range(3)
    ]


CASES: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "weights": {"mode": "sum", "scaled": True},
    "padding": {"mode": "mean", "padding_idx": 7},
    "weights and padding": {"mode": "sum", "scaled": True, "padding_idx": 2},
    "offsets": {"mode": "mean", "ragged": True},
    "last offset": {"mode": "sum", "ragged": True, "include_last_offset": True, "scaled": True},
    "offsets and padding": {"mode": "mean", "ragged": True, "padding_idx": 0},
}


@pytest.mark.parametrize("style", ["vocab", "row", "col"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_whole_table(threads: Threads, case: str, style: str) -> None:
    """Losses, gradients (also of per-sample weights) and steps equal those of the full table."""
    net = Net(**CASES[case])
    second_row = "\nhead  shard(row, over=tp)" if style == "col" else ""
    plan = make_plan(net, f"bag  shard({style}, over=tp){second_row}", "tp=2")
    observed = train_on_ranks(threads, plan, batches())
    assert_near(observed, train_sequential(net, batches()))


def test_the_largest_of_a_bag(threads: Threads) -> None:
    """`max` bags can be split by columns; a split by rows is refused."""
    net = Net(mode="max")
    plan = make_plan(net, "bag  shard(col, output=R, over=tp)", "tp=2")
    observed = train_on_ranks(threads, plan, batches())
    assert_near(observed, train_sequential(net, batches()))
    message = refusal_text(net, "bag  shard(vocab, over=tp)", "tp=2")
    assert "S404" in message and "`bag shard(col, over=tp)`" in message


@pytest.mark.parametrize("row", ["pad(vocab, multiple=4)", ""])
def test_rows_that_do_not_divide(threads: Threads, row: str) -> None:
    """A table of 11 rows is split over 4 ranks, padded by a `pad` row or by `uneven`."""
    net = Net(rows=11, mode="mean")
    uneven = "" if row else ", uneven=pad"
    rows = f"bag  {row}\n" * bool(row) + f"bag  shard(vocab, over=tp{uneven})"
    plan = make_plan(net, rows, "tp=4")
    observed = train_on_ranks(threads, plan, batches())
    assert_near(observed, train_sequential(net, batches()))


def test_proven_beside_data_parallelism(pool: Pool) -> None:
    """The proof holds with the batch split over another axis, and with partial sums."""
    net = Net(mode="sum", scaled=True)
    rows = "bag  shard(vocab, over=tp)\nhead  shard(col, output=R, over=tp)\nzero(stage=1, over=dp)"
    assert_proven(pool, make_plan(net, rows, "dp=2, tp=2"), batches())


@pytest.mark.parametrize("kind", [nn.EmbeddingBag, nn.Embedding])
def test_gradients_by_frequency_are_refused(kind: type[nn.Module]) -> None:
    """`scale_grad_by_freq` would count occurrences on each rank separately: refused."""
    net = nn.Sequential(kind(4, 2, scale_grad_by_freq=True))
    assert "scale_grad_by_freq" in refusal_text(net, "`0`  shard(vocab, over=tp)", "tp=2")


def test_columns_of_an_embedding(threads: Threads) -> None:
    """`col` of an embedding splits the columns of its table."""
    net = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 4)).double()
    plan = make_plan(net, "`0`  shard(col, over=tp)\n`1`  shard(row, over=tp)", "tp=2")
    inputs = [{"input": batch["ids"]} for batch in batches()]
    options = {"loss": squared_loss}
    observed = train_on_ranks(threads, plan, inputs, **options)
    assert_near(observed, train_sequential(net, inputs, loss=squared_loss))


def squared_loss(output: Tensor, batch: Any) -> Tensor:
    """A loss of the output alone."""
    return output.square().mean()
