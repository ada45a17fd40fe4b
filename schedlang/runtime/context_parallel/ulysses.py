"""From a part of the tokens with all heads to all tokens with a part of the heads, and back.

One all-to-all each way (Jacobs et al.: DeepSpeed-Ulysses, 2023); each is the other's backward.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.context_parallel.masks import Tags
from schedlang.runtime.context_parallel.ring import Packet, exchange, gathered
from schedlang.runtime.context_parallel.token_layout import Layout, Runs, spread
from schedlang.runtime.device import HOST, sent


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team, to_heads: bool) -> Tensor:
        ctx.team, ctx.to_heads = team, to_heads
        with torch._C.DisableTorchFunction():
            return _to_heads(x, team) if to_heads else _to_tokens(x, team)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        with torch._C.DisableTorchFunction():
            back = _to_tokens if ctx.to_heads else _to_heads
            return back(grads[0], ctx.team), None, None


class Team:
    """The ranks that swap: their tokens, one after the other, and in the order of the sequence."""

    def __init__(self, group: Group, layout: Layout, outer: int, joined: Runs) -> None:
        self.group = group
        first = outer * group.size
        self.counts = layout.counts[first : first + group.size]
        each = layout.runs[first : first + group.size]
        self.arrived: Runs = tuple(run for runs in each for run in runs)
        self.wanted: Runs = tuple(joined)

    @property
    def ordered(self) -> bool:
        """Whether tokens arrive in the order in which they are wanted."""
        return _orders(self.arrived, self.wanted, HOST) is None

    def heads(self, x: Tensor) -> Tensor:
        """[rows, heads, my tokens, width] to [rows, my heads, the team's tokens, width]."""
        return cast(Tensor, _Swap.apply(x, self, True))  # type: ignore[no-untyped-call]

    def tokens(self, x: Tensor) -> Tensor:
        """Back again."""
        return cast(Tensor, _Swap.apply(x, self, False))  # type: ignore[no-untyped-call]

    def tags(self, tags: Tags) -> Tags:
        """Those of all tokens of the team."""
        given = [t for t in tags if t is not None]
        if not given:
            return tags
        parts = gathered(Packet.of(given, [1] * len(given)), self.counts, self.group)
        whole = iter(
            [self.sorted(torch.cat(same, 1), 1) for same in zip(*(p.tensors for p in parts))]
        )
        return Tags(*(None if t is None else next(whole) for t in tags))

    def rows(self, rows: Tensor, heads: int) -> Tensor:
        """A mask [rows or 1, heads or 1, my tokens or 1, keys]: the team's tokens, my heads."""
        if rows.shape[2] == 1:  # every rank has them
            mine = heads // self.group.size
            first = self.group.rank * mine
            return rows if rows.shape[1] == 1 else rows[:, first : first + mine]
        if rows.shape[1] == 1 and not rows.requires_grad:
            parts = gathered(Packet.of([rows], [2]), self.counts, self.group)
            return self.sorted(torch.cat([p.tensors[0] for p in parts], 2), 2)
        rows = rows.expand(-1, heads, -1, -1)
        if rows.dtype == torch.bool:
            return self.heads(rows.to(torch.uint8)).bool()
        return self.heads(rows)

    def sorted(self, x: Tensor, dim: int) -> Tensor:
        """What has arrived from the ranks one by one, in the order that is wanted."""
        orders = _orders(self.arrived, self.wanted, x.device)
        return x if orders is None else x.index_select(dim, orders[0])

    def unsorted(self, x: Tensor, dim: int) -> Tensor:
        """Back again."""
        orders = _orders(self.arrived, self.wanted, x.device)
        return x if orders is None else x.index_select(dim, orders[1])


@lru_cache(maxsize=64)  # as many lengths of sequences: each is sent to the device once
def _orders(arrived: Runs, wanted: Runs, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Of each wanted token the place where it arrives, and back; None where both are one order."""
    with torch._C.DisableTorchFunction(), torch.inference_mode(False):
        order = _places(spread(arrived), spread(wanted))
        return None if order is None else (sent(order, device), sent(order.argsort(), device))


def _places(arrived: Tensor, wanted: Tensor) -> Tensor | None:
    if torch.equal(arrived, wanted):
        return None
    by_position = arrived.argsort()
    return by_position[torch.searchsorted(arrived[by_position], wanted)]


def _to_heads(x: Tensor, team: Team) -> Tensor:
    rows, heads, _, width = x.shape
    mine = heads // team.group.size
    shapes = [(rows, mine, tokens, width) for tokens in team.counts]
    parts = exchange(x.chunk(team.group.size, 1), shapes, team.group)
    return team.sorted(torch.cat(parts, 2), 2)


def _to_tokens(x: Tensor, team: Team) -> Tensor:
    rows, heads, _, width = x.shape
    tokens = team.counts[team.group.rank]
    given = torch.split(team.unsorted(x, 2), list(team.counts), 2)
    parts = exchange(given, [(rows, heads, tokens, width)] * team.group.size, team.group)
    return torch.cat(parts, 1)


def enough(kv_heads: int, ranks: int) -> int:
    """How many copies of each head of keys and values let `ranks` have the same number of them.

    The least one; 1 where they can be divided.
    """
    return math.lcm(kv_heads, ranks) // kv_heads


def copied(x: Tensor, ranks: int) -> Tensor:
    """Keys or values [rows, heads, ..] with each head as often as `ranks` need, one after another.

    The gradient of a head is the sum of its copies'.
    """
    copies = enough(x.shape[1], ranks)
    return x if copies == 1 else x.repeat_interleave(copies, 1)
