"""Sharded experts that a forward skips where no token chose them: refused, with a help that works.

Without values all counts are zero, so that the recorded forward calls no expert.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from tests.engine import Threads
from tests.zoo_models.written import Written, hand_text, judge

EXPERTS, WIDTH = 3, 8
ROWS = "tp=2\n  experts.*.up  shard(col, over=tp)\n  experts.*.down  shard(row, over=tp)"


class Expert(nn.Module):
    """A feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.silu(self.up(x)))
        return down


class Mixture(nn.Module):
    """Experts in a loop over their counts, as DeepSeek writes it; `skips` those without tokens."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips, self.gate = skips, nn.Linear(WIDTH, EXPERTS)
        self.always = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x.flatten(0, 1)
        weight, chosen = self.gate(h).softmax(-1).topk(2, -1)
        counts, out = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist(), self.always(h)
        for index, expert in enumerate(self.experts):
            if self.skips and counts[index] == 0:
                continue
            row, place = torch.where(chosen == index)
            out[row] += expert(h[row]) * weight[row, place, None]
        return F.mse_loss(out.view_as(x).mean(1), y)


def tokens(rows: int, seed: int) -> dict[str, Tensor]:
    """Return rows of five tokens."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, WIDTH, generator=g)
    return {"x": x, "y": torch.randn(rows, WIDTH, generator=g)}


def test_the_help_works(threads: Threads) -> None:
    """No batch reaches a skipped expert (S664); called also without tokens, it trains equally."""
    with pytest.raises(Refusal, match="S664") as refused:
        judge(Written(partial(Mixture, True), tokens), hand_text(ROWS), threads)
    assert "for every batch, also with no rows" in refused.value.diagnostic.helps[0]
    assert judge(Written(partial(Mixture, False), tokens), hand_text(ROWS), threads) == ""
