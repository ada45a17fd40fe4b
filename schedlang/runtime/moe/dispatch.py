"""Dispatch of token rows to the ranks that hold their experts, and back, axis by axis.

First all ranks exchange how many rows go to which expert (FastMoE, He et al. 2021), so that each
host knows the sizes of all exchanges. Over several axes each is a step of its own, so that a row
crosses every axis once (as HetuMoE, Nie et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from schedlang.runtime.comm import world
from schedlang.runtime.comm.collectives import (
    Group,
    all_gather,
    all_to_all_rows,
    count,
    exchange_rows,
)
from schedlang.runtime.device import send_to_device

ExpertPlaces = Sequence[tuple[int, ...]]  # for each expert its place on each axis


def places_of_experts(sizes: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Return the place of each expert on each axis: equal runs, the last axis fastest."""
    ranks = 1
    for size in sizes:
        ranks *= size
    places = []
    for expert in range(count):
        position, coords = expert // (count // ranks), []
        for size in reversed(sizes):
            position, coord = divmod(position, size)
            coords.append(coord)
        places.append(tuple(reversed(coords)))
    return places


def first_true(mask: Tensor, count: int) -> Tensor:
    """Return the indices of the first `count` true elements, without a wait of the host."""
    return torch.argsort(~mask, stable=True)[:count]


def gather_over(x: Tensor, steps: Sequence[DispatchStep]) -> Tensor:
    """Gather one row of each rank along the axes of the steps, the last axis fastest."""
    rows = x.flatten()[None]
    for step in reversed(steps):
        rows = all_gather(rows, 0, step.group)
    return rows


def count_sent_rows(
    experts: Tensor, leaving: Tensor | None, chunks: int, count: int, steps: Sequence[DispatchStep]
) -> Tensor:
    """Count the rows that each rank sends to each expert, by chunk; only those `leaving`."""
    sends = torch.ones_like(experts) if leaving is None else leaving.long()
    index, number = sends.cumsum(0) - sends, sends.sum()  # as tensor_split: larger chunks first
    size, larger = number // chunks, number % chunks
    beyond = larger + (index - larger * (size + 1)).div(size.clamp(min=1), rounding_mode="floor")
    chunk = torch.where(index < larger * (size + 1), index // (size + 1), beyond).clamp(
        0, chunks - 1
    )
    table = experts.new_zeros(chunks * count).scatter_add_(0, chunk * count + experts, sends)
    return gather_over(table, steps).flatten()


@dataclass(frozen=True)
class RowCounts:
    """Row counts of one step: sent and received by place, and received by expert."""

    sent: list[int]
    received: list[int]
    received_by_expert: list[int]


@dataclass(frozen=True)
class ChunkCounts:
    """Row counts of each step, by chunk, on the host."""

    chunks: list[list[RowCounts]]

    @staticmethod
    def of(
        numbers: Sequence[int], chunks: int, count: int, steps: Sequence[DispatchStep]
    ) -> ChunkCounts | None:
        """Return the counts from the numbers of `count_sent_rows`; None if there are none."""
        if not numbers:
            return None
        table = np.array(numbers).reshape(*(step.group.size for step in steps), chunks, count)
        chunk_counts = []
        for chunk in range(chunks):
            arriving, row_counts = table[..., chunk, :], []
            for k, step in enumerate(steps):
                rows = arriving  # by place and expert: rows with this rank's places on later axes
                for later in steps[k + 1 :]:
                    rows = rows[:, later.group.rank]
                local_rows = rows[step.group.rank]
                coming = rows[:, list(step.table[step.group.rank])]
                sent = [int(local_rows[list(reached)].sum()) for reached in step.table]
                received = coming.sum(1).tolist()
                row_counts.append(RowCounts(sent, received, coming.flatten().tolist()))
                arriving = arriving.sum(0)
            chunk_counts.append(row_counts)
        return ChunkCounts(chunk_counts)


class _AsyncExchange(torch.autograd.Function):
    """An exchange that is in flight on return: wait before the rows are read."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, sent: list[int], received: list[int], works: list[Any]
    ) -> Tensor:
        ctx.group, ctx.give, ctx.take = group, sent, received
        arrived = x.new_empty((sum(received), *x.shape[1:]))
        count("all-to-all", group, x)
        work = world.all_to_all_single(arrived, x, received, sent, group.pg)
        works.append((work, x))  # holds the sent tensor until the exchange ends
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return all_to_all_rows(grads[0], ctx.group, ctx.take, ctx.give), None, None, None, None


@dataclass
class RoutedRows:
    """Rows in dispatch: the rows that are here now, their experts, and the steps back."""

    rows: Tensor
    experts: Tensor
    counts: list[RowCounts] | None = None  # of the remaining steps; None without values
    return_steps: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)  # to wait for before the rows are used

    def finish(self) -> None:
        """Wait for the rows in flight."""
        while self.works:
            self.works.pop()[0].wait()

    def return_results(self, y: Tensor) -> Tensor:
        """Return the results of the rows to the ranks where they started, in the first order."""
        for step in reversed(self.return_steps):
            y = step(y)
        return y


@dataclass(frozen=True)
class DispatchStep:
    """One axis of a dispatch: its group, and at each place the experts that are reached there."""

    group: Group
    table: tuple[tuple[int, ...], ...]
    _known: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)

    def dispatch(self, routed: RoutedRows, ahead: bool = False) -> RoutedRows:
        """Dispatch rows along this axis; return those that arrive.

        ahead: do not wait for them; `finish` does.
        """
        if routed.rows.is_meta:
            return self._without_values(routed)
        routed.finish()
        assert routed.counts is not None
        group, counts, device = self.group, routed.counts[0], routed.rows.device
        key, local_experts = self._constants(device)
        order = torch.argsort(key[routed.experts], stable=True)
        sent, received = counts.sent, counts.received
        works: list[Any] = []
        rows = routed.rows[order]
        if ahead and group.pg is not None:
            arrived: Tensor = _AsyncExchange.apply(rows, group, sent, received, works)  # type: ignore[no-untyped-call]
        else:
            arrived = exchange_rows(rows, group, sent, received)
        coming = send_to_device(torch.tensor(counts.received_by_expert), device)
        experts = local_experts.repeat_interleave(coming, output_size=sum(received))

        def home(y: Tensor) -> Tensor:
            return exchange_rows(y, group, received, sent)[torch.argsort(order)]

        return RoutedRows(arrived, experts, routed.counts[1:], [*routed.return_steps, home], works)

    def _constants(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the place of each expert in the table, and the experts of arriving rows, by
        rank."""
        if device not in self._known:
            with _disable_current_modes():  # a second run finds them cached
                flat = [expert for row in self.table for expert in row]
                key = torch.zeros(1 + max(flat), dtype=torch.long)
                key[flat] = torch.arange(len(flat))
                local_experts = torch.tensor(self.table[self.group.rank]).repeat(self.group.size)
                self._known[device] = key.to(device), local_experts.to(device)
        return self._known[device]

    def _without_values(self, routed: RoutedRows) -> RoutedRows:
        """Dispatch on the meta device, as if all experts were chosen equally often."""
        group, count = self.group, routed.rows.shape[0]
        share = count // group.size
        sizes = [count - share * (group.size - 1), *[share] * (group.size - 1)]
        arrived = exchange_rows(routed.rows, group, sizes, sizes)
        return_steps = [*routed.return_steps, lambda y: exchange_rows(y, group, sizes, sizes)]
        return RoutedRows(arrived, routed.experts, None, return_steps)
