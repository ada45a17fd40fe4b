"""Route of a redistribution: which rank sends which elements to whom; equal on every rank.

A rank receives each element that it will hold and does not hold yet exactly once: no transfer can
send less.  If several ranks hold a part, the requests for this part are split between them so that
their total sent bytes are balanced.  Tensors with equal source and target shardings are one kind,
which is routed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from schedlang.runtime.redistribution.sharding import (
    NOWHERE,
    Array,
    Sharding,
    SliceArray,
    overlap_sizes,
    unique_sorted,
)


class UncoveredElements(Exception):
    """Raised if no rank holds some elements of a tensor (`missing`), or if parts overlap."""

    def __init__(self, name: str, missing: bool) -> None:
        super().__init__(name)
        self.name, self.missing = name, missing


@dataclass(frozen=True)
class TensorLayout:
    """The layout of a tensor: its sharding, and the bytes of an element."""

    sharding: Sharding
    itemsize: int


@dataclass(frozen=True)
class LayoutPair:
    """Tensors with equal source and equal target shardings."""

    names: tuple[Any, ...]
    source: Sharding
    target: Sharding
    itemsize: int


@dataclass(frozen=True, eq=False)
class Route:
    """All deliveries, as columns with a row for each kind, sender and receiver.

    low, high   range of elements that this sender delivers, among the elements that the receiver
                needs of the sender's part; counted over the kind's tensors in the order of its
                names, and in each tensor over boxes in the order of the full tensor
    bound       the fewest bytes that each rank can receive: target elements that it does not hold
    """

    world: int
    kinds: tuple[LayoutPair, ...]
    bound: Array
    kind: Array
    sender: Array
    receiver: Array
    low: Array
    high: Array
    streams: dict[int, Any] = field(default_factory=dict, init=False)  # rank -> its streams

    @cached_property
    def bytes(self) -> Array:
        """The bytes of each row."""
        sizes = np.array([kind.itemsize for kind in self.kinds], np.int64)
        row_bytes: Array = (self.high - self.low) * (sizes[self.kind] if len(sizes) else 1)
        return row_bytes

    @cached_property
    def sent(self) -> Array:
        """The bytes that each rank sends."""
        return _sum_by_place(self.sender, self.bytes, self.world)

    @cached_property
    def received(self) -> Array:
        """The bytes that each rank receives."""
        return _sum_by_place(self.receiver, self.bytes, self.world)

    @cached_property
    def pairs(self) -> tuple[Array, Array, Array]:
        """Senders, receivers and bytes of all pairs of ranks that communicate."""
        pair = self.sender * self.world + self.receiver
        pairs, index = np.unique(pair, return_inverse=True)
        return pairs // self.world, pairs % self.world, _sum_by_place(index, self.bytes, len(pairs))

    def messages(self, bucket: int) -> int:
        """Return how many messages of at most `bucket` bytes are sent."""
        return int((-(-self.pairs[2] // bucket)).sum())


def _sum_by_place(places: Array, values: Array, count: int) -> Array:
    """Return [count]: the sums of integers with equal places, without conversion to floats."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, places, values)
    return sums


def group_by_layout(
    a: Mapping[Any, TensorLayout], b: Mapping[Any, TensorLayout]
) -> tuple[LayoutPair, ...]:
    """Return the tensors of `b` grouped by their shardings in `a` and `b`; large elements first."""
    names: dict[tuple[object, ...], list[Any]] = {}
    keys: dict[int, object] = {}
    for name, target in b.items():
        source = a[name]
        for sharding in (source.sharding, target.sharding):
            keys.setdefault(id(sharding), sharding.key)
        key = (target.itemsize, keys[id(source.sharding)], keys[id(target.sharding)])
        names.setdefault(key, []).append(name)
    pairs = [
        LayoutPair(tuple(group), a[group[0]].sharding, b[group[0]].sharding, b[group[0]].itemsize)
        for group in names.values()
    ]
    return tuple(sorted(pairs, key=lambda kind: -kind.itemsize))


def find_route(kinds: Sequence[LayoutPair], world: int, gaps: bool = False) -> Route:
    """Return the route for all tensors of `kinds` in a job of `world` ranks.

    Raises Uncovered if parts overlap, or if no rank holds some elements and `gaps` is false.
    """
    cached: dict[tuple[SliceArray, SliceArray], Array] = {}
    bound, loads = np.zeros(world, np.int64), np.zeros(world, np.int64)
    collected: list[list[Array]] = [[np.zeros(0, np.int64)] for _ in range(5)]
    # parts that one rank holds come first: the senders of the others are balanced around them
    order = sorted(range(len(kinds)), key=lambda k: int(kinds[k].source.copies.max(initial=0)))
    for number in order:
        kind = kinds[number]
        key = kind.source.parts, kind.target.parts
        if key not in cached:
            cached[key] = overlap_sizes(*key)
        shared = cached[key]
        _check(kind, shared, gaps)
        part, receiver, counts = _find_requests(kind, shared)
        np.add.at(bound, receiver, counts * kind.itemsize)
        columns = _balance_senders(kind, part, receiver, counts, loads)
        for column, values in zip(collected, (np.full(len(columns[0]), number), *columns)):
            column.append(values)
    columns_ = [np.concatenate(column) for column in collected]
    return Route(world, tuple(kinds), bound, *columns_)


def _check(kind: LayoutPair, shared: Array, gaps: bool) -> None:
    """Raise Uncovered unless the held parts have each element of the wanted parts once."""
    a, b = kind.source, kind.target
    is_held, is_target = a.copies > 0, b.copies > 0
    available = shared[is_held].sum(0)
    odd = is_target & (available > b.sizes if gaps else available != b.sizes)
    if odd.any():
        raise UncoveredElements(kind.names[0], bool((available[odd] < b.sizes[odd]).any()))


def _find_requests(kind: LayoutPair, shared: Array) -> tuple[Array, Array, Array]:
    """Return columns (held part, rank, elements) of what ranks need and do not hold."""
    a, b = kind.source, kind.target
    ranks = np.flatnonzero(b.part_of_rank != NOWHERE)
    requests = shared[:, b.part_of_rank[ranks]]
    own_parts = a.part_of_rank[ranks]
    holding = np.flatnonzero(own_parts != NOWHERE)
    requests[own_parts[holding], holding] = 0
    requests[a.copies == 0] = 0
    part, column = np.nonzero(requests)
    return part, ranks[column], requests[part, column] * len(kind.names)


def _balance_senders(
    kind: LayoutPair, part: Array, receiver: Array, counts: Array, loads: Array
) -> tuple[Array, Array, Array, Array]:
    """Return sender, receiver and range of each delivery; add the sent bytes to `loads`."""
    holders = kind.source.holders
    single = kind.source.copies[part] == 1
    first = np.array([ranks[0] if len(ranks) else NOWHERE for ranks in holders], np.int64)
    lone = part[single]
    moves = [(first[lone], receiver[single], np.zeros(len(lone), np.int64), counts[single])]
    np.add.at(loads, first[lone], counts[single] * kind.itemsize)
    shared = np.flatnonzero(~single)  # ascending by part
    starts = np.flatnonzero(np.diff(part[shared], prepend=-1))
    for low, high in zip(starts, [*starts[1:], len(shared)]):
        rows = shared[low:high]
        senders = holders[part[rows[0]]]
        totals = np.cumsum(counts[rows])
        shares = _share_elements(loads[senders], int(totals[-1]), kind.itemsize)
        loads[senders] += shares * kind.itemsize
        ends = unique_sorted(totals, np.cumsum(shares))
        begins = np.concatenate([[0], ends[:-1]])
        begins, ends = begins[begins < ends], ends[begins < ends]
        row = np.searchsorted(totals, begins, "right")
        owner = np.searchsorted(np.cumsum(shares), begins, "right")
        base = totals[row] - counts[rows][row]
        moves.append((senders[owner], receiver[rows][row], begins - base, ends - base))
    columns = [np.concatenate(column) for column in zip(*moves)]
    return columns[0], columns[1], columns[2], columns[3]


def _share_elements(loads: Array, count: int, itemsize: int) -> Array:
    """Split `count` elements among the senders so that the largest load is as small as possible."""
    order = np.argsort(loads, kind="stable")
    filled = loads[order]
    sums_below = np.concatenate([[0], np.cumsum(filled)[:-1]])
    places = np.arange(len(filled))
    # a sender takes part if the elements can raise all smaller loads to its own load
    joined = int((filled * places - sums_below <= count * itemsize).sum())
    level = (int(filled[:joined].sum()) + count * itemsize) // joined
    shares = np.zeros(len(filled), np.int64)
    shares[:joined] = np.maximum(level - filled[:joined], 0) // itemsize
    remainder = count - int(shares.sum())
    shares[:joined] += remainder // joined
    shares[: remainder % joined] += 1
    by_sender = np.empty_like(shares)
    by_sender[order] = shares
    return by_sender
