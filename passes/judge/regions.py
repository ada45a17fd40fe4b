"""Sets of elements of a flat tensor (strided grids, or lists of indices), and copies of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from schedlang.passes.verify.mapped_tensors import MappedTensor, map_tensor


@dataclass(frozen=True)
class Region:
    """Indices of elements: of a strided grid, which takes no memory, or of a list.

    start, shape, strides  of the grid
    listed                 all indices, if they form no grid
    """

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    listed: Tensor | None = None

    @classmethod
    def from_numbers(cls, numbers: Tensor, shape: Sequence[int] = ()) -> Region:
        """Make a region of a sequence of indices.

        The region is a grid of `shape` or a line if the indices form one, else a list.
        """
        for grid_shape in (tuple(shape), (len(numbers),)):
            grid = _grid(numbers, grid_shape)
            if grid is not None:
                return grid
        return cls(0, (len(numbers),), (1,), numbers)

    def __len__(self) -> int:
        """Return the number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def numbers(self) -> Tensor:
        """The index of each element, in order."""
        if self.listed is not None:
            return self.listed
        indices = torch.full((1,) * len(self.shape), self.start)
        for dim, (size, stride) in enumerate(zip(self.shape, self.strides)):
            shape = [1] * len(self.shape)
            shape[dim] = size
            indices = indices + (torch.arange(size) * stride).reshape(shape)
        return indices.reshape(-1)

    def read(self, flat: Tensor) -> Tensor:
        """Return these elements of a flat tensor in the grid's shape: a view, except for a list."""
        if self.listed is not None:
            return flat[self.listed]
        start = flat.storage_offset() + self.start
        return flat.as_strided(self.shape, self.strides, start)

    def write(self, flat: Tensor, values: Tensor | bool | float) -> None:
        """Write these elements of a flat tensor."""
        if isinstance(values, Tensor):
            values = values.reshape(self.shape).to(flat.dtype)
        if self.listed is not None:
            flat[self.listed] = values
        elif isinstance(values, Tensor):
            self.read(flat).copy_(values)
        else:
            self.read(flat).fill_(values)

    def equals(self, other: Region) -> bool:
        """Return whether two regions have the same indices in the same order."""
        if self.listed is None and other.listed is None and self.shape == other.shape:
            return (self.start, self.strides) == (other.start, other.strides)
        return torch.equal(self.numbers, other.numbers)


def _grid(numbers: Tensor, shape: tuple[int, ...]) -> Region | None:
    """Return the grid of a shape that has these indices; None if there is none."""
    if not shape or torch.Size(shape).numel() != len(numbers) or not len(numbers):
        return None
    placed = numbers.reshape(shape)
    start = int(numbers[0])
    strides = []
    for dim, size in enumerate(shape):
        line = placed.movedim(dim, 0).reshape(size, -1)[:, 0]
        strides.append(int(line[1] - line[0]) if size > 1 else 1)
    region = Region(start, shape, tuple(strides))
    if min(strides) <= 0 or not torch.equal(region.numbers, numbers):
        return None
    return region


# -- copies on ranks, and the full tensors assembled from them -------------------------------------


@dataclass(frozen=True)
class RankCopy:
    """One rank's copy of elements of an original tensor.

    name             the tensor's name on the rank
    local_region     the elements' region in the rank's tensor
    original_region  the elements' region in the original's tensor
    stored           the rank's tensor, maybe in a file; None if the rank has no gradient
    """

    rank: int
    name: str
    local_region: Region
    original_region: Region
    stored: MappedTensor | None
    factor: float = 1.0  # multiplies the values

    @property
    def places(self) -> Tensor:
        """The index of each element in the original's tensor."""
        return self.original_region.numbers

    @property
    def values(self) -> Tensor | None:
        """The value of each element; None without a tensor."""
        if self.stored is None:
            return None
        elements = self.local_region.read(self.stored.read().reshape(-1)).reshape(-1)
        return elements if self.factor == 1.0 else elements * self.factor


def distance(held: Tensor, other: Tensor) -> float:
    """Return the norm of the difference of two copies; equal NaN and infinities do not differ."""
    gap = held - other
    if bool(gap.isfinite().all()):
        return float(gap.norm())
    alike = (held == other) | (held.isnan() & other.isnan())
    gap = torch.where(alike, 0.0, gap)
    return float(gap.norm()) if bool(gap.isfinite().all()) else math.inf


def assemble(
    copies: Sequence[RankCopy], shape: torch.Size, folder: str | None
) -> tuple[Tensor, float, float]:
    """Assemble a full tensor from ranks' copies.

    Returns the tensor, the largest distance of another copy from the first copy of the same
    elements, and the norm of the assembled elements.
    """
    nothing = torch.tensor(math.nan, dtype=torch.float64)
    out = map_tensor(nothing.expand(shape.numel()), folder).read()
    filled = torch.zeros(shape.numel(), dtype=torch.bool)
    largest_gap = 0.0
    for copy in copies:
        values = copy.values
        assert values is not None
        values = values.reshape(copy.original_region.shape)
        held, overlap = copy.original_region.read(out), copy.original_region.read(filled)
        if bool(overlap.any()):
            all_known = bool(overlap.all())  # avoids a copy of known elements
            known = (held, values) if all_known else (held[overlap], values[overlap])
            largest_gap = max(largest_gap, distance(*known))
            if all_known:
                continue
            values = torch.where(overlap, held, values.double())
        copy.original_region.write(out, values)
        copy.original_region.write(filled, True)
    size = float(out.norm()) if bool(filled.all()) else float(out[filled].norm())
    return out.reshape(shape), largest_gap, size
