"""Spread: where the boxes of tensors lie, as distinct parts and the ranks that hold each.

All that is saved, loaded, put together or handed on is copied from one part into another by the
boxes that the two have in common: a whole tensor is a part, a box in a file, a rank's slice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

Cell = tuple[int, int, int]  # of one dim: where it begins in the part, in the whole; its length
Part = tuple[tuple[Cell, ...], ...]  # for each dim its cells: the part is their product
Array = Any  # of numpy, of whole numbers
NOWHERE = -1


@dataclass(frozen=True, eq=False)
class Spread:
    """The places of tensors of one shape on the ranks of a job.

    parts   the distinct ones; shared between spreads that differ only in who holds them
    of      for each rank of the job the part that it holds, or NOWHERE
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    of: Array

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Two spreads of one key lie alike."""
        return self.shape, self.parts, self.of.tobytes()

    def on(self, ranks: Sequence[int]) -> Spread:
        """The same on these ranks only."""
        of = np.full_like(self.of, NOWHERE)
        of[list(ranks)] = self.of[list(ranks)]
        return Spread(self.shape, self.parts, of)

    @cached_property
    def held(self) -> Array:
        """The ranks that hold a part."""
        return np.flatnonzero(self.of != NOWHERE)

    @cached_property
    def holders(self) -> list[Array]:
        """The ranks that hold each part, rising."""
        order = np.argsort(self.of, kind="stable")
        ends = np.searchsorted(self.of[order], np.arange(len(self.parts) + 1))
        return [order[low:high] for low, high in itertools.pairwise(ends)]

    @cached_property
    def sizes(self) -> Array:
        """The number of elements in each part."""
        return np.array([count(part) for part in self.parts], np.int64)


def count(part: Part) -> int:
    """The number of elements in a part."""
    return math.prod(sum(n for *_, n in cells) for cells in part)


def everywhere(shape: Sequence[int], ranks: Sequence[int], world: int) -> Spread:
    """Hold the whole on each of some ranks."""
    of = np.full(world, NOWHERE, np.int32)
    of[list(ranks)] = 0
    return Spread(tuple(shape), (whole(shape),), of)


def whole(shape: Sequence[int]) -> Part:
    """The part that is all of a tensor."""
    return tuple(((0, 0, n),) if n else () for n in shape)


def box_part(corner: Sequence[int], size: Sequence[int]) -> Part:
    """The part that is one box of a tensor."""
    return tuple(((0, at, n),) if n else () for at, n in zip(corner, size))


def volumes(a: Sequence[Part], b: Sequence[Part], dims: int) -> Array:
    """The number of elements that each part of `a` has in common with each of `b`."""
    found = np.ones((len(a), len(b)), np.int64)
    for dim in range(dims):
        ours, mine = _numbered([part[dim] for part in a])
        theirs, yours = _numbered([part[dim] for part in b])
        found *= _common(ours, theirs)[np.ix_(mine, yours)]
    return found


def _numbered(found: list[tuple[Cell, ...]]) -> tuple[list[tuple[Cell, ...]], Array]:
    """The distinct ones, and the number of each."""
    numbers: dict[tuple[Cell, ...], int] = {}
    places = [numbers.setdefault(one, len(numbers)) for one in found]
    return list(numbers), np.array(places, np.int64)


def _common(a: list[tuple[Cell, ...]], b: list[tuple[Cell, ...]]) -> Array:
    """Count the indices of one dim that two runs of cells share, for all pairs."""
    one, low, high = _flat(a)
    other, start, end = _flat(b)
    found = np.zeros((len(a), len(b)), np.int64)
    for k in range(0, len(one), 256):  # some rows at a time: memory stays small
        few = slice(k, k + 256)
        shared = np.minimum(high[few, None], end) - np.maximum(low[few, None], start)
        at, to = np.nonzero(shared > 0)
        np.add.at(found, (one[few][at], other[to]), shared[at, to])
    return found


def _flat(found: list[tuple[Cell, ...]]) -> tuple[Array, Array, Array]:
    rows = [(k, at, at + n) for k, cells in enumerate(found) for _, at, n in cells]
    table = np.array(rows, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


@dataclass(frozen=True)
class Overlap:
    """A box that two parts have in common: where it begins in each of them, and its size."""

    here: tuple[int, ...]
    there: tuple[int, ...]
    size: tuple[int, ...]

    def view(self, tensor: Tensor, corner: tuple[int, ...]) -> Tensor:
        """Return this box of a part, where it begins at `corner`: `here` or `there`."""
        return tensor[tuple(slice(at, at + n) for at, n in zip(corner, self.size))]


def overlaps(a: Part, b: Part) -> Iterator[Overlap]:
    """All boxes that two parts have in common, in the order of the whole."""
    dims = []
    for ours, theirs in zip(a, b):
        found = []
        for at, start, length in ours:
            for place, begin, size in theirs:
                low, high = max(start, begin), min(start + length, begin + size)
                if low < high:
                    found.append((low, at + low - start, place + low - begin, high - low))
        dims.append(sorted(found))
    for cells in itertools.product(*dims):
        yield Overlap(*(tuple(cell[k] for cell in cells) for k in (1, 2, 3)))


def copied(source: Tensor, a: Part, target: Tensor, b: Part) -> int:
    """Copy what two parts have in common from one into the other; the bytes of it."""
    size = 0
    for box in overlaps(a, b):
        view = box.view(target, box.there)
        view.copy_(box.view(source, box.here))
        size += view.nbytes
    return size
