"""Sets of elements of a flat tensor: a strided grid, or a list of indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
