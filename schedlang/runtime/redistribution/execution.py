"""Execution of a route on this rank: pack elements into flat buckets, send, receive, unpack."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schedlang.runtime import device as devices
from schedlang.runtime.comm import world
from schedlang.runtime.redistribution.route import (
    LayoutPair,
    Route,
    TensorLayout,
    find_route,
    group_by_layout,
)
from schedlang.runtime.redistribution.sharding import NOWHERE, Overlap, copy_overlap, overlaps

ALIGNMENT = 16  # bytes of the largest element: a bucket ends between elements of any kind
MAX_IN_FLIGHT = 2  # the most buckets in flight in each direction
LocalTensors = Callable[[Any], Tensor]  # name -> this rank's part of the tensor, written in place


def bucket_size(requested: int) -> int:
    """Return the bytes of a bucket: `requested` rounded down to full elements, at least one."""
    return max(requested // ALIGNMENT, 1) * ALIGNMENT


@dataclass(frozen=True)
class _Stretch:
    """Elements that one rank sends to another, of tensors of one kind: a row of a route."""

    kind: LayoutPair
    boxes: tuple[Overlap, ...]  # of each tensor
    low: int
    high: int

    @cached_property
    def each(self) -> int:
        """The number of elements of one tensor."""
        return sum(math.prod(box.size) for box in self.boxes)

    @property
    def bytes(self) -> int:
        """The bytes of the stretch."""
        return (self.high - self.low) * self.kind.itemsize

    def pieces(self, low: int, high: int, local: LocalTensors, sends: bool) -> Iterator[Tensor]:
        """Yield views of the elements from `low` to `high`, in order.

        `sends`: `local` gives the sender's parts, else the receiver's.
        """
        while low < high:
            number, offset = divmod(low, self.each)
            end = min(high - number * self.each, self.each)
            tensor = local(self.kind.names[number])
            box_start = 0
            for box in self.boxes:
                size = math.prod(box.size)
                start, stop = max(offset - box_start, 0), min(end - box_start, size)
                if start < stop:
                    view = box.view(tensor, box.here if sends else box.there)
                    yield from _views_of_range(view, start, stop)
                box_start += size
            low = number * self.each + end


def _views_of_range(view: Tensor, low: int, high: int) -> Iterator[Tensor]:
    """Yield views of the elements from `low` to `high` of a box, in row-major order."""
    if view.ndim == 0 or (low, high) == (0, view.numel()):
        yield view
    elif view.ndim == 1:
        yield view[low:high]
    else:
        row = view[0].numel()
        first_row, last_row = -(-low // row), high // row
        if first_row > last_row:  # within one row
            yield from _views_of_range(view[last_row], low - last_row * row, high - last_row * row)
            return
        if low % row:
            yield from _views_of_range(view[first_row - 1], low % row, row)
        if first_row < last_row:
            yield view[first_row:last_row]
        if high % row:
            yield from _views_of_range(view[last_row], 0, high % row)


@dataclass(frozen=True)
class _Stream:
    """All elements that one rank sends to another: concatenated stretches."""

    stretches: tuple[_Stretch, ...]

    @cached_property
    def bytes(self) -> int:
        """The bytes of all stretches."""
        return sum(stretch.bytes for stretch in self.stretches)

    def copy(self, low: int, flat: Tensor, local: LocalTensors, sends: bool) -> None:
        """Pack the bucket `flat`, which begins at byte `low` of the stream, or unpack it."""
        high, start = low + flat.numel(), 0
        for stretch in self.stretches:
            item, end = stretch.kind.itemsize, start + stretch.bytes
            if start < high and low < end:
                begin, stop = max(low, start), min(high, end)
                spans = stretch.low + (begin - start) // item, stretch.low + (stop - start) // item
                offset = begin - low
                for view in stretch.pieces(*spans, local, sends):
                    size = view.numel() * item
                    part = flat[offset : offset + size].view(view.dtype).view(view.shape)
                    part.copy_(view) if sends else view.copy_(part)
                    offset += size
            start = end


@dataclass
class Traffic:
    """The bytes and messages that this rank has sent and received, and the bytes copied locally."""

    sent: int = 0
    received: int = 0
    messages: int = 0
    copied: int = 0
    most: int = 0  # bytes of buckets that were alive at once


def bucket_device(device: torch.device) -> torch.device:
    """Return the device of buckets for tensors on `device`: the host if the backend is gloo."""
    kind = world.current_world().backends.get(device.type, "gloo")
    return devices.HOST if kind == "gloo" else device


def redistribute_tensors(
    source: Mapping[Any, TensorLayout],
    target: Mapping[Any, TensorLayout],
    reads: LocalTensors,
    writes: LocalTensors,
    bucket: int,
    device: torch.device,
    gaps: bool = False,
) -> tuple[Route, Traffic]:
    """Redistribute all tensors from one layout to another; all ranks of the world must call this.

    `reads` and `writes` give this rank's source and target parts by name.  `gaps`: elements that no
    rank holds are left unchanged; else Uncovered is raised.
    """
    route = find_route(group_by_layout(source, target), world.size(), gaps)
    return route, redistribute_by_route(route, reads, writes, bucket, device)


def redistribute_by_route(
    route: Route, reads: LocalTensors, writes: LocalTensors, bucket: int, device: torch.device
) -> Traffic:
    """Redistribute tensors by a known route; all ranks of the world must call this."""
    job = world.current_world()
    make = job.host_group if devices.on_host(device) else job.make_group
    group = make([tuple(range(job.size))], "transfer") if len(route.kind) else None
    return execute_route(route, job.rank, reads, writes, bucket_size(bucket), group, device)


def execute_route(
    route: Route,
    rank: int,
    source: LocalTensors,
    target: LocalTensors,
    bucket: int,
    group: world.ProcessGroup | None,
    device: torch.device,
) -> Traffic:
    """Execute a route on this rank; all ranks of the group must call this.

    `source` and `target` give this rank's parts by name.  In turn `n` each rank sends to the rank
    `n` places after it and receives from the rank `n` places before it, bucket by bucket: so there
    is no deadlock, and at most `MAX_IN_FLIGHT` buckets in each direction exist at a time.
    """
    traffic = Traffic()
    with torch._C.DisableTorchFunction(), torch.no_grad():
        _copy_local(route, rank, source, target, traffic)
        outgoing, incoming = _streams(route, rank)
        distances = sorted(
            {(dest - rank) % route.world for dest in outgoing}
            | {(rank - origin) % route.world for origin in incoming}
        )
        in_flight: list[_Exchange] = []
        for distance in distances:
            dest, origin = (rank + distance) % route.world, (rank - distance) % route.world
            send, receive = outgoing.get(dest), incoming.get(origin)
            longest = max(stream.bytes for stream in (send, receive) if stream is not None)
            for low in range(0, longest, bucket):
                if len(in_flight) == MAX_IN_FLIGHT:
                    in_flight.pop(0).end(target)
                exchange = _Exchange(low, send, receive, bucket, device)
                exchange.begin(source, dest, origin, group)
                in_flight.append(exchange)
                traffic.sent += exchange.out.numel()
                traffic.received += exchange.into.numel()
                traffic.messages += exchange.out.numel() > 0
                in_use = sum(m.out.numel() + m.into.numel() for m in in_flight)
                traffic.most = max(traffic.most, in_use)
        for exchange in in_flight:
            exchange.end(target)
    return traffic


class _Exchange:
    """A bucket that is sent, and one that is received at the same time; either may be empty."""

    def __init__(
        self,
        low: int,
        outgoing: _Stream | None,
        incoming: _Stream | None,
        bucket: int,
        device: torch.device,
    ) -> None:
        def allocate(stream: _Stream | None) -> Tensor:
            size = 0 if stream is None else min(bucket, max(stream.bytes - low, 0))
            return torch.empty(size, dtype=torch.uint8, device=device)

        self.low, self.give, self.take = low, outgoing, incoming
        self.out, self.into = allocate(outgoing), allocate(incoming)

    def begin(
        self, source: LocalTensors, dest: int, origin: int, group: world.ProcessGroup | None
    ) -> None:
        """Pack the outgoing bucket, and start both transfers."""
        sends, receives = [], []
        if self.give is not None and self.out.numel():
            self.give.copy(self.low, self.out, source, True)
            sends.append((self.out, dest))
        if self.take is not None and self.into.numel():
            receives.append((self.into, origin))
        self.works = world.batch_isend_irecv(sends, receives, group)

    def end(self, target: LocalTensors) -> None:
        """Wait for both transfers, and unpack the received bucket."""
        for work in self.works:
            work.wait()
        if self.take is not None and self.into.numel():
            self.take.copy(self.low, self.into, target, False)


def _streams(route: Route, rank: int) -> tuple[Mapping[int, _Stream], Mapping[int, _Stream]]:
    """Return this rank's streams to and from each other rank; cached in the route."""
    if rank not in route.streams:
        route.streams[rank] = _build_streams(route, rank)
    streams: tuple[Mapping[int, _Stream], Mapping[int, _Stream]] = route.streams[rank]
    return streams


def _build_streams(route: Route, rank: int) -> tuple[Mapping[int, _Stream], Mapping[int, _Stream]]:
    by_parts: dict[tuple[int, int, int], tuple[Overlap, ...]] = {}

    def stretch(row: int) -> _Stretch:
        kind = route.kinds[route.kind[row]]
        a = int(kind.source.part_of_rank[route.sender[row]])
        b = int(kind.target.part_of_rank[route.receiver[row]])
        key = int(route.kind[row]), a, b
        if key not in by_parts:
            by_parts[key] = tuple(overlaps(kind.source.parts[a], kind.target.parts[b]))
        return _Stretch(kind, by_parts[key], int(route.low[row]), int(route.high[row]))

    def found(own_side: np.ndarray, other_side: np.ndarray) -> dict[int, _Stream]:
        rows: dict[int, list[int]] = {}
        for row in np.flatnonzero(own_side == rank):
            rows.setdefault(int(other_side[row]), []).append(int(row))
        order = lambda row: (int(route.kind[row]), int(route.low[row]))  # noqa: E731
        return {
            peer: _Stream(tuple(stretch(row) for row in sorted(peer_rows, key=order)))
            for peer, peer_rows in rows.items()
        }

    return found(route.sender, route.receiver), found(route.receiver, route.sender)


def _copy_local(
    route: Route, rank: int, source: LocalTensors, target: LocalTensors, traffic: Traffic
) -> None:
    """Copy the elements that this rank holds itself."""
    for kind in route.kinds:
        a, b = int(kind.source.part_of_rank[rank]), int(kind.target.part_of_rank[rank])
        if NOWHERE in (a, b):
            continue
        for name in (name for name in kind.names if source(name) is not target(name)):
            traffic.copied += copy_overlap(
                source(name), kind.source.parts[a], target(name), kind.target.parts[b]
            )
