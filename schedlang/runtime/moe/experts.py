"""Experts on several ranks: tokens go to the ranks that hold their experts, and come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from schedlang.ir.placement import P
from schedlang.runtime import scope
from schedlang.runtime.comm import collectives
from schedlang.runtime.comm.collectives import Group, all_gather
from schedlang.runtime.moe.dispatch import Counts, Step, Way, everywhere, first, place_of, sent_by
from schedlang.runtime.moe.probe import Experts, Inner
from schedlang.runtime.propagation.stand_ins import playing, stand_in
from schedlang.runtime.sharding.shard import Edge, Forward
from schedlang.runtime.sharding.sizes import number_at, set_number

if TYPE_CHECKING:
    from schedlang.runtime.sharding.leaf import Sharded

# -- capacity --------------------------------------------------------------------------------------
# GShard (Lepikhin et al. 2020), Switch Transformers (Fedus et al. 2021).  The order is that of the
# rows of the batch, on however many ranks they are, so that the rule does not know of ranks.


def kept(index: Tensor, count: int, capacity: float, groups: Sequence[Group] = ()) -> Tensor:
    """Return a mask of the choices [tokens, k] that are within their expert's capacity.

    An expert takes `capacity` times what it would get if all were chosen equally often, rounded
    up.  `groups` are the axes, slowest first, along which other ranks hold other tokens.
    """
    flat = index.flatten()
    if index.is_meta:
        chosen = index.new_empty(len(flat), count)
    else:
        chosen = torch.nn.functional.one_hot(flat, count)
    everyone = chosen.sum(0)[None]
    place, size = 0, 1
    for group in reversed(groups):
        everyone = all_gather(everyone, 0, group)
        place, size = place + group.rank * size, size * group.size
    if index.is_meta:  # no values: only what is sent can be seen
        return index.new_empty(index.shape, dtype=torch.bool)
    # the host need not know; `within` where it does
    limit = (everyone.sum().double() * capacity / count).ceil().long()
    before = everyone[:place].sum(0) + chosen.cumsum(0) - chosen
    return (before.gather(1, flat[:, None])[:, 0] < limit).view_as(index)


def within(choices: int, count: int, capacity: float) -> int:
    """Return the number of choices that an expert may take."""
    return math.ceil(choices * capacity / count)


def places_of_rows(expert: Tensor, count: int, limit: int) -> tuple[Tensor, Tensor]:
    """Return the row at each of `limit` places of each expert, and whether there is one.

    `expert` of each row: `count` for a row that has none. Free places name some row.
    """
    order = torch.argsort(expert, stable=True)
    each = expert.new_zeros(count + 1).scatter_add_(0, expert, torch.ones_like(expert))[:count]
    first = each.cumsum(0) - each
    turn = torch.arange(limit, device=expert.device)
    used = (turn < each[:, None]).flatten()
    place = (first[:, None] + turn).flatten().clamp(max=max(0, len(expert) - 1))
    return order[place], used


def with_capacity(
    inner: Callable[..., Tensor], count: int, capacity: float
) -> Callable[..., Tensor]:
    """The forward of all experts in one process under the rule: what is dropped weighs nothing."""

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if index.is_meta:
            return inner(hidden, index, weights)
        keep = kept(index, count, capacity)
        return inner(hidden, index, weights * keep)

    return forward


def limit_experts(model: nn.Module, rules: dict[str, tuple[int, float]]) -> None:
    """Put the rule, (experts, capacity) by module, into a model of one process."""
    for fqn, (count, capacity) in rules.items():
        module = model.get_submodule(fqn)
        module.forward = with_capacity(module.forward, count, capacity)


# -- experts over ranks ----------------------------------------------------------------------------
# A rank holds some experts, and computes them by their module's own forward.  Along an axis whose
# ranks see different tokens (it splits the batch) rows are sent by all-to-all, or tokens gathered,
# or experts fetched; along one whose ranks see the same tokens each rank takes those of its own
# experts, and what ranks give is summed, so that nothing is sent twice.  How many rows there are,
# and go where, the host learns from the device in one wait for a layer, and a second run of the
# layer takes what the first was told; with a capacity experts have places, as many as they may
# take, and the host need not know how many of them are free.  GShard (Lepikhin et al. 2020),
# FastMoE (He et al. 2021), DeepSpeed-MoE (Rajbhandari et al. 2022), Janus (Liu et al. 2023),
# FasterMoE (He et al. 2022).


@dataclass(frozen=True)
class Routing:
    """The placement of one module's experts, and the way of tokens to them.

    dispatch  "all_to_all": tokens go to experts; "gather": those of all ranks come to all, where
              all have as many; "fetch": experts come to tokens
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

    def forward_of(self, sharded: Sharded, inner: Forward) -> Forward:
        """A module of experts of which this rank holds a part; slow axes come first."""
        return ShardedExperts(sharded.module, inner, sharded.edges, self)


@dataclass(frozen=True)
class Noted:
    """Row counts of one call on the host: rows that are this rank's, how many of them stay, and
    where the others go; with the choices that it was told of."""

    index: Tensor
    rows: int
    stay: int
    counts: Counts | None


def _even() -> bool:
    """Tell whether all ranks are known to have equally many tokens."""
    here = scope.current()
    return here is not None and here.even is not None and here.even()


class ShardedExperts:
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
                table = [
                    tuple(e for e in reached if self.places[e][k] == at)
                    for at in range(edge.group.size)
                ]
                self.steps.append(Step(edge.group, tuple(table)))
                here[k] = True

    def _at(self, here: Sequence[bool]) -> tuple[int, ...]:
        """The experts whose place is this rank's on the axes that are marked."""
        pairs = enumerate(self.places)
        return tuple(
            expert
            for expert, place in pairs
            if all(a == b for a, b, same in zip(place, self.mine, here) if same)
        )

    def _places(self, some: tuple[int, ...], device: torch.device) -> Tensor:
        """Return each expert's place among `some`, -1 for others; cached by device."""
        if (some, device) not in self._known:
            with _disable_current_modes():  # a second run of this call makes it no more
                found = torch.full((self.count,), -1)
                found[list(some)] = torch.arange(len(some))
                self._known[some, device] = found.to(device)
        return self._known[some, device]

    def _numbers(self, some: tuple[int, ...], device: torch.device) -> Tensor:
        """The numbers of some experts, on a device."""
        places = self._places(some, device)
        return torch.argsort(places, stable=True)[self.count - len(some) :]

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute the experts of all ranks for these tokens."""
        x, w = hidden, weights
        for edge in self.alike:
            x, w = edge.enter(x), edge.enter(w)
        even = index.is_meta or _even()
        over = self.apart if self.routing.dispatch == "gather" and even else ()
        for edge in reversed(over):
            x = collectives.gather(x, 0, edge.group, consumers_differ=True)
            w = collectives.gather(w, 0, edge.group, consumers_differ=True)
            index = collectives.all_gather(index, 0, edge.group)
        if self.routing.capacity is not None and even and not self._sends(over):
            out = self._placed(x, index, w, over)
        else:
            out = self._dropless(x, index, w, over)
        for edge in over:
            out = collectives.scatter_sum(out, 0, edge.group)
        out = out.to(hidden.dtype)
        for edge in self.alike:
            out = edge.exit(out)
        return out

    def _sends(self, over: Sequence[Edge]) -> bool:
        """Tell whether tokens are sent to other ranks, after those of some ranks were gathered."""
        return not over and self.routing.dispatch != "fetch" and bool(self.steps)

    def _near(self, over: Sequence[Edge]) -> tuple[int, ...]:
        """The experts that tokens here may choose and meet, once those of some ranks are here."""
        return self.held if over else self.reach

    def _kept(self, index: Tensor, over: Sequence[Edge]) -> Tensor:
        """Return a mask of the choices that are within the capacity."""
        assert self.routing.capacity is not None
        groups = [] if over else [edge.group for edge in self.apart]
        return kept(index, self.count, self.routing.capacity, groups)

    # -- all that is chosen ------------------------------------------------------------------------

    def _dropless(self, x: Tensor, index: Tensor, w: Tensor, over: Sequence[Edge]) -> Tensor:
        """Compute experts for as many rows as choose them."""
        known, key = scope.memo(), (id(self), scope.next_call(f"experts {id(self)}"))
        noted = None if known is None else known.get(key)
        if noted is not None:  # a second run: where rows went they go again
            index = noted.index
        mine = self._mine(index, over)
        if noted is None:
            noted = Noted(index, *self._told(index, mine, over))
            if known is not None and not index.is_meta:
                known[key] = noted
        places, experts = self._chosen(index, mine, noted)
        token = places // index.shape[1]
        y = self._routed(x[token], experts, w.dtype, noted, over) * w.flatten()[places][:, None]
        return torch.zeros_like(x, dtype=y.dtype).index_add(0, token, y)

    def _mine(self, index: Tensor, over: Sequence[Edge]) -> Tensor | None:
        """Return a mask of the choices that this rank handles; None: all."""
        near, every = self._near(over), None
        if len(near) < self.count:
            every = (self._places(near, index.device) >= 0)[index].flatten()
        if self.routing.capacity is None:
            return every
        within = self._kept(index, over).flatten()
        return within if every is None else every & within

    def _told(
        self, index: Tensor, mine: Tensor | None, over: Sequence[Edge]
    ) -> tuple[int, int, Counts | None]:
        """Return the counts of this rank's rows, of those that stay, and of all by rank and expert.

        The one time that the host waits for the device.
        """
        flat, count = index.flatten(), index.numel()
        sends = self._sends(over)
        if index.is_meta:  # no values: as if all experts were chosen equally often
            rows = count * len(self._near(over)) // self.count
            stay = rows * len(self.shadowed) // len(self.reach)
            if sends:
                everywhere(flat.new_empty(self.routing.chunks, self.count), self.steps)
            return rows, stay, None
        with torch.no_grad(), _disable_current_modes():  # a second run asks for none of this
            near = self._shadowing(flat, mine)
            asked = [one.sum()[None] for one in (mine, near) if one is not None]
            if sends:
                away = mine if near is None else ~near if mine is None else mine & ~near
                asked.append(sent_by(flat, away, self.routing.chunks, self.count, self.steps))
            told = torch.cat(asked).tolist() if asked else []
        rows = told.pop(0) if mine is not None else count
        stay = told.pop(0) if near is not None else 0
        return rows, stay, Counts.of(told, self.routing.chunks, self.count, self.steps)

    def _shadowing(self, flat: Tensor, mine: Tensor | None) -> Tensor | None:
        """Return a mask of choices that stay, because their experts are fetched; None: none can."""
        if not self.shadowed:
            return None
        near = (self._places(self.shadowed, flat.device) >= 0)[flat]
        return near if mine is None else near & mine

    def _chosen(self, index: Tensor, mine: Tensor | None, noted: Noted) -> tuple[Tensor, Tensor]:
        """The choices that are this rank's, and their experts; first those that stay."""
        flat = index.flatten()
        if flat.is_meta:
            return flat.new_empty(noted.rows), flat.new_empty(noted.rows)
        near = self._shadowing(flat, mine)
        if near is not None:
            away = ~near if mine is None else mine & ~near
            places = torch.cat([first(near, noted.stay), first(away, noted.rows - noted.stay)])
        elif mine is not None:
            places = first(mine, noted.rows)
        else:
            return torch.arange(len(flat), device=flat.device), flat
        return places, flat[places]

    def _routed(
        self, rows: Tensor, experts: Tensor, dtype: torch.dtype, noted: Noted, over: Sequence[Edge]
    ) -> Tensor:
        """Compute experts for rows, one expert each, in the order of the rows."""
        if over or self.routing.dispatch == "fetch":
            return self._called(rows, experts, dtype, *self._here(over))
        if not self.shadowed:
            return self._sent(rows, experts, dtype, noted.counts)
        stay = noted.stay
        stayed = self._called(rows[:stay], experts[:stay], dtype, self._shadows(), self.shadowed)
        return torch.cat([stayed, self._sent(rows[stay:], experts[stay:], dtype, noted.counts)])

    def _here(self, over: Sequence[Edge]) -> tuple[Mapping[str, Tensor], tuple[int, ...]]:
        """The parameters of the experts that tokens meet here, and which they are."""
        if self.routing.dispatch == "fetch":
            return self._fetched(), self.reach
        return self._own(), self.held

    def _own(self) -> dict[str, Tensor]:
        return {name: getattr(self.module, name) for name in self.routing.experts.split}

    # -- places of experts -------------------------------------------------------------------------

    def _placed(self, x: Tensor, index: Tensor, w: Tensor, over: Sequence[Edge]) -> Tensor:
        """Compute experts for all their places, used or free.

        A free place computes some row, which weighs nothing.
        """
        count, choices = index.shape[1], index.numel()
        ranks = 1 if over else math.prod(edge.group.size for edge in self.apart)
        parameters, held = self._here(over)
        capacity = self.routing.capacity
        assert capacity is not None
        limit = min(within(choices * ranks, self.count, capacity), choices)
        local = self._places(held, index.device)[index.flatten()]
        taken = (local >= 0) & self._kept(index, over).flatten()
        place, used = places_of_rows(local.masked_fill(~taken, len(held)), len(held), limit)
        token = place // count
        experts = self._numbers(held, x.device)[:, None].expand(-1, limit).reshape(-1)
        y = self._called(x[token], experts, w.dtype, parameters, held)
        y = y * (w.flatten()[place] * used)[:, None]
        return torch.zeros_like(x, dtype=y.dtype).index_add(0, token, y)

    # -- tokens to experts -------------------------------------------------------------------------

    def _sent(
        self, rows: Tensor, experts: Tensor, dtype: torch.dtype, counts: Counts | None
    ) -> Tensor:
        """Rows go to the ranks of their experts, chunk by chunk, and come back."""
        chunks, done, own = self.routing.chunks, [], self._own()
        told = [None] * chunks if counts is None else counts.chunks
        parts = [
            Way(*all_)
            for all_ in zip(rows.tensor_split(chunks), experts.tensor_split(chunks), told)
        ]
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
            whole = getattr(self.module, name)
            part: Tensor = whole * 1 if whole.is_meta else whole  # read, as a gather does
            for edge in reversed(self.apart):
                part = collectives.gather(part, 0, edge.group, consumers_differ=True)
            found[name] = part
        return found

    def _shadows(self) -> dict[str, Tensor]:
        """Copies of the shadowed experts; their gradients are summed where the experts live."""
        found: dict[str, Tensor] = {}
        for name in self.routing.experts.split:
            part = getattr(self.module, name)
            shadowed = self._numbers(self.shadowed, part.device)
            at = self._places(self.held, part.device)[shadowed]
            mask = (at >= 0).view(-1, *[1] * (part.ndim - 1))
            copy = part[at.clamp(min=0)] * mask
            for edge in self.apart:
                copy = collectives.enter(collectives.reduce(copy, edge.group), edge.group)
            found[name] = copy
        return found

    # -- the module's own forward ------------------------------------------------------------------

    def _called(
        self,
        rows: Tensor,
        experts: Tensor,
        dtype: torch.dtype,
        parameters: Mapping[str, Tensor],
        held: tuple[int, ...],
    ) -> Tensor:
        """Compute the experts `held`, with these parameters, for rows of one expert each."""
        parameters = self._shared_out(parameters)
        parts = list(parameters.values())
        if rows.is_meta and playing():
            with suppress(Exception):  # the module's own, on what only values tell
                return self._computed(rows, experts, dtype, parameters, held)
        if rows.is_meta:
            y = stand_in(rows, parts)
            # what a rank leaves to others counts as zero: the sum over ranks is a pending one
            summed = self.alike or self.routing.dispatch == "gather"
            return y * rows.new_ones(rows.shape[0], 1).bool() if summed else y
        if not rows.shape[0]:  # every rank takes part in what comes behind, and in the backward
            return rows + sum(part.flatten()[:0].sum() for part in parts)
        return self._computed(rows, experts, dtype, parameters, held)

    def _computed(
        self,
        rows: Tensor,
        experts: Tensor,
        dtype: torch.dtype,
        parameters: Mapping[str, Tensor],
        held: tuple[int, ...],
    ) -> Tensor:
        local = self._places(held, rows.device)
        for path in self.routing.experts.numbers:
            set_number(self.module, path, len(held))
        ones = rows.new_ones(rows.shape[0], 1, dtype=dtype)
        with lent(self.module, parameters):
            out: Tensor = self.inner(rows, local[experts][:, None], ones)
        return out

    def _shared_out(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Divide biases that are added after the sum over parts: each rank adds its share."""
        group, inner = self.within, self.routing.inner
        if group is None or inner is None:
            return parameters
        return {
            name: collectives.enter(part, group) / group.size if name in inner.whole else part
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
