"""Which dims of a value are rows, and which is the column, whatever shape it has.

All values of a chain lie in one grid, the shape of its largest tensor.  The role of a dim are the
dims of the grid that it runs along, counted from the last (-1, the column): none where its size is
1, several where a view has joined them.  So a row of N numbers is never taken for N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

Roles: TypeAlias = tuple[tuple[int, ...], ...]


class NotRowwise(Exception):
    """What a chain has that rows by themselves cannot be computed with."""


@dataclass(frozen=True)
class Grid:
    """The shape that all values are broadcast to."""

    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """How many there are."""
        return prod(self.shape[:-1])

    @property
    def size(self) -> int:
        """Elements of a row."""
        return self.shape[-1]

    @property
    def leading(self) -> frozenset[int]:
        """The dims that count rows."""
        return frozenset(d for d in range(-len(self.shape), -1) if self.shape[d] > 1)

    def of(self, shape: Sequence[int], what: str) -> Roles:
        """The roles in a tensor that is given, as torch broadcasts it."""
        found = []
        for place, size in enumerate(shape):
            dim = place - len(shape)
            if size != 1 and (-dim > len(self.shape) or self.shape[dim] != size):
                raise NotRowwise(f"{what} of shape {list(shape)} does not lie along rows of "
                                 f"{list(self.shape)}")  # fmt: skip
            found.append((dim,) if size != 1 else ())
        return tuple(found)

    def parts(self, roles: Roles, what: str) -> tuple[bool, bool]:
        """(whether a value differs from row to row, and from column to column)."""
        dims = {dim for role in roles for dim in role}
        leading = dims - {-1}
        if leading and leading != self.leading:
            raise NotRowwise(f"{what} is broadcast over some of the leading dims only")
        return bool(leading), -1 in dims

    def together(self, several: Sequence[Roles], what: str) -> Roles:
        """The roles of a pointwise operator's result."""
        length = max((len(roles) for roles in several), default=0)
        found: list[tuple[int, ...]] = []
        for place in range(-length, 0):
            said = {roles[place] for roles in several if -place <= len(roles)} - {()}
            if len(said) > 1:
                raise NotRowwise(f"{what} merges rows with columns")
            found.append(said.pop() if said else ())
        return tuple(found)

    def viewed(self, roles: Roles, shape: Sequence[int], what: str) -> Roles:
        """The roles after a view."""
        dims = [dim for role in roles for dim in role]
        found: list[tuple[int, ...]] = []
        for size in shape:
            taken: list[int] = []
            while prod(self.shape[d] for d in taken) < size and dims:
                taken.append(dims.pop(0))
            if prod(self.shape[d] for d in taken) != size:
                raise NotRowwise(f"{what} moves elements between rows")
            found.append(tuple(taken))
        return tuple(found)

    def expanded(self, roles: Roles, shape: Sequence[int], what: str) -> Roles:
        """The roles after `expand`."""
        old = ((),) * (len(shape) - len(roles)) + roles
        found: list[tuple[int, ...]] = []
        for place, (role, size) in enumerate(zip(old, shape, strict=True)):
            dim = place - len(shape)
            fits = -dim <= len(self.shape) and self.shape[dim] == size
            if not role and size != 1 and not fits:
                raise NotRowwise(f"{what} broadcasts to a shape that is not that of the rows")
            found.append(role if role or size == 1 else (dim,))
        dims = [dim for role in found for dim in role]
        if dims != sorted(set(dims)):
            raise NotRowwise(f"{what} broadcasts rows along rows")
        return tuple(found)
