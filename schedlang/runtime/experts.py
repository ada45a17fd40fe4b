"""Experts on several ranks: tokens go to the ranks that hold their experts, and come back.

A rank holds some experts, and computes them by their module's own forward.  Along an axis whose
ranks see different tokens (it splits the batch) rows are sent by all-to-all; along one whose ranks
see the same tokens each rank takes those of its own experts, and what ranks give is summed, so
that nothing is sent twice.  GShard (Lepikhin et al. 2020), FastMoE (He et al. 2021), DeepSpeed-MoE
(Rajbhandari et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from schedlang.placement import P
from schedlang.runtime.crossing import shared
from schedlang.runtime.expert_probe import Experts
from schedlang.runtime.hollow import hollow
from schedlang.runtime.moving import exchange, exchanged
from schedlang.runtime.numbers import set_number
from schedlang.runtime.shard import Edge, Forward


@dataclass(frozen=True)
class Routing:
    """How the experts of one module are spread: what they are, and how tokens meet them."""

    experts: Experts
    dispatch: str = "all_to_all"


def expert_forward(module: nn.Module, inner: Forward, edges: tuple[Edge, ...]) -> Forward:
    """A module of experts of which this rank holds a part."""
    routing = edges[0].told
    assert isinstance(routing, Routing)
    spread = Spread(module, inner, edges, routing)
    return spread


class Spread:
    """The forward of such a module; `edges` go from the slowest axis to the fastest."""

    def __init__(
        self, module: nn.Module, inner: Forward, edges: tuple[Edge, ...], routing: Routing
    ) -> None:
        self.module, self.inner, self.edges = module, inner, edges
        self.count = routing.experts.count
        self.split = routing.experts.split
        self.places = place_of([e.group.size for e in edges], self.count)
        self.alike = [k for k, edge in enumerate(edges) if isinstance(edge.computes, P)]
        self.apart = [k for k in range(len(edges)) if k not in self.alike]
        self.held = self.count // len(set(self.places))
        self.counted = routing.experts.numbers
        self.mine = tuple(edge.group.rank for edge in edges)

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """What the experts of all ranks give for these tokens."""
        x, w = hidden, weights
        for k in self.alike:
            entry = self.edges[k].entry()
            x, w = shared(entry, x), shared(entry, w)
        token, slot = self._own(index)
        rows, reach = x[token], index[token, slot]
        back: list[Callable[[Tensor], Tensor]] = []
        for k in self.apart:
            rows, reach, home = self._sent(rows, reach, k)
            back.append(home)
        y = self._computed(rows, reach, w.dtype)
        for home in reversed(back):
            y = home(y)
        y = y * w[token, slot, None]
        out = torch.zeros_like(x, dtype=y.dtype).index_add(0, token, y).to(hidden.dtype)
        for k in self.alike:
            out = self.edges[k].exit()(out)
        return out

    # -- which rows, and to whom -------------------------------------------------------------------

    def _own(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The (token, choice) pairs that are this rank's to send, among those that ranks share."""
        if index.is_meta:  # no values: as many as if all experts were chosen equally often
            ranks = 1
            for k in self.alike:
                ranks *= self.edges[k].group.size
            rows = index.numel() // ranks
            return index.new_empty(rows), index.new_empty(rows)
        keep = torch.tensor(
            [all(place[k] == self.mine[k] for k in self.alike) for place in self.places],
            device=index.device,
        )
        token, slot = keep[index].nonzero(as_tuple=True)
        return token, slot

    def _reach(self, k: int) -> list[list[int]]:
        """Before the exchange along an axis: the experts that rows may go to, by place on it."""
        before = [*self.alike, *(j for j in self.apart if j < k)]
        size = self.edges[k].group.size
        found: list[list[int]] = [[] for _ in range(size)]
        for expert, place in enumerate(self.places):
            if all(place[j] == self.mine[j] for j in before):
                found[place[k]].append(expert)
        return found

    def _sent(
        self, rows: Tensor, reach: Tensor, k: int
    ) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """The rows that come along an axis, the expert of each, and the way back."""
        group, table = self.edges[k].group, self._reach(k)
        if rows.is_meta:
            each = rows.shape[0] // group.size
            sizes = [*[each] * (group.size - 1), rows.shape[0] - each * (group.size - 1)]
            exchanged(reach.new_empty(group.size, len(table[0])), group)
            came = exchange(rows, group, sizes, sizes)
            return came, reach, lambda y: exchange(y, group, sizes, sizes)
        key = torch.zeros(self.count, dtype=torch.long, device=rows.device)
        key[[expert for row in table for expert in row]] = torch.arange(
            group.size * len(table[0]), device=rows.device
        )
        order = torch.argsort(key[reach], stable=True)
        counts = torch.bincount(key[reach], minlength=group.size * len(table[0]))
        counts = counts.view(group.size, -1)
        coming = exchanged(counts, group)
        send, receive = counts.sum(1).tolist(), coming.sum(1).tolist()
        came = exchange(rows[order], group, send, receive)
        mine = torch.tensor(table[group.rank], device=rows.device)
        experts = mine.repeat(group.size).repeat_interleave(coming.flatten())

        def home(y: Tensor) -> Tensor:
            returned = exchange(y, group, receive, send)
            return returned[torch.argsort(order)]

        return came, experts, home

    # -- the experts -------------------------------------------------------------------------------

    def _computed(self, rows: Tensor, reach: Tensor, dtype: torch.dtype) -> Tensor:
        """What this rank's experts give for the rows that came, one expert each."""
        parts = [self.module.get_parameter(name) for name in self.split]
        if rows.is_meta:
            y = hollow(rows, parts)
            # what a rank leaves to others counts as zero: the sum over ranks is a pending one
            return y * rows.new_ones(rows.shape[0], 1).bool() if self.alike else y
        if not rows.shape[0]:  # every rank takes part in what comes behind, and in the backward
            return rows + sum(part.flatten()[:0].sum() for part in parts)
        first = self.places.index(self.mine)
        for path in self.counted:
            set_number(self.module, path, self.held)
        ones = rows.new_ones(rows.shape[0], 1, dtype=dtype)
        out: Tensor = self.inner(rows, (reach - first)[:, None], ones)
        return out


def place_of(sizes: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """For each expert its place on each of some axes: equal runs, the last axis fastest."""
    ranks = 1
    for size in sizes:
        ranks *= size
    found = []
    for expert in range(count):
        at, place = expert // (count // ranks), []
        for size in reversed(sizes):
            at, on = divmod(at, size)
            place.append(on)
        found.append(tuple(reversed(place)))
    return found
