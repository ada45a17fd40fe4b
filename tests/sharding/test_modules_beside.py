"""Modules that split heads for projections beside them: their numbers are divided, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine import Threads
from tests.proofs import adamw, assert_near, make_plan, train_on_ranks, train_sequential

WIDTH, HEADS = 16, 4


class SplitHeads(nn.Module):
    """Split the last dim into heads, whose number is its attribute."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)


class Rearrange(nn.Module):
    """Do the same; the number is among sizes of axes, as a layer of einops has them."""

    def __init__(self, **axes_lengths: int) -> None:
        super().__init__()
        self.axes_lengths = axes_lengths
        self._axes_lengths = tuple(self.axes_lengths.items())

    def forward(self, x: Tensor) -> Tensor:
        heads = dict(self._axes_lengths)["h"]
        return x.view(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)


class Attention(nn.Module):
    """Attention whose heads a module of its own splits."""

    def __init__(self, split: nn.Module) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.split, self.out = nn.LayerNorm(WIDTH), split, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (self.split(project(h)) for project in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = x + self.out(heads.transpose(1, 2).flatten(2))
        return output


class Model(nn.Module):
    """Two layers and a loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        splits = (SplitHeads(HEADS) if kind == "attribute" else Rearrange(h=HEADS) for _ in "12")
        self.layers = nn.ModuleList(map(Attention, splits))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


ROWS = "layers.*.{q,k,v} shard(col, over=tp)\nlayers.*.out shard(row, over=tp)"


@pytest.mark.parametrize("kind", ["attribute", "sizes of axes"])
def test_heads_are_split_by_a_module_beside(threads: Threads, kind: str) -> None:
    """Three steps equal those of a plain loop; the original keeps its numbers."""
    model = Model(kind).double()
    plan = make_plan(model, ROWS, "tp=2")
    generator = torch.Generator().manual_seed(0)
    batches = [
        {"x": torch.randn(2, 5, WIDTH, generator=generator, dtype=torch.float64)} for _ in range(3)
    ]
    results = train_on_ranks(threads, plan, batches, adamw)
    assert_near(results, train_sequential(plan.model.model, batches, adamw))
    split = model.layers[0].split
    assert HEADS in (getattr(split, "heads", 0), *getattr(split, "axes_lengths", {}).values())
