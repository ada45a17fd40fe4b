"""Mesh axes of one size are distinguished: each is followed alone through a call."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.propagation.follower import (
    find_reshaped_dim,
    infer_shard_shapes,
    list_assignments,
)
from schedlang.runtime.propagation.trace import RunningCall, Tag
from tests.engine.threads import Threads
from tests.proofs import assert_near, make_plan, train_on_ranks, train_sequential


def test_both_orders_fit_where_sizes_are_equal() -> None:
    """With two axes of 2 ranks both assignments to dims match the shapes; with 2 and 3 only one."""
    assert len(list_assignments(["a", "b"], [0, 1], lambda axis, dim: True)) == 2
    sizes, local, full = {"a": 2, "b": 3}, (2, 2), (4, 6)
    assignments = list_assignments(
        ["a", "b"], [0, 1], lambda a, dim: local[dim] * sizes[a] == full[dim]
    )
    assert assignments == [{"a": 0, "b": 1}]


def test_an_axis_is_followed_through_moves() -> None:
    """A split dim is followed through a transpose of a square matrix, a product and a view."""
    x = torch.empty(2, 2, device="meta")
    assert _parts(torch.t, x)([(4, 4)], [0], 2) == [(4, 2)]
    y = torch.empty(2, 8, 3, device="meta")
    shapes = [(2, 8, 6), (2, 6, 8)]
    assert _parts(torch.matmul, y, y.mT)(shapes, [None, 2], 2) == [(2, 8, 4)]
    assert find_reshaped_dim((2, 8, 16), Tag(2, (16,)), (2, 8, 4, 4), [1, 2]) == 2
    assert _parts(torch.Tensor.view, x, 4)([(4, 4)], [0], 2) is None


def _parts(func: Any, *args: Any) -> Any:
    """`shapes_of_parts` of one call."""
    return partial(infer_shard_shapes, RunningCall(("", 0), func.__name__, func, args, {}, []))


class Turned(nn.Module):
    """Transposes between two convolutions, with equal numbers of channels and positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Conv1d(4, 8, 3, padding=1), nn.Conv1d(8, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.up(x).transpose(1, 2)  # [batch, 8 positions, 8 channels]
        h = torch.tanh(h.unsqueeze(1).squeeze(1) * 2).mT
        logits = self.head(self.down(h).mT)
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def test_two_axes_of_one_size_on_a_square(threads: Threads) -> None:
    """Channels over one axis and positions over another, through transposes: equal to the model."""
    net = Turned().double()
    rows = """
      up    shard(col, over=tp)
      down  shard(row, over=tp)
      up    shard(input=S(2), output=S(2), over=sp)
      down  shard(input=S(2), output=R, over=sp)
    """
    generator = torch.Generator().manual_seed(1)
    batches = [
        {
            "x": torch.randn(3, 4, 8, generator=generator).double(),
            "y": torch.randint(3, (3, 8), generator=generator),
        }
        for _ in range(2)
    ]
    plan = make_plan(net, rows, "tp=2, sp=2")
    observed = train_on_ranks(threads, plan, batches)
    assert_near(observed, train_sequential(net, batches))


class Two(nn.Module):
    """Two linear layers over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def test_weights_that_see_some_positions(threads: Threads) -> None:
    """Gradients of a sharded layer that sees some positions on each rank are summed once.

    So are those of its bias, added before a gather or to a partial sum.
    """
    net = Two().double()
    rows = """
      up    shard(col, over=tp)
      down  shard(row, over=tp)
      up    shard(input=S(1), output=S(1), over=sp)
      down  shard(input=S(1), output=R, over=sp)
    """
    generator = torch.Generator().manual_seed(1)
    batches = [{"x": torch.randn(3, 6, 4, generator=generator).double()} for _ in range(2)]
    plan = make_plan(net, rows, "tp=2, sp=2")
    observed = train_on_ranks(threads, plan, batches)
    assert_near(observed, train_sequential(net, batches))
