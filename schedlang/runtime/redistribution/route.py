"""Route: who sends which elements to whom, from two layouts alone; the same on every rank.

What a rank must receive is what it is to hold and does not hold yet, each element once: no transfer
sends less.  A route sends just that.  Where several ranks hold a part, what is asked of it is laid
on one line and cut where the bytes that they send, with all that they send already, are level.
Tensors that lie alike on both sides are one kind, routed once, however many they are.
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
    Parts,
    Sharding,
    distinct,
    volumes,
)


class Uncovered(Exception):
    """Raised where parts of a tensor are held by nobody, or overlap without being equal."""

    def __init__(self, name: str, missing: bool) -> None:
        super().__init__(name)
        self.name, self.missing = name, missing


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a side: where it lies, and the bytes of an element."""

    sharding: Sharding
    itemsize: int


@dataclass(frozen=True)
class Kind:
    """Tensors that lie alike, before and after."""

    names: tuple[Any, ...]
    source: Sharding
    target: Sharding
    itemsize: int


@dataclass(frozen=True, eq=False)
class Route:
    """All that is sent, as columns with a row for each kind, sender and receiver.

    low, high   of the elements that the receiver wants of the sender's part, those that it gets
                from this sender: tensor after tensor in the order of the kind's names, in each the
                boxes in the order of the whole
    bound       the fewest bytes that each rank can receive: what it is to hold less what it holds
    """

    world: int
    kinds: tuple[Kind, ...]
    bound: Array
    kind: Array
    sender: Array
    receiver: Array
    low: Array
    high: Array
    found: dict[int, Any] = field(default_factory=dict, init=False)  # what ranks carry

    @cached_property
    def bytes(self) -> Array:
        """The bytes of each row."""
        sizes = np.array([kind.itemsize for kind in self.kinds], np.int64)
        found: Array = (self.high - self.low) * (sizes[self.kind] if len(sizes) else 1)
        return found

    @cached_property
    def sent(self) -> Array:
        """The bytes that each rank sends."""
        return _summed(self.sender, self.bytes, self.world)

    @cached_property
    def received(self) -> Array:
        """The bytes that each rank receives."""
        return _summed(self.receiver, self.bytes, self.world)

    @cached_property
    def pairs(self) -> tuple[Array, Array, Array]:
        """Senders, receivers and bytes of all pairs of ranks of which one sends to the other."""
        pair = self.sender * self.world + self.receiver
        found, place = np.unique(pair, return_inverse=True)
        return found // self.world, found % self.world, _summed(place, self.bytes, len(found))

    def messages(self, bucket: int) -> int:
        """Return how many messages of at most so many bytes are sent."""
        return int((-(-self.pairs[2] // bucket)).sum())


def _summed(places: Array, values: Array, count: int) -> Array:
    """Whole numbers added up by place, without a detour by floats."""
    found = np.zeros(count, np.int64)
    np.add.at(found, places, values)
    return found


def kinds_of(a: Mapping[Any, TensorLayout], b: Mapping[Any, TensorLayout]) -> tuple[Kind, ...]:
    """The tensors of `b`, by how they lie here and there; wide elements first."""
    names: dict[tuple[object, ...], list[Any]] = {}
    keys: dict[int, object] = {}
    for name, to in b.items():
        at = a[name]
        for sharding in (at.sharding, to.sharding):
            keys.setdefault(id(sharding), sharding.key)
        key = (to.itemsize, keys[id(at.sharding)], keys[id(to.sharding)])
        names.setdefault(key, []).append(name)
    found = [
        Kind(tuple(some), a[some[0]].sharding, b[some[0]].sharding, b[some[0]].itemsize)
        for some in names.values()
    ]
    return tuple(sorted(found, key=lambda kind: -kind.itemsize))


def route(kinds: Sequence[Kind], world: int, gaps: bool = False) -> Route:
    """Whom each rank gets what from.

    Raises Uncovered where parts overlap, or are held by nobody though there may be no gaps.
    """
    known: dict[tuple[Parts, Parts], Array] = {}
    bound, loads = np.zeros(world, np.int64), np.zeros(world, np.int64)
    found: list[list[Array]] = [[np.zeros(0, np.int64)] for _ in range(5)]
    # what only one rank has is sent by that one: the others are levelled around it
    order = sorted(range(len(kinds)), key=lambda k: int(kinds[k].source.copies.max(initial=0)))
    for number in order:
        kind = kinds[number]
        key = kind.source.parts, kind.target.parts
        if key not in known:
            known[key] = volumes(*key)
        common = known[key]
        _check(kind, common, gaps)
        part, receiver, wanted = _wanted(kind, common)
        np.add.at(bound, receiver, wanted * kind.itemsize)
        columns = _levelled(kind, part, receiver, wanted, loads)
        for column, values in zip(found, (np.full(len(columns[0]), number), *columns)):
            column.append(values)
    columns_ = [np.concatenate(column) for column in found]
    return Route(world, tuple(kinds), bound, *columns_)


def _check(kind: Kind, common: Array, gaps: bool) -> None:
    """Refuse wanted parts that held ones do not make up, each element once."""
    a, b = kind.source, kind.target
    held, wanted = a.copies > 0, b.copies > 0
    there = common[held].sum(0)
    odd = wanted & (there > b.sizes if gaps else there != b.sizes)
    if odd.any():
        raise Uncovered(kind.names[0], bool((there[odd] < b.sizes[odd]).any()))


def _wanted(kind: Kind, common: Array) -> tuple[Array, Array, Array]:
    """Return which ranks want how many elements of each held part that they do not hold."""
    a, b = kind.source, kind.target
    ranks = np.flatnonzero(b.of != NOWHERE)
    asked = common[:, b.of[ranks]]
    held = a.of[ranks]
    has = np.flatnonzero(held != NOWHERE)
    asked[held[has], has] = 0
    asked[a.copies == 0] = 0
    part, place = np.nonzero(asked)
    return part, ranks[place], asked[part, place] * len(kind.names)


def _levelled(
    kind: Kind, part: Array, receiver: Array, wanted: Array, loads: Array
) -> tuple[Array, Array, Array, Array]:
    """Sender, receiver and range of each delivery; what is sent is added to `loads`."""
    holders = kind.source.holders
    alone = kind.source.copies[part] == 1
    first = np.array([ranks[0] if len(ranks) else NOWHERE for ranks in holders], np.int64)
    one = part[alone]
    made = [(first[one], receiver[alone], np.zeros(len(one), np.int64), wanted[alone])]
    np.add.at(loads, first[one], wanted[alone] * kind.itemsize)
    rest = np.flatnonzero(~alone)  # by rising part
    starts = np.flatnonzero(np.diff(part[rest], prepend=-1))
    for low, high in zip(starts, [*starts[1:], len(rest)]):
        some = rest[low:high]
        senders = holders[part[some[0]]]
        line = np.cumsum(wanted[some])
        shares = _shares(loads[senders], int(line[-1]), kind.itemsize)
        loads[senders] += shares * kind.itemsize
        ends = distinct(line, np.cumsum(shares))
        begins = np.concatenate([[0], ends[:-1]])
        begins, ends = begins[begins < ends], ends[begins < ends]
        row = np.searchsorted(line, begins, "right")
        who = np.searchsorted(np.cumsum(shares), begins, "right")
        before = line[row] - wanted[some][row]
        made.append((senders[who], receiver[some][row], begins - before, ends - before))
    columns = [np.concatenate(column) for column in zip(*made)]
    return columns[0], columns[1], columns[2], columns[3]


def _shares(loads: Array, count: int, itemsize: int) -> Array:
    """Share `count` elements among the senders, so that the fullest is as empty as can be."""
    order = np.argsort(loads, kind="stable")
    filled = loads[order]
    below = np.concatenate([[0], np.cumsum(filled)[:-1]])
    places = np.arange(len(filled))
    # what it takes to raise all before a sender to its load: those that are reached join in
    joined = int((filled * places - below <= count * itemsize).sum())
    level = (int(filled[:joined].sum()) + count * itemsize) // joined
    shares = np.zeros(len(filled), np.int64)
    shares[:joined] = np.maximum(level - filled[:joined], 0) // itemsize
    left = count - int(shares.sum())
    shares[:joined] += left // joined
    shares[: left % joined] += 1
    found = np.empty_like(shares)
    found[order] = shares
    return found
