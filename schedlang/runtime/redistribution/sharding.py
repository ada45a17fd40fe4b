"""Shardings: the distinct parts of a tensor, and the ranks that hold each part.

A part is a full tensor, a box in a file, or a rank's shard.  Saving, loading, gathering and
transfers copy one part into another by the boxes that both have in common.
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

Cell = tuple[int, int, int]  # in one dim: start in the part, start in the full tensor, length
TensorSlice = tuple[tuple[Cell, ...], ...]  # for each dim its cells: the part is their product
Array = Any  # a numpy array of integers
NOWHERE = -1


class SliceArray(Sequence[TensorSlice]):
    """Parts of tensors of one shape, stored as arrays; a `TensorSlice` is made when it is indexed.

    numbers  [parts, dims]: the number of a part's list of cells in each dim
    cells    for each dim an array of rows (number of the list, start in the part, start in the full
             tensor, length), ascending by number
    """

    def __init__(self, numbers: Array, cells: Sequence[Array]) -> None:
        self.numbers, self.cells = numbers, tuple(cells)

    @staticmethod
    def from_slices(parts: Sequence[TensorSlice], dims: int) -> SliceArray:
        """Return `TensorSlice` objects of tensors with `dims` dims as arrays."""
        if isinstance(parts, SliceArray):
            return parts
        numbers, cells = np.empty((len(parts), dims), np.int64), []
        for dim in range(dims):
            lists: dict[tuple[Cell, ...], int] = {}
            numbers[:, dim] = [lists.setdefault(part[dim], len(lists)) for part in parts]
            rows = [(k, *cell) for entry, k in lists.items() for cell in entry]
            cells.append(np.array(rows, np.int64).reshape(-1, 4))
        return SliceArray(numbers, cells)

    @staticmethod
    def from_boxes(corners: Array, sizes: Array) -> SliceArray:
        """Return parts that are boxes: row k of `corners` and `sizes` is a box's start and size."""
        numbers = np.zeros(corners.shape, np.int64)
        numbers[:] = np.arange(len(corners))[:, None]
        equal = ((corners == corners[:1]) & (sizes == sizes[:1])).all(0)
        numbers[:, equal] = 0  # a dim that is not split has one list of cells
        rows = np.zeros((*corners.shape, 4), np.int64)
        rows[..., 0], rows[..., 2], rows[..., 3] = numbers, corners, sizes
        cells = []
        for dim, is_equal in enumerate(equal.tolist()):
            dim_rows = rows[:1, dim] if is_equal else rows[:, dim]
            cells.append(dim_rows[dim_rows[:, 3] > 0])
        return SliceArray(numbers, cells)

    def select(self, places: Sequence[int]) -> SliceArray:
        """Return the parts at these indices."""
        return SliceArray(self.numbers[list(places)], self.cells)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, k: Any) -> Any:
        dims = []
        for number, rows in zip(self.numbers[k].tolist(), self.cells):
            low, high = np.searchsorted(rows[:, 0], (number, number + 1))
            dims.append(tuple(map(tuple, rows[low:high, 1:].tolist())))
        return tuple(dims)

    @cached_property
    def counts(self) -> list[int]:
        """The number of lists of cells of each dim: one more than the largest number in use."""
        dims = zip(self.numbers.T, self.cells)
        return [max(int(n.max(initial=-1)), *rows[-1:, 0].tolist(), 0) + 1 for n, rows in dims]

    @cached_property
    def sizes(self) -> Array:
        """The number of elements in each part."""
        sizes = np.ones(len(self), np.int64)
        for numbers, rows, count in zip(self.numbers.T, self.cells, self.counts):
            lengths = np.zeros(count, np.int64)
            np.add.at(lengths, rows[:, 0], rows[:, 3])
            sizes *= lengths[numbers]
        return sizes

    @cached_property
    def _key(self) -> tuple[bytes, ...]:
        return self.numbers.tobytes(), *(rows.tobytes() for rows in self.cells)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or isinstance(other, SliceArray) and self._key == other._key


@dataclass(frozen=True, eq=False)
class Sharding:
    """The placement of tensors of one shape on the ranks of a job.

    parts         the distinct parts; shared between shardings that differ only in the holding ranks
    part_of_rank  for each rank of the job the index of the part that it holds, or NOWHERE
    """

    shape: tuple[int, ...]
    parts: SliceArray
    part_of_rank: Array

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for equal shardings."""
        return self.shape, self.parts, self.part_of_rank.tobytes()

    def restrict_to(self, ranks: Sequence[int]) -> Sharding:
        """Return the sharding restricted to these ranks."""
        part_of = np.full_like(self.part_of_rank, NOWHERE)
        part_of[list(ranks)] = self.part_of_rank[list(ranks)]
        return Sharding(self.shape, self.parts, part_of)

    @cached_property
    def holding_ranks(self) -> Array:
        """The ranks that hold a part."""
        return np.flatnonzero(self.part_of_rank != NOWHERE)

    @cached_property
    def copies(self) -> Array:
        """The number of ranks that hold each part."""
        return np.bincount(self.part_of_rank[self.holding_ranks], minlength=len(self.parts))

    @cached_property
    def holders(self) -> list[Array]:
        """The ranks that hold each part, ascending."""
        order = np.argsort(self.part_of_rank, kind="stable")
        ends = np.searchsorted(self.part_of_rank[order], np.arange(len(self.parts) + 1))
        return [order[low:high] for low, high in itertools.pairwise(ends)]

    @property
    def sizes(self) -> Array:
        """The number of elements in each part."""
        return self.parts.sizes


def count_elements(part: TensorSlice) -> int:
    """Return the number of elements in a part."""
    return math.prod(sum(n for *_, n in cells) for cells in part)


def replicate_on(shape: Sequence[int], ranks: Sequence[int], world: int) -> Sharding:
    """Return the sharding of a tensor that is replicated on `ranks`, in a job of `world` ranks."""
    part_of = np.full(world, NOWHERE, np.int32)
    part_of[list(ranks)] = 0
    return Sharding(tuple(shape), SliceArray.from_slices((full_slice(shape),), len(shape)), part_of)


def full_slice(shape: Sequence[int]) -> TensorSlice:
    """Return the part that is the full tensor."""
    return tuple(((0, 0, n),) if n else () for n in shape)


def unique_sorted(*numbers: Array) -> Array:
    """Return the distinct numbers of some arrays, ascending."""
    # with `return_index` numpy does not import its masked arrays
    return np.unique(np.concatenate(numbers), return_index=True)[0]


def box_slice(corner: Sequence[int], size: Sequence[int]) -> TensorSlice:
    """Return the part that is one box of a tensor."""
    return tuple(((0, start, n),) if n else () for start, n in zip(corner, size))


def overlap_sizes(a: SliceArray, b: SliceArray) -> Array:
    """Return [parts of a, parts of b]: how many elements each pair of parts has in common."""
    sizes = np.ones((len(a), len(b)), np.int64)
    for dim, (a_lists, b_lists) in enumerate(zip(a.numbers.T, b.numbers.T)):
        shared_counts = np.zeros((a.counts[dim], b.counts[dim]), np.int64)
        sizes *= _common(a.cells[dim], b.cells[dim], shared_counts)[a_lists][:, b_lists]
    return sizes


def _common(a: Array, b: Array, counts: Array) -> Array:
    """Add to `counts` [lists of a, lists of b] how many indices two lists of cells share."""
    for k in range(0, len(a), 256):  # in chunks of rows, to limit memory
        a_list, _, low, length = a[k : k + 256, :, None].swapaxes(0, 1)
        b_list, _, start, b_length = b.T
        shared = np.minimum(low + length, start + b_length) - np.maximum(low, start)
        a_index, b_index = np.nonzero(shared > 0)
        np.add.at(counts, (a_list[a_index, 0], b_list[b_index]), shared[a_index, b_index])
    return counts


@dataclass(frozen=True)
class Overlap:
    """A box that two parts have in common: its start in each of them, and its size."""

    here: tuple[int, ...]
    there: tuple[int, ...]
    size: tuple[int, ...]

    def view(self, tensor: Tensor, corner: tuple[int, ...]) -> Tensor:
        """Return a view of this box in a part's tensor; `corner` is `here` or `there`."""
        return tensor[tuple(slice(start, start + n) for start, n in zip(corner, self.size))]


def overlaps(a: TensorSlice, b: TensorSlice) -> Iterator[Overlap]:
    """Yield the boxes that two parts have in common, in the order of the full tensor."""
    dims = []
    for a_cells, b_cells in zip(a, b):
        spans = []
        for a_offset, start, length in a_cells:
            for b_offset, begin, size in b_cells:
                low, high = max(start, begin), min(start + length, begin + size)
                if low < high:
                    spans.append((low, a_offset + low - start, b_offset + low - begin, high - low))
        dims.append(sorted(spans))
    for cells in itertools.product(*dims):
        yield Overlap(*(tuple(cell[k] for cell in cells) for k in (1, 2, 3)))


def copy_overlap(source: Tensor, a: TensorSlice, target: Tensor, b: TensorSlice) -> int:
    """Copy the elements that two parts have in common into `target`; return the copied bytes."""
    size = 0
    for box in overlaps(a, b):
        view = box.view(target, box.there)
        view.copy_(box.view(source, box.here))
        size += view.nbytes
    return size
