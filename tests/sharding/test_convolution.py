"""Convolutional networks with sharded channels or positions equal the original model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.sharding.convolution import Window
from tests.engine.threads import Threads
from tests.proofs import (
    assert_near,
    assert_proven,
    make_plan,
    refusal_text,
    train_on_ranks,
    train_sequential,
)

SIDE = {"Conv1d": 24, "Conv2d": 12, "Conv3d": 6}


class Block(nn.Module):
    """Up, norm, grouped convolution, norm, down, with a shortcut."""

    def __init__(self, dims: int, kernel: int, dilation: int, groups: int, norm: str) -> None:
        super().__init__()
        conv = getattr(nn, f"Conv{dims}d")
        reach = dilation * (kernel - 1) // 2
        self.up = conv(6, 12, kernel, padding="same", dilation=dilation, bias=norm == "batch")
        self.first = getattr(nn, f"BatchNorm{dims}d")(12) if norm == "batch" else nn.Identity()
        self.deep = conv(12, 12, kernel, padding=reach, dilation=dilation, groups=groups)
        self.second = nn.GroupNorm(6, 12) if norm == "group" else nn.Identity()
        self.down = conv(12, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(self.up(x)))
        return x + self.down(torch.tanh(self.second(self.deep(h))))


class Net(nn.Module):
    """A stem with stride 2, a pool, one block, and a head on the mean over all positions."""

    def __init__(
        self,
        dims: int = 2,
        kernel: int = 3,
        dilation: int = 1,
        groups: int = 1,
        norm: str = "",
        pool: str = "Max",
        stride: int = 2,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        reach = 1 if kernel > 1 else 0
        self.stem = getattr(nn, f"Conv{dims}d")(2, 6, 2 * reach + 1, stride=stride, padding=reach)
        window = (3, 1, 1) if pool == "Max" else (1, 1)
        self.pool = getattr(nn, f"{pool}Pool{dims}d")(*window)
        self.block = Block(dims, kernel, dilation, groups, norm)
        self.head = nn.Linear(6, 5)
        self.dims = dims

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.block(self.pool(self.stem(x)))
        logits = self.head(h.flatten(2).mean(2))
        return {"loss": F.cross_entropy(logits, y), "out": logits}


def batches(dims: int, count: int = 3) -> list[dict[str, Tensor]]:
    """Random pictures; their number changes from batch to batch."""
    generator = torch.Generator().manual_seed(5)
    side = SIDE[f"Conv{dims}d"]
    return [
        {
            "x": torch.randn(3 + seed % 2, 2, *[side] * dims, generator=generator).double(),
            "y": torch.randint(5, (3 + seed % 2,), generator=generator),
        }
        for seed in range(count)
    ]


CHANNELS = """
  block.up    shard(col, over=tp)
  block.deep  shard(col, over=tp)
  block.down  shard(row, over=tp)
"""
NORMED = "\n  block.{name}  shard({split}input=S(1), output=S(1), over=tp)"
SPATIAL = """
  stem         shard(input=S(2), output=S(2), over=sp)
  pool         shard(input=S(2), output=S(2), over=sp)
  block.up     shard(input=S(2), output=S(2), over=sp)
  block.deep   shard(input=S(2), output=S(2), over=sp)
  block.down   shard(input=S(2), output=S(2), over=sp)
  block        shard(input=S(2), output=R, over=sp)
"""
MOVED = "\n  block.{name}  shard(input=S(2), output=S(2), over=sp)"


def _rows(net: Net, channels: bool, spatial: bool) -> str:
    """Rows that split this net's channels, positions, or both."""
    rows = (CHANNELS if channels else "") + (SPATIAL if spatial else "")
    if channels and net.block.deep.groups == 1:  # one group reads all channels: gather before it
        rows = rows.replace("block.deep  shard(col", "block.deep  shard(col", 1)
        rows = rows.replace("block.up    shard(col,", "block.up    shard(col, output=R,", 1)
    for name in ("first", "second"):
        norm = getattr(net.block, name)
        if isinstance(norm, nn.Identity):
            continue
        after_up = name == "first" and net.block.deep.groups == 1
        if channels and not after_up:
            rows += NORMED.format(name=name, split="weight=S(0), bias=S(0), ")
        if spatial:
            rows += MOVED.format(name=name)
    return rows


@settings(max_examples=8)
@given(
    dims=st.sampled_from([1, 2, 2, 3]),
    kernel=st.sampled_from([1, 3, 3]),
    dilation=st.sampled_from([1, 1, 2]),
    groups=st.sampled_from([1, 6, 12]),
    norm=st.sampled_from(["", "batch", "group"]),
    pool=st.sampled_from(["Max", "Avg"]),
    stride=st.sampled_from([1, 2]),
    how=st.sampled_from(["tp", "sp", "both"]),
    ranks=st.sampled_from([2, 3]),
)
def test_any_split_equals_the_whole(
    threads: Threads,
    dims: int,
    kernel: int,
    dilation: int,
    groups: int,
    norm: str,
    pool: str,
    stride: int,
    how: str,
    ranks: int,
) -> None:
    """Losses, first gradients, norms, buffers and parameters after three steps, in float64."""
    if dims == 3 and (dilation > 1 or ranks > 2):
        ranks, dilation, stride = (1 if how == "both" else 2), 1, 1  # its side is short
    net = Net(dims, kernel, dilation, groups, norm, pool, stride).double()
    mesh = {"tp": f"tp={ranks}", "sp": f"sp={ranks}", "both": "tp=2, sp=2"}[how]
    plan = make_plan(net, _rows(net, how != "sp", how != "tp"), mesh)
    observed = train_on_ranks(threads, plan, batches(dims))
    expected = train_sequential(copy.deepcopy(net), batches(dims))
    assert_near(observed, expected)


@pytest.mark.parametrize("how", ["tp", "sp"])
def test_a_net_with_norms_is_proven(pool: Pool, how: str) -> None:
    """All of `verify` holds, static proofs included, for sharded channels and positions."""
    net = Net(groups=6, norm="group", dilation=2).double()
    plan = make_plan(net, _rows(net, how == "tp", how == "sp"), f"{how}=2")
    assert_proven(pool, plan, batches(2))


@given(
    kernel=st.integers(1, 5),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 4),
    rows=st.integers(1, 9),
    ranks=st.integers(2, 3),
)
def test_windows_fit_where_parts_make_the_whole(
    kernel: int, stride: int, dilation: int, padding: int, rows: int, ranks: int
) -> None:
    """`fits` holds exactly where there is one output per stride and neighbours have the halo."""
    window = Window(kernel, stride, dilation, padding, padding)
    full = rows * ranks
    reach = dilation * (kernel - 1) + 1
    outputs = (full + 2 * padding - reach) // stride + 1 if full + 2 * padding >= reach else 0
    halo_fits = max(padding, window.halo_after) <= rows
    assert window.fits(rows) == (rows % stride == 0 and outputs * stride == full and halo_fits)


class Functional(Net):
    """The same network with one step as a function of torch instead of a module."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.call(self.pool(self.stem(x)))
        h = self.block(h)
        return {"loss": F.cross_entropy(self.head(h.flatten(2).mean(2)), y)}


REACHING = {
    "max_pool2d": lambda h: F.max_pool2d(h, 3, 1, 1),
    "interpolate": lambda h: F.interpolate(h, scale_factor=2, mode="bilinear"),
    "pad": lambda h: F.pad(h, (0, 0, 1, -1)),
    "batch_norm": lambda h: F.batch_norm(h, None, None, training=True),
    "group_norm": lambda h: F.group_norm(h, 2),
    "layer_norm": lambda h: F.layer_norm(h, h.shape[1:]),
}


@pytest.mark.parametrize("name", REACHING)
def test_functions_that_reach_over_positions_are_refused(name: str) -> None:
    """Functions that mix positions without a halo are refused by name."""
    net = Functional(REACHING[name]).double()
    message = refusal_text(net, SPATIAL, "sp=2", batches(2)[0])
    assert f"`{name}` computes along a dim that is sharded over `sp`" in message or (
        name == "layer_norm" and "S405" in message
    ), message


def test_repeated_positions_are_followed(threads: Threads) -> None:
    """Nearest-neighbour upsampling by an integer factor needs no other rank."""
    net = Functional(lambda h: F.interpolate(h, scale_factor=2)).double()
    plan = make_plan(net, SPATIAL, "sp=2")
    observed = train_on_ranks(threads, plan, batches(2))
    assert_near(observed, train_sequential(copy.deepcopy(net), batches(2)))


def test_windows_that_do_not_fit_are_refused() -> None:
    """Strides that do not divide shards, missing padding and split groups are refused."""
    net = Net().double()
    net.stem.stride = (5, 5)
    message = refusal_text(net, SPATIAL, "sp=2", batches(2)[0])
    assert "S419" in message and "shards of at least 1, a multiple of 5" in message, message
    bare = Net().double()
    bare.stem.padding = (0, 0)
    assert "needs a padding of 1" in refusal_text(bare, SPATIAL, "sp=2", batches(2)[0])
    grouped = Net(groups=6).double()
    assert "cannot split 6 groups evenly 4 ways" in refusal_text(
        grouped, "block.deep  shard(col, over=tp)", "tp=4"
    )
    assert "reads only its own inputs" in refusal_text(
        grouped, "block.deep  shard(row, over=tp)", "tp=2"
    )
