"""Indices and labels outside of a sharded table are refused, as the original model refuses them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from schedlang.runtime.launch.pool import Pool, RankDied
from tests.proofs import make_plan

WORDS = 30  # a table of 32 rows where it is padded


class Net(nn.Module):
    """An embedding, an MLP with a shortcut, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(ids) + self.down(torch.relu(self.up(self.embed(ids)))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(ids: int = 0, labels: int = 0) -> dict[str, Tensor]:
    """A batch with these values as first index and last label; the second label is ignored."""
    inputs = {"ids": torch.arange(8).view(2, 4), "labels": torch.arange(8).view(2, 4) + 1}
    inputs["ids"][0, 0], inputs["labels"][1, 3], inputs["labels"][0, 1] = ids, labels, -100
    return inputs


def train_on_rank(rows: str, mesh: str, wrong_batch: dict[str, Tensor]) -> None:
    """Train one valid step, then one with an invalid batch."""
    make_optimizer = partial(torch.optim.SGD, lr=0.1)
    program = build(make_plan(Net(), rows, mesh), batch(), optimizer=make_optimizer)
    assert torch.isfinite(program.train_step(batch()))
    program.train_step(wrong_batch)


MLP = "up shard(col, over=tp)\ndown shard(row, over=tp)\n"
PADDED = "embed pad(vocab, multiple=8)\nhead pad(out, multiple=8)\n"
KERNEL = "head replace_kernel(linear_cross_entropy)\n"
ROWS = {
    "split": (2, "tp=2", MLP + "embed shard(vocab, over=tp)\nhead shard(vocab, over=tp)"),
    "padded": (2, "tp=2", PADDED + "embed shard(vocab, over=tp)\nhead shard(vocab, over=tp)"),
    "kernel": (1, "", KERNEL),
    "kernel, split": (2, "tp=2", KERNEL + "head shard(vocab, over=tp)"),
    "grid": (
        4,
        "r=2, c=2",
        "{embed,up,down} grid(summa, over=(r, c))\n"
        "head grid(summa, output=S(vocab), over=(r, c))\nzero(stage=0, over=r)",
    ),
    "cube": (
        8,
        "a=2, b=2, c=2",
        PADDED + "{embed,up} grid(cube, over=(a, b, c))\ndown grid(cube, over=(a, c, b))\n"
        "head grid(cube, output=S(vocab), over=(a, b, c))\nzero(stage=0, over=a)",
    ),
}
WRONG = {
    "index": {"ids": WORDS},
    "index below": {"ids": -1},
    "label": {"labels": WORDS},
    "label below": {"labels": -1},
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("case", ROWS)
def test_what_the_model_refuses_is_refused(case: str, wrong: str, pool: Pool) -> None:
    """Invalid batches raise S653 where a table is split, otherwise torch's IndexError."""
    wrong_batch = batch(**WRONG[wrong])
    with pytest.raises(IndexError):
        Net()(**wrong_batch)
    ranks, mesh, rows = ROWS[case]
    with pytest.raises((Refusal, RankDied)) as caught:
        pool.run(train_on_rank, ranks, rows, mesh, wrong_batch)
    assert "S653" in str(caught.value) or "IndexError" in str(caught.value)


def test_what_it_says(pool: Pool) -> None:
    """The message has the number, its legal range, and what reads it."""

    def said(wrong_batch: dict[str, Tensor]) -> str:
        ranks, mesh, rows = ROWS["split"]
        program = build(make_plan(Net(), rows, mesh), batch())
        with pytest.raises(Refusal) as caught:
            program.eval_step(wrong_batch)
        return caught.value.render()

    message = pool.run(said, 2, batch(ids=31))[0]
    assert "the index 31 is outside of 0 to 29" in message
    assert "each rank has a part of the embedding's rows" in message
    message = pool.run(said, 2, batch(labels=-1))[0]
    assert "the label -1 is outside of 0 to 29" in message
    assert "give -100 (`ignore_index`) to tokens without a label" in message


class Bag(nn.Module):
    """A model with one embedding bag."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(WORDS, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids).square().mean()


def test_a_bag(pool: Pool) -> None:
    """A bag with split rows refuses invalid indices (S653)."""

    def found(number: int) -> str:
        ids = torch.tensor([[0, 1], [2, number]])
        program = build(make_plan(Bag(), "bag shard(vocab, over=tp)", "tp=2"), {"ids": ids * 0})
        try:
            return str(float(program.eval_step({"ids": ids})))
        except Refusal as refusal:
            return refusal.diagnostic.code

    assert pool.run(found, 2, WORDS)[0] == pool.run(found, 2, -1)[0] == "S653"
    assert float(pool.run(found, 2, WORDS - 1)[0]) > 0
