"""Elements of a flat tensor: an even grid of them, or each told by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Region:
    """Numbers of elements: those of a grid, or of a list. A grid takes no memory.

    start, shape, strides  of the grid
    listed                 each number, where they make no grid
    """

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    listed: Tensor | None = None

    @classmethod
    def of(cls, numbers: Tensor, shape: Sequence[int] = ()) -> Region:
        """The region of a row of numbers: a grid of this shape, or a straight one, if it is one."""
        for form in (tuple(shape), (len(numbers),)):
            found = _grid(numbers, form)
            if found is not None:
                return found
        return cls(0, (len(numbers),), (1,), numbers)

    def __len__(self) -> int:
        """The number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def numbers(self) -> Tensor:
        """The number of each element, in their order."""
        if self.listed is not None:
            return self.listed
        found = torch.full((1,) * len(self.shape), self.start)
        for dim, (size, stride) in enumerate(zip(self.shape, self.strides)):
            form = [1] * len(self.shape)
            form[dim] = size
            found = found + (torch.arange(size) * stride).reshape(form)
        return found.reshape(-1)

    def within(self, flat: Tensor) -> Tensor:
        """These elements of a flat tensor, in the shape of the grid: a view, but for a list."""
        if self.listed is not None:
            return flat[self.listed]
        start = flat.storage_offset() + self.start
        return flat.as_strided(self.shape, self.strides, start)

    def put(self, flat: Tensor, values: Tensor | bool | float) -> None:
        """Write these elements of a flat tensor."""
        if isinstance(values, Tensor):
            values = values.reshape(self.shape).to(flat.dtype)
        if self.listed is not None:
            flat[self.listed] = values
        elif isinstance(values, Tensor):
            self.within(flat).copy_(values)
        else:
            self.within(flat).fill_(values)

    def alike(self, other: Region) -> bool:
        """Whether two are the same numbers in the same order."""
        if self.listed is None and other.listed is None and self.shape == other.shape:
            return (self.start, self.strides) == (other.start, other.strides)
        return torch.equal(self.numbers, other.numbers)


def _grid(numbers: Tensor, shape: tuple[int, ...]) -> Region | None:
    """The grid of a shape that these numbers are; None if they are none."""
    if not shape or torch.Size(shape).numel() != len(numbers) or not len(numbers):
        return None
    placed = numbers.reshape(shape)
    start = int(numbers[0])
    strides = []
    for dim, size in enumerate(shape):
        line = placed.movedim(dim, 0).reshape(size, -1)[:, 0]
        strides.append(int(line[1] - line[0]) if size > 1 else 1)
    one = Region(start, shape, tuple(strides))
    if min(strides) <= 0 or not torch.equal(one.numbers, numbers):
        return None
    return one
