"""Experts on several ranks: tokens go to the ranks that hold their experts, and come back.

A rank holds some experts, and computes them by their module's own forward.  Along an axis whose
ranks see different tokens (it splits the batch) rows are sent by all-to-all, or experts fetched;
along one whose ranks see the same tokens each rank takes those of its own experts, and what ranks
give is summed, so that nothing is sent twice.  GShard (Lepikhin et al. 2020), FastMoE (He et al.
2021), DeepSpeed-MoE (Rajbhandari et al. 2022), Janus (Liu et al. 2023), FasterMoE (He et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from schedlang.placement import P
from schedlang.runtime.collectives import collective
from schedlang.runtime.collectives.collective import Group
from schedlang.runtime.following.hollow import hollow
from schedlang.runtime.routing.capacity import kept
from schedlang.runtime.routing.dispatch import Step, Way, place_of
from schedlang.runtime.routing.expert_inner import Inner
from schedlang.runtime.routing.expert_probe import Experts
from schedlang.runtime.sharding.crossing import shared
from schedlang.runtime.sharding.numbers import number_at, set_number
from schedlang.runtime.sharding.shard import Edge, Forward

if TYPE_CHECKING:
    from schedlang.runtime.sharding.leaf import Sharded


@dataclass(frozen=True)
class Routing:
    """How the experts of one module are spread, and how tokens meet them.

    dispatch  "all_to_all": tokens go to experts; "fetch": experts come to tokens
    capacity  an expert takes so many times its even share of tokens; None: all
    chunks    parts into which tokens are cut, each sent while the one before is computed
    shadow    experts that come to all tokens, while the tokens of the others go
    inner     how every expert is cut over the axis `within`, whose ranks see the same tokens
    """

    experts: Experts
    dispatch: str = "all_to_all"
    capacity: float | None = None
    chunks: int = 1
    shadow: tuple[int, ...] = ()
    inner: Inner | None = None
    within: str = ""

    def forward_of(self, sharded: Sharded) -> Forward:
        """A module of experts of which this rank holds a part; slow axes come first."""
        return Spread(sharded.module, sharded.inner, sharded.edges, self)


class Spread:
    """The forward of such a module."""

    def __init__(
        self, module: nn.Module, inner: Forward, edges: tuple[Edge, ...], routing: Routing
    ) -> None:
        self.module, self.inner, self.routing = module, inner, routing
        self.count = routing.experts.count
        self.alike = tuple(edge for edge in edges if isinstance(edge.computes, P))
        self.within = next((e.group for e in edges if e.group.axes[0] == routing.within), None)
        if self.within is not None:
            _divide(module, routing.inner, self.within)
        edges = tuple(edge for edge in edges if edge.group is not self.within)
        self.apart = tuple(edge for edge in edges if edge not in self.alike)
        self.places = place_of([edge.group.size for edge in edges], self.count)
        self.mine = tuple(edge.group.rank for edge in edges)
        here = [edge in self.alike for edge in edges]
        # the experts of ranks that see other tokens, and one's own among them
        self.reach = self._at(here)
        self.held = self._at([True] * len(edges))
        self.shadowed = tuple(expert for expert in self.reach if expert in routing.shadow)
        self._known: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        self.steps: list[Step] = []
        for k, edge in enumerate(edges):
            if not here[k]:
                reached = self._at(here)
                table = [tuple(e for e in reached if self.places[e][k] == at)
                         for at in range(edge.group.size)]  # fmt: skip
                self.steps.append(Step(edge.group, tuple(table)))
                here[k] = True

    def _at(self, here: Sequence[bool]) -> tuple[int, ...]:
        """The experts whose place is this rank's on the axes that are marked."""
        pairs = enumerate(self.places)
        return tuple(
            expert for expert, place in pairs
            if all(a == b for a, b, same in zip(place, self.mine, here) if same)
        )  # fmt: skip

    def _places(self, some: tuple[int, ...], device: torch.device) -> Tensor:
        """Of each expert its place among some of them, -1 of others: made once on a device."""
        if (some, device) not in self._known:
            with _disable_current_modes():  # a second run of this call makes it no more
                found = torch.full((self.count,), -1)
                found[list(some)] = torch.arange(len(some))
                self._known[some, device] = found.to(device)
        return self._known[some, device]

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """What the experts of all ranks give for these tokens."""
        x, w = hidden, weights
        for edge in self.alike:
            x, w = shared(edge.entry(), x), shared(edge.entry(), w)
        token, slot = self._own(index)
        experts = index[token, slot]
        y = self._routed(x[token], experts, w.dtype) * w[token, slot, None]
        out = torch.zeros_like(x, dtype=y.dtype).index_add(0, token, y).to(hidden.dtype)
        for edge in self.alike:
            out = edge.exit()(out)
        return out

    def _own(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The (token, choice) pairs that are this rank's to see to."""
        if index.is_meta:  # no values: as many as if all experts were chosen equally often
            rows = index.numel() * len(self.reach) // self.count
            if self.routing.capacity is not None:
                kept(index, self.count, self.routing.capacity, [e.group for e in self.apart])
            return index.new_empty(rows), index.new_empty(rows)
        if len(self.reach) == self.count and self.routing.capacity is None:  # all of them
            tokens, choices = index.shape
            token = torch.arange(tokens, device=index.device)[:, None].expand(-1, choices)
            return token.reshape(-1), torch.arange(choices, device=index.device).repeat(tokens)
        mine = (self._places(self.reach, index.device) >= 0)[index]
        if self.routing.capacity is not None:
            groups = [edge.group for edge in self.apart]
            mine = mine & kept(index, self.count, self.routing.capacity, groups)
        token, slot = mine.nonzero(as_tuple=True)
        return token, slot

    def _routed(self, rows: Tensor, experts: Tensor, dtype: torch.dtype) -> Tensor:
        """What experts give for rows, one expert each, in the order of the rows."""
        if self.routing.dispatch == "fetch":
            return self._called(rows, experts, dtype, self._fetched(), self.reach)
        if not self.shadowed:
            return self._sent(rows, experts, dtype)
        if rows.is_meta:
            stay = rows.shape[0] * len(self.shadowed) // len(self.reach)
            near = torch.arange(rows.shape[0], device="meta") < stay
            here, away = (near.new_empty(n, dtype=torch.long)
                          for n in (stay, rows.shape[0] - stay))  # fmt: skip
        else:
            near = (self._places(self.shadowed, rows.device) >= 0)[experts]
            here, away = near.nonzero()[:, 0], (~near).nonzero()[:, 0]
        copies = self._shadows()
        stayed = self._called(rows[here], experts[here], dtype, copies, self.shadowed)
        went = self._sent(rows[away], experts[away], dtype)
        return torch.cat([stayed, went])[torch.argsort(torch.cat([here, away]))]

    # -- tokens to experts -------------------------------------------------------------------------

    def _sent(self, rows: Tensor, experts: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows go to the ranks of their experts, chunk by chunk, and come back."""
        chunks, done = self.routing.chunks, []
        parts = [Way(*both) for both in
                 zip(rows.tensor_split(chunks), experts.tensor_split(chunks))]  # fmt: skip
        own = {name: self.module.get_parameter(name) for name in self.routing.experts.split}
        near = self._gone(parts.pop(0), chunks > 1)
        while True:
            after = self._gone(parts.pop(0), True) if parts else None
            near.arrive()
            done.append(near.home(self._called(near.rows, near.experts, dtype, own, self.held)))
            if after is None:
                return torch.cat(done) if chunks > 1 else done[0]
            near = after

    def _gone(self, way: Way, ahead: bool) -> Way:
        """Rows sent along all axes; `ahead`: without waiting for the last one."""
        for step in self.steps:
            way = step.take(way, ahead and step is self.steps[-1])
        return way

    # -- experts to tokens -------------------------------------------------------------------------

    def _fetched(self) -> dict[str, Tensor]:
        """The experts that this rank's tokens choose from; gradients are summed where they live."""
        found: dict[str, Tensor] = {}
        for name in self.routing.experts.split:
            whole = self.module.get_parameter(name)
            part: Tensor = whole * 1 if whole.is_meta else whole  # read, as a gather does
            for edge in reversed(self.apart):
                part = collective.gather(part, 0, edge.group, consumers_differ=True)
            found[name] = part
        return found

    def _shadows(self) -> dict[str, Tensor]:
        """Copies of the shadowed experts; their gradients are summed where the experts live."""
        found: dict[str, Tensor] = {}
        for name in self.routing.experts.split:
            part = self.module.get_parameter(name)
            at = self._places(self.held, part.device)[list(self.shadowed)]
            mask = (at >= 0).view(-1, *[1] * (part.ndim - 1))
            copy = part[at.clamp(min=0)] * mask
            for edge in self.apart:
                copy = collective.enter(collective.reduce(copy, edge.group), edge.group)
            found[name] = copy
        return found

    # -- the module's own forward ------------------------------------------------------------------

    def _called(
        self, rows: Tensor, experts: Tensor, dtype: torch.dtype,
        parameters: Mapping[str, Tensor], held: tuple[int, ...],
    ) -> Tensor:  # fmt: skip
        """What the experts `held`, with these parameters, give for rows, one expert each."""
        parameters = self._shared_out(parameters)
        parts = list(parameters.values())
        if rows.is_meta:
            y = hollow(rows, parts)
            # what a rank leaves to others counts as zero: the sum over ranks is a pending one
            return y * rows.new_ones(rows.shape[0], 1).bool() if self.alike else y
        if not rows.shape[0]:  # every rank takes part in what comes behind, and in the backward
            return rows + sum(part.flatten()[:0].sum() for part in parts)
        local = self._places(held, rows.device)
        for path in self.routing.experts.numbers:
            set_number(self.module, path, len(held))
        ones = rows.new_ones(rows.shape[0], 1, dtype=dtype)
        with lent(self.module, parameters):
            out: Tensor = self.inner(rows, local[experts][:, None], ones)
        return out

    def _shared_out(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What is added behind the sum over parts of experts: each rank adds its share of it."""
        group, inner = self.within, self.routing.inner
        if group is None or inner is None:
            return parameters
        return {
            name: collective.enter(part, group) / group.size if name in inner.whole else part
            for name, part in parameters.items()
        }


def _divide(module: nn.Module, inner: Inner | None, group: Group) -> None:
    """Let the module count by the inner size of one rank."""
    assert inner is not None
    for path in inner.numbers:
        set_number(module, path, number_at(module, path) // group.size)


@contextmanager
def lent(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """The module with tensors in the place of its parameters, by name."""
    owners = [module.get_submodule(name.rpartition(".")[0]) for name in tensors]
    for owner, (name, tensor) in zip(owners, tensors.items()):
        last = name.rpartition(".")[2]
        if tensor is not owner._parameters[last]:
            owner.__dict__[last] = tensor  # found before the parameter, which stays
    try:
        yield
    finally:
        for owner, name in zip(owners, tensors):
            owner.__dict__.pop(name.rpartition(".")[2], None)
