"""The mesh: named axes of ranks, who shares a group, and what axes are usually called.

* Axes by what they are usually called: which one of a mesh a help names, and what a mesh lacks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Mesh:
    """Named axes of ranks, slowest first: the last axis varies fastest with the rank.

    `axes` are (name, size) pairs, `views` give a second name to several axes folded together.
    `device` is the text behind `on`, or None.
    `tp/2` names runs of 2 neighbours along `tp` (see `neighbours`): an axis that nobody declares.
    Names only: process groups are made when a plan is built.
    """

    axes: tuple[tuple[str, int], ...] = ()
    views: tuple[tuple[str, tuple[str, ...]], ...] = ()
    device: str | None = None
    # what was folded before: asked for by every part of every tensor, and a mesh never changes
    _folded: dict[tuple[str, ...], tuple[str, ...]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The size of each axis, in mesh order."""
        return dict(self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names and view names: everything that `over=` may name."""
        return (*self.sizes, *(name for name, _ in self.views))

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes.values())

    def fold(self, over: str | Sequence[str]) -> tuple[str, ...]:
        """The plain axes that a name, a view or a tuple of them stands for, in mesh order.

        In whatever order they are named: the members of a process group go by rising rank, and
        only mesh order numbers them so.  `b.a` stands for axes of which the first is the slowest.
        """
        named = (over,) if isinstance(over, str) else tuple(over)
        if named not in self._folded:
            views, order = dict(self.views), list(self.sizes)
            names = [one for name in named for one in name.split(".")]
            plain = {axis for name in names for axis in views.get(name, (name,))}
            mesh_order = sorted(plain, key=lambda name: order.index(name.partition("/")[0]))
            self._folded[named] = tuple(mesh_order)
        return self._folded[named]

    def ordered(self, names: Collection[str]) -> tuple[str, ...]:
        """Some axes, views and runs in mesh order, without runs along an axis that is named."""
        runs = (n for n in names if "/" in n and n.partition("/")[0] not in names)
        order = list(self.sizes)
        behind = sorted(runs, key=lambda name: (order.index(name.partition("/")[0]), name))
        return (*(name for name in self.names if name in names), *behind)

    def size(self, over: str | Sequence[str]) -> int:
        """Return how many ranks lie along one axis, a view, or a tuple of axes."""
        return math.prod(count for _, count in self._lines(over))

    def _lines(self, over: str | Sequence[str]) -> list[tuple[str, int]]:
        """The declared axes along which a group lies, and how many of its ranks lie along each.

        By these the places in the group are counted, the slowest first.
        """
        order = over.split(".") if isinstance(over, str) and "." in over else self.fold(over)
        lines = (axis.partition("/") for axis in order)
        return [(axis, int(run) if run else self.sizes[axis]) for axis, _, run in lines]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on each axis; 0 <= rank < world."""
        assert 0 <= rank < self.world, (rank, self.world)
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.sizes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at the given coordinates; the inverse of `coordinates`."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinates[name]
        return rank

    def index(self, rank: int, over: str | Sequence[str]) -> int:
        """The place of a rank within its group along `over`, from 0."""
        return self.index_at(self.coordinates(rank), over)

    def index_at(self, coordinates: Mapping[str, int], over: str | Sequence[str]) -> int:
        """The place within a group along `over` of the rank with these coordinates."""
        place = 0
        for name, extent in self._lines(over):
            place = place * extent + coordinates[name] % extent
        return place

    def group(self, rank: int, over: str | Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `over` only, in the order of `index`."""
        return tuple(self.member(rank, over, place) for place in range(self.size(over)))

    def member(self, rank: int, over: str | Sequence[str], place: int) -> int:
        """The rank at one place of the group of `rank` along `over`, without the others."""
        here = self.coordinates(rank)
        for name, extent in reversed(self._lines(over)):
            place, at = divmod(place, extent)
            here[name] += at - here[name] % extent
        return self.rank(here)

    def groups(self, over: str | Sequence[str]) -> list[tuple[int, ...]]:
        """All groups along `over`; every rank is in exactly one."""
        lines = dict(self._lines(over))
        stride, offsets, firsts = self.world, [0], [0]
        for name, size in self.axes:
            stride //= size
            length = lines.get(name, 1)
            offsets = [at + stride * k for at in offsets for k in range(length)]
            firsts = [at + stride * k for at in firsts for k in range(0, size, length)]
        return [tuple([first + offset for offset in offsets]) for first in firsts]

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes) or "one rank"


def neighbours(axis: str, count: int) -> str:
    """The name of the axis along which runs of `count` neighbours of another axis lie."""
    return f"{axis}/{count}"


# what ranks along an axis do -> what it is usually called; the first is offered where none is there
NAMES: Mapping[str, tuple[str, ...]] = {
    "replicas": ("dp", "data", "ddp", "fsdp", "rep", "replicas", "dp2"),
    "stages": ("pp", "pipe", "pipeline", "stage", "stages"),
    "parts": ("tp", "mp", "tensor", "model", "tp2"),
    "tokens": ("cp", "sp", "seq", "ctx", "ring"),
    "experts": ("ep", "expert", "experts"),
}


def usual(axes: Collection[str], role: str) -> str | None:
    """The axis that a help names for ranks of a role of NAMES; None where there is none.

    That of a usual name, or else the first whose name tells nothing of another role.
    """
    named = [name for name in NAMES[role] if name in axes]
    others = {name for names in NAMES.values() for name in names}
    return next(iter([*named, *(axis for axis in axes if axis not in others)]), None)


def offered(row: str, axes: Collection[str], role: str) -> str:
    """A row as a help offers it, its `{}` the axis for a role, with how the mesh has to be for it.

    >>> offered("zero(stage=1, over={})", ["dp"], "replicas")
    '`zero(stage=1, over=dp)`'
    >>> offered("zero(stage=1, over={})", ["pp"], "replicas")
    '`zero(stage=1, over=dp)`, with `dp` among the axes of the mesh, which are `pp`'
    """
    axis, wanted = usual(axes, role), NAMES[role][0]
    if axis is not None:
        return f"`{row.format(axis)}`"
    known = ", ".join(f"`{one}`" for one in axes)
    lacks = f"which are {known}" if known else "of which there are none"
    return f"`{row.format(wanted)}`, with `{wanted}` among the axes of the mesh, {lacks}"
