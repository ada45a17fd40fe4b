"""Losses that are a mean over rows: a rank with some tokens of each row cannot compute its part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan


class Reader(nn.Module):
    """A layer of attention; the loss is a mean over rows of means, or over all counted labels."""

    def __init__(self, by_rows: bool) -> None:
        super().__init__()
        self.by_rows = by_rows
        self.enter, self.qkv, self.head = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        x = self.enter(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = self.head(x + mixed.transpose(1, 2).flatten(2))
        if not self.by_rows:
            return F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        losses = F.cross_entropy(scores.mT, labels, reduction="none")
        return (losses.sum(1) / (labels >= 0).sum(1)).mean()


def _batches() -> list[dict[str, Tensor]]:
    """Three batches whose first tokens all have labels."""
    torch.manual_seed(1)
    batches = [{"ids": torch.randint(11, (4, 12)), "labels": torch.randint(11, (4, 12))}] * 3
    for batch in batches:
        batch["labels"][2:, 10:] = -100
    return batches


def test_a_mean_over_rows_is_refused_and_one_over_tokens_is_right(threads: Threads) -> None:
    """A small batch, to try, has a label that does not count where the batch has any."""
    torch.manual_seed(0)
    rows, batches = "context_parallel(gather, over=cp)", _batches()
    with pytest.raises(Refusal) as caught:
        prepare(make_plan(Reader(by_rows=True).double(), rows, "cp=2"), batches[0])
    text = caught.value.render()
    assert "S659" in text and "is not a mean over its tokens" in text and "equal weights" in text
    assert_proven(threads, make_plan(Reader(by_rows=False).double(), rows, "cp=2"), batches)
