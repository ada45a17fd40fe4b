"""Experts that are sharded over ranks: tokens go to the ranks of their experts, and come back.

`ShardedExperts` replaces the forward of a module of experts; `limit_experts` applies the same
capacity rule to a model in one process.
"""

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
from schedlang.runtime.moe.dispatch import (
    ChunkCounts,
    DispatchStep,
    RoutedRows,
    count_sent_rows,
    first_true,
    gather_over,
    places_of_experts,
)
from schedlang.runtime.moe.probe import Experts, InnerSplit
from schedlang.runtime.propagation.stand_ins import is_simulating, stand_in
from schedlang.runtime.sharding.edges import Edge, Forward
from schedlang.runtime.sharding.module_sizes import number_at, set_number

if TYPE_CHECKING:
    from schedlang.runtime.sharding.sharded_layer import ShardedLayer

# -- capacity --------------------------------------------------------------------------------------
# GShard (Lepikhin et al. 2020), Switch Transformers (Fedus et al. 2021). Choices are taken in the
# order of the rows of the batch, on any number of ranks, so the rule does not depend on ranks.


def capacity_mask(
    index: Tensor, count: int, capacity: float, groups: Sequence[Group] = ()
) -> Tensor:
    """Return a mask of the choices [tokens, k] that are within the capacity of their expert.

    The capacity is `capacity` times an even share of all choices, rounded up. `groups` are the
    axes, slowest first, along which other ranks have other tokens.
    """
    flat = index.flatten()
    if index.is_meta:
        one_hot = index.new_empty(len(flat), count)
    else:
        one_hot = torch.nn.functional.one_hot(flat, count)
    counts = one_hot.sum(0)[None]
    rank, size = 0, 1
    for group in reversed(groups):
        counts = all_gather(counts, 0, group)
        rank, size = rank + group.rank * size, size * group.size
    if index.is_meta:  # no values: only what is sent can be seen
        return index.new_empty(index.shape, dtype=torch.bool)
    # on the device; `expert_capacity` computes it on the host
    limit = (counts.sum().double() * capacity / count).ceil().long()
    earlier = counts[:rank].sum(0) + one_hot.cumsum(0) - one_hot
    return (earlier.gather(1, flat[:, None])[:, 0] < limit).view_as(index)


def expert_capacity(choices: int, count: int, capacity: float) -> int:
    """Return the number of choices that an expert may take."""
    return math.ceil(choices * capacity / count)


def rows_by_expert(expert: Tensor, count: int, limit: int) -> tuple[Tensor, Tensor]:
    """Return the row at each of `limit` places of each expert, and whether there is one.

    `expert` of each row: `count` for a row without expert. Free places hold some row.
    """
    order = torch.argsort(expert, stable=True)
    counts = expert.new_zeros(count + 1).scatter_add_(0, expert, torch.ones_like(expert))[:count]
    starts = counts.cumsum(0) - counts
    slot = torch.arange(limit, device=expert.device)
    used = (slot < counts[:, None]).flatten()
    position = (starts[:, None] + slot).flatten().clamp(max=max(0, len(expert) - 1))
    return order[position], used


def apply_capacity(
    inner: Callable[..., Tensor], count: int, capacity: float
) -> Callable[..., Tensor]:
    """Return the forward of all experts in one process with capacity: dropped choices weigh 0."""

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if index.is_meta:
            return inner(hidden, index, weights)
        keep = capacity_mask(index, count, capacity)
        return inner(hidden, index, weights * keep)

    return forward


def limit_experts(model: nn.Module, rules: dict[str, tuple[int, float]]) -> None:
    """Apply the capacity rule, (experts, capacity) by module, to a model in one process."""
    for fqn, (count, capacity) in rules.items():
        module = model.get_submodule(fqn)
        module.forward = apply_capacity(module.forward, count, capacity)


# -- experts over ranks ----------------------------------------------------------------------------
# A rank holds some experts, and computes them by the module's own forward. Along an axis whose
# ranks have different tokens (it splits the batch), rows are sent by all-to-all, or tokens
# gathered, or experts fetched. Along an axis whose ranks have the same tokens, each rank computes
# the tokens of its own experts, and the results are summed, so that nothing is sent twice. The host
# reads the numbers of rows from the device in one wait per layer, and a second run of the layer
# uses the numbers of the first. With a capacity, experts have a fixed number of places, and the
# host need not know how many are free. GShard (Lepikhin et al. 2020), FastMoE (He et al. 2021),
# DeepSpeed-MoE (Rajbhandari et al. 2022), Janus (Liu et al. 2023), FasterMoE (He et al. 2022).


@dataclass(frozen=True)
class Routing:
    """The sharding of the experts of one module, and the dispatch of tokens.

    dispatch  "all_to_all": tokens go to experts; "gather": tokens of all ranks are gathered, if all
              have equally many; "fetch": experts are gathered
    capacity  an expert takes at most this multiple of its even share of tokens; None: all
    chunks    chunks of tokens, each dispatched while the one before is computed
    shadow    experts that are fetched by all ranks, while tokens of other experts are dispatched
    inner     how each expert is sharded over the axis `expert_capacity`, whose ranks have the same
              tokens
    """

    experts: Experts
    dispatch: str = "all_to_all"
    capacity: float | None = None
    chunks: int = 1
    shadow: tuple[int, ...] = ()
    inner: InnerSplit | None = None
    within: str = ""

    def forward_of(self, sharded: ShardedLayer, inner: Forward) -> Forward:
        """Return the forward of a module of experts that is sharded; slow axes come first."""
        return ShardedExperts(sharded.module, inner, sharded.edges, self)


@dataclass(frozen=True)
class CallCounts:
    """Row counts of one call on the host: rows of this rank, how many of them stay, and where the
    others go; with the choices that these counts belong to."""

    index: Tensor
    rows: int
    stay: int
    counts: ChunkCounts | None


def _has_equal_tokens() -> bool:
    """Return whether all ranks are known to have equally many tokens."""
    current = scope.current()
    return current is not None and current.same_shapes is not None and current.same_shapes()


class ShardedExperts:
    """The forward of a module whose experts are sharded."""

    def __init__(
        self, module: nn.Module, inner: Forward, edges: tuple[Edge, ...], routing: Routing
    ) -> None:
        self.module, self.inner, self.routing = module, inner, routing
        self.count = routing.experts.count
        self.summing = tuple(edge for edge in edges if isinstance(edge.output_before, P))
        self.within = next((e.group for e in edges if e.group.axes[0] == routing.within), None)
        if self.within is not None:
            _divide_sizes(module, routing.inner, self.within)
        edges = tuple(edge for edge in edges if edge.group is not self.within)
        self.splitting = tuple(edge for edge in edges if edge not in self.summing)
        self.places = places_of_experts([edge.group.size for edge in edges], self.count)
        self.mine = tuple(edge.group.rank for edge in edges)
        matched = [edge in self.summing for edge in edges]
        # experts of this rank and of ranks with other tokens; then those of this rank alone
        self.reachable = self._experts_at(matched)
        self.held = self._experts_at([True] * len(edges))
        self.shadowed = tuple(expert for expert in self.reachable if expert in routing.shadow)
        self._known: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        self.steps: list[DispatchStep] = []
        for k, edge in enumerate(edges):
            if not matched[k]:
                reached = self._experts_at(matched)
                table = [
                    tuple(e for e in reached if self.places[e][k] == place)
                    for place in range(edge.group.size)
                ]
                self.steps.append(DispatchStep(edge.group, tuple(table)))
                matched[k] = True

    def _experts_at(self, marks: Sequence[bool]) -> tuple[int, ...]:
        """Return the experts with this rank's place on the marked axes."""
        pairs = enumerate(self.places)
        return tuple(
            expert
            for expert, place in pairs
            if all(a == b for a, b, mark in zip(place, self.mine, marks) if mark)
        )

    def _places(self, experts: tuple[int, ...], device: torch.device) -> Tensor:
        """Return the place of each expert among `experts`, -1 for others; cached by device."""
        if (experts, device) not in self._known:
            with _disable_current_modes():  # a second run finds it cached
                places = torch.full((self.count,), -1)
                places[list(experts)] = torch.arange(len(experts))
                self._known[experts, device] = places.to(device)
        return self._known[experts, device]

    def _numbers(self, experts: tuple[int, ...], device: torch.device) -> Tensor:
        """Return the numbers of some experts, on a device."""
        places = self._places(experts, device)
        return torch.argsort(places, stable=True)[self.count - len(experts) :]

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute the experts of all ranks for these tokens."""
        x, w = hidden, weights
        for edge in self.summing:
            x, w = edge.enter(x), edge.enter(w)
        even = index.is_meta or _has_equal_tokens()
        over = self.splitting if self.routing.dispatch == "gather" and even else ()
        for edge in reversed(over):
            x = collectives.gather(x, 0, edge.group, consumers_differ=True)
            w = collectives.gather(w, 0, edge.group, consumers_differ=True)
            index = collectives.all_gather(index, 0, edge.group)
        if self.routing.capacity is not None and even and not self._sends_tokens(over):
            output = self._run_places(x, index, w, over)
        else:
            output = self._run_dropless(x, index, w, over)
        for edge in over:
            output = collectives.scatter_sum(output, 0, edge.group)
        output = output.to(hidden.dtype)
        for edge in self.summing:
            output = edge.exit(output)
        return output

    def _sends_tokens(self, over: Sequence[Edge]) -> bool:
        """Return whether tokens are dispatched to other ranks, after a gather over `over`."""
        return not over and self.routing.dispatch != "fetch" and bool(self.steps)

    def _experts_here(self, over: Sequence[Edge]) -> tuple[int, ...]:
        """Return the experts that tokens may choose here, after a gather over `over`."""
        return self.held if over else self.reachable

    def _capacity_mask(self, index: Tensor, over: Sequence[Edge]) -> Tensor:
        """Return a mask of the choices that are within the capacity."""
        assert self.routing.capacity is not None
        groups = [] if over else [edge.group for edge in self.splitting]
        return capacity_mask(index, self.count, self.routing.capacity, groups)

    # -- all choices -------------------------------------------------------------------------------

    def _run_dropless(self, x: Tensor, index: Tensor, w: Tensor, over: Sequence[Edge]) -> Tensor:
        """Compute experts for as many rows as choose them."""
        memo, key = scope.pass_memo(), (id(self), scope.count_call(f"experts {id(self)}"))
        counts = None if memo is None else memo.get(key)
        if counts is not None:  # a second run: rows go where they went
            index = counts.index
        local = self._local_choices(index, over)
        if counts is None:
            counts = CallCounts(index, *self._count_rows(index, local, over))
            if memo is not None and not index.is_meta:
                memo[key] = counts
        places, experts = self._order_choices(index, local, counts)
        token = places // index.shape[1]
        y = self._run_rows(x[token], experts, w.dtype, counts, over) * w.flatten()[places][:, None]
        return torch.zeros_like(x, dtype=y.dtype).index_add(0, token, y)

    def _local_choices(self, index: Tensor, over: Sequence[Edge]) -> Tensor | None:
        """Return a mask of the choices that this rank handles; None: all."""
        reachable, mask = self._experts_here(over), None
        if len(reachable) < self.count:
            mask = (self._places(reachable, index.device) >= 0)[index].flatten()
        if self.routing.capacity is None:
            return mask
        within = self._capacity_mask(index, over).flatten()
        return within if mask is None else mask & within

    def _count_rows(
        self, index: Tensor, local: Tensor | None, over: Sequence[Edge]
    ) -> tuple[int, int, ChunkCounts | None]:
        """Return the counts of this rank's rows, of those that stay, and of all by rank and expert.

        This is the only wait of the host for the device.
        """
        flat, count = index.flatten(), index.numel()
        sends = self._sends_tokens(over)
        if index.is_meta:  # no values: as if all experts were chosen equally often
            rows = count * len(self._experts_here(over)) // self.count
            stay = rows * len(self.shadowed) // len(self.reachable)
            if sends:
                gather_over(flat.new_empty(self.routing.chunks, self.count), self.steps)
            return rows, stay, None
        with torch.no_grad(), _disable_current_modes():  # a second run skips this
            stays = self._shadowed_choices(flat, local)
            counts = [mask.sum()[None] for mask in (local, stays) if mask is not None]
            if sends:
                leaving = local if stays is None else ~stays if local is None else local & ~stays
                counts.append(
                    count_sent_rows(flat, leaving, self.routing.chunks, self.count, self.steps)
                )
            numbers = torch.cat(counts).tolist() if counts else []
        rows = numbers.pop(0) if local is not None else count
        stay = numbers.pop(0) if stays is not None else 0
        return rows, stay, ChunkCounts.of(numbers, self.routing.chunks, self.count, self.steps)

    def _shadowed_choices(self, flat: Tensor, local: Tensor | None) -> Tensor | None:
        """Return a mask of choices that stay, as their experts are fetched; None: there are
        none."""
        if not self.shadowed:
            return None
        stays = (self._places(self.shadowed, flat.device) >= 0)[flat]
        return stays if local is None else stays & local

    def _order_choices(
        self, index: Tensor, local: Tensor | None, counts: CallCounts
    ) -> tuple[Tensor, Tensor]:
        """Return the choices of this rank and their experts; first those that stay."""
        flat = index.flatten()
        if flat.is_meta:
            return flat.new_empty(counts.rows), flat.new_empty(counts.rows)
        stays = self._shadowed_choices(flat, local)
        if stays is not None:
            leaving = ~stays if local is None else local & ~stays
            places = torch.cat(
                [first_true(stays, counts.stay), first_true(leaving, counts.rows - counts.stay)]
            )
        elif local is not None:
            places = first_true(local, counts.rows)
        else:
            return torch.arange(len(flat), device=flat.device), flat
        return places, flat[places]

    def _run_rows(
        self,
        rows: Tensor,
        experts: Tensor,
        dtype: torch.dtype,
        counts: CallCounts,
        over: Sequence[Edge],
    ) -> Tensor:
        """Compute experts for rows, one expert each, in the order of the rows."""
        if over or self.routing.dispatch == "fetch":
            return self._run_experts(rows, experts, dtype, *self._parameters_here())
        if not self.shadowed:
            return self._run_dispatched(rows, experts, dtype, counts.counts)
        stay = counts.stay
        stayed = self._run_experts(
            rows[:stay], experts[:stay], dtype, self._fetch_shadowed(), self.shadowed
        )
        return torch.cat(
            [stayed, self._run_dispatched(rows[stay:], experts[stay:], dtype, counts.counts)]
        )

    def _parameters_here(self) -> tuple[Mapping[str, Tensor], tuple[int, ...]]:
        """Return the parameters of the experts on this rank, and their numbers."""
        if self.routing.dispatch == "fetch":
            return self._fetch_experts(), self.reachable
        return self._own_parameters(), self.held

    def _own_parameters(self) -> dict[str, Tensor]:
        return {name: getattr(self.module, name) for name in self.routing.experts.split}

    # -- places of experts -------------------------------------------------------------------------

    def _run_places(self, x: Tensor, index: Tensor, w: Tensor, over: Sequence[Edge]) -> Tensor:
        """Compute experts for all their places, used or free.

        A free place computes some row, with weight 0.
        """
        count, choices = index.shape[1], index.numel()
        ranks = 1 if over else math.prod(edge.group.size for edge in self.splitting)
        parameters, numbers = self._parameters_here()
        capacity = self.routing.capacity
        assert capacity is not None
        limit = min(expert_capacity(choices * ranks, self.count, capacity), choices)
        local = self._places(numbers, index.device)[index.flatten()]
        taken = (local >= 0) & self._capacity_mask(index, over).flatten()
        row, used = rows_by_expert(local.masked_fill(~taken, len(numbers)), len(numbers), limit)
        token = row // count
        experts = self._numbers(numbers, x.device)[:, None].expand(-1, limit).reshape(-1)
        y = self._run_experts(x[token], experts, w.dtype, parameters, numbers)
        y = y * (w.flatten()[row] * used)[:, None]
        return torch.zeros_like(x, dtype=y.dtype).index_add(0, token, y)

    # -- tokens to experts -------------------------------------------------------------------------

    def _run_dispatched(
        self, rows: Tensor, experts: Tensor, dtype: torch.dtype, counts: ChunkCounts | None
    ) -> Tensor:
        """Dispatch rows to the ranks of their experts, chunk by chunk, and return the results."""
        chunks, results, parameters = self.routing.chunks, [], self._own_parameters()
        by_chunk = [None] * chunks if counts is None else counts.chunks
        parts = [
            RoutedRows(*all_)
            for all_ in zip(rows.tensor_split(chunks), experts.tensor_split(chunks), by_chunk)
        ]
        current = self._dispatch(parts.pop(0), chunks > 1)
        while True:
            after = self._dispatch(parts.pop(0), True) if parts else None
            current.finish()
            results.append(
                current.return_results(
                    self._run_experts(current.rows, current.experts, dtype, parameters, self.held)
                )
            )
            if after is None:
                return torch.cat(results) if chunks > 1 else results[0]
            current = after

    def _dispatch(self, routed: RoutedRows, ahead: bool) -> RoutedRows:
        """Dispatch rows along all axes; `ahead`: without a wait for the last one."""
        for step in self.steps:
            routed = step.dispatch(routed, ahead and step is self.steps[-1])
        return routed

    # -- experts to tokens -------------------------------------------------------------------------

    def _fetch_experts(self) -> dict[str, Tensor]:
        """Gather the experts of this rank's tokens; gradients are reduced to their ranks."""
        parameters: dict[str, Tensor] = {}
        for name in self.routing.experts.split:
            parameter = getattr(self.module, name)
            # an operator reads it, as a gather
            part: Tensor = parameter * 1 if parameter.is_meta else parameter
            for edge in reversed(self.splitting):
                part = collectives.gather(part, 0, edge.group, consumers_differ=True)
            parameters[name] = part
        return parameters

    def _fetch_shadowed(self) -> dict[str, Tensor]:
        """Return copies of the shadowed experts; gradients are reduced to their ranks."""
        copies: dict[str, Tensor] = {}
        for name in self.routing.experts.split:
            part = getattr(self.module, name)
            shadowed = self._numbers(self.shadowed, part.device)
            places = self._places(self.held, part.device)[shadowed]
            mask = (places >= 0).view(-1, *[1] * (part.ndim - 1))
            copy = part[places.clamp(min=0)] * mask
            for edge in self.splitting:
                copy = collectives.enter(collectives.reduce(copy, edge.group), edge.group)
            copies[name] = copy
        return copies

    # -- the module's own forward ------------------------------------------------------------------

    def _run_experts(
        self,
        rows: Tensor,
        experts: Tensor,
        dtype: torch.dtype,
        parameters: Mapping[str, Tensor],
        local_experts: tuple[int, ...],
    ) -> Tensor:
        """Compute the experts `local_experts`, with these parameters, for rows of one expert
        each."""
        parameters = self._divide_biases(parameters)
        parts = list(parameters.values())
        if rows.is_meta and is_simulating():
            with suppress(Exception):  # the module may fail without values
                return self._run_module(rows, experts, dtype, parameters, local_experts)
        if rows.is_meta:
            y = stand_in(rows, parts)
            # choices of other ranks count as zero: the result is a partial sum
            summed = self.summing or self.routing.dispatch == "gather"
            return y * rows.new_ones(rows.shape[0], 1).bool() if summed else y
        if not rows.shape[0]:  # every rank must join in later collectives and in the backward
            return rows + sum(part.flatten()[:0].sum() for part in parts)
        return self._run_module(rows, experts, dtype, parameters, local_experts)

    def _run_module(
        self,
        rows: Tensor,
        experts: Tensor,
        dtype: torch.dtype,
        parameters: Mapping[str, Tensor],
        local_experts: tuple[int, ...],
    ) -> Tensor:
        local = self._places(local_experts, rows.device)
        for path in self.routing.experts.numbers:
            set_number(self.module, path, len(local_experts))
        ones = rows.new_ones(rows.shape[0], 1, dtype=dtype)
        with replace_parameters(self.module, parameters):
            output: Tensor = self.inner(rows, local[experts][:, None], ones)
        return output

    def _divide_biases(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Divide biases that are added after the sum over ranks: each rank adds its share."""
        group, inner = self.within, self.routing.inner
        if group is None or inner is None:
            return parameters
        return {
            name: collectives.enter(part, group) / group.size if name in inner.whole else part
            for name, part in parameters.items()
        }


def _divide_sizes(module: nn.Module, inner: InnerSplit | None, group: Group) -> None:
    """Set the inner sizes of the module to those of one rank."""
    assert inner is not None
    for path in inner.numbers:
        set_number(module, path, number_at(module, path) // group.size)


@contextmanager
def replace_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace parameters of a module by tensors, by name, within a block."""
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
