"""The mesh: named axes of ranks, the groups along them, and usual names of axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Mesh:
    """Named axes of ranks, slowest first: the last axis varies fastest with the rank.

    `axes` are (name, size) pairs; `views` give a second name to several axes folded together.
    `device` is the text after `on`, or None. `tp/2` names runs of 2 neighbours along `tp` (see
    `run_axis`): such an axis is never declared. Names only: process groups are created when a
    plan is built.
    """

    axes: tuple[tuple[str, int], ...] = ()
    views: tuple[tuple[str, tuple[str, ...]], ...] = ()
    device: str | None = None
    # cache of `fold`: called for every shard of every tensor, and a mesh never changes
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
        """Return the plain axes that a name, a view or a tuple of them stands for, in mesh order.

        The order of the names does not matter: the members of a process group are sorted by rank,
        and only mesh order numbers them so. `b.a` stands for several axes, the first one the
        slowest.
        """
        key = (over,) if isinstance(over, str) else tuple(over)
        if key not in self._folded:
            views, order = dict(self.views), list(self.sizes)
            names = [part for name in key for part in name.split(".")]
            plain = {axis for name in names for axis in views.get(name, (name,))}
            mesh_order = sorted(plain, key=lambda name: order.index(name.partition("/")[0]))
            self._folded[key] = tuple(mesh_order)
        return self._folded[key]

    def in_mesh_order(self, names: Collection[str]) -> tuple[str, ...]:
        """Return axes, views and runs in mesh order, without runs along an axis that is named
        itself."""
        runs = (n for n in names if "/" in n and n.partition("/")[0] not in names)
        order = list(self.sizes)
        ordered = sorted(runs, key=lambda name: (order.index(name.partition("/")[0]), name))
        return (*(name for name in self.names if name in names), *ordered)

    def size(self, over: str | Sequence[str]) -> int:
        """Return the number of ranks along one axis, a view, or a tuple of axes."""
        return math.prod(count for _, count in self._extents(over))

    def _extents(self, over: str | Sequence[str]) -> list[tuple[str, int]]:
        """Return the declared axes of a group, slowest first, and the group's extent along each.

        The index of a rank in its group is counted by these.
        """
        order = over.split(".") if isinstance(over, str) and "." in over else self.fold(over)
        lines = (axis.partition("/") for axis in order)
        return [(axis, int(extent) if extent else self.sizes[axis]) for axis, _, extent in lines]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on each axis; 0 <= rank < world."""
        assert 0 <= rank < self.world, (rank, self.world)
        coordinates: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, coordinates[name] = divmod(rank, size)
        return {name: coordinates[name] for name in self.sizes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at the given coordinates; the inverse of `coordinates`."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinates[name]
        return rank

    def index(self, rank: int, over: str | Sequence[str]) -> int:
        """Return the index of a rank within its group along `over`, from 0."""
        return self.index_at(self.coordinates(rank), over)

    def index_at(self, coordinates: Mapping[str, int], over: str | Sequence[str]) -> int:
        """Return the index, within its group along `over`, of the rank with these coordinates."""
        index = 0
        for name, extent in self._extents(over):
            index = index * extent + coordinates[name] % extent
        return index

    def group(self, rank: int, over: str | Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along `over` only, in the order of `index`."""
        return tuple(self.member(rank, over, index) for index in range(self.size(over)))

    def member(self, rank: int, over: str | Sequence[str], index: int) -> int:
        """Return the rank at one index of the group of `rank` along `over`, without computing the
        others."""
        coordinates = self.coordinates(rank)
        for name, extent in reversed(self._extents(over)):
            index, digit = divmod(index, extent)
            coordinates[name] += digit - coordinates[name] % extent
        return self.rank(coordinates)

    def groups(self, over: str | Sequence[str]) -> list[tuple[int, ...]]:
        """Return all groups along `over`; every rank is in exactly one."""
        lines = dict(self._extents(over))
        stride, offsets, firsts = self.world, [0], [0]
        for name, size in self.axes:
            stride //= size
            length = lines.get(name, 1)
            offsets = [start + stride * k for start in offsets for k in range(length)]
            firsts = [start + stride * k for start in firsts for k in range(0, size, length)]
        return [tuple([first + offset for offset in offsets]) for first in firsts]

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes) or "one rank"


def run_axis(axis: str, count: int) -> str:
    """Return the name of the axis of runs of `count` neighbouring ranks along `axis`."""
    return f"{axis}/{count}"


# role of an axis -> its usual names; the first is offered where the mesh has none
USUAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "replicas": ("dp", "data", "ddp", "fsdp", "rep", "replicas", "dp2"),
    "stages": ("pp", "pipe", "pipeline", "stage", "stages"),
    "parts": ("tp", "mp", "tensor", "model", "tp2"),
    "tokens": ("cp", "sp", "seq", "ctx", "ring"),
    "experts": ("ep", "expert", "experts"),
}


def usual_axis(axes: Collection[str], role: str) -> str | None:
    """Return the axis that a help names for a role of NAMES; None where the mesh has none.

    An axis with a usual name, else the first whose name does not indicate another role.
    """
    usual = [name for name in USUAL_NAMES[role] if name in axes]
    others = {name for names in USUAL_NAMES.values() for name in names}
    return next(iter([*usual, *(axis for axis in axes if axis not in others)]), None)


def offer_row(row: str, axes: Collection[str], role: str) -> str:
    """Format a row for a help, its `{}` replaced by the axis for a role, and what the mesh lacks.

    >>> offer_row("zero(stage=1, over={})", ["dp"], "replicas")
    '`zero(stage=1, over=dp)`'
    >>> offer_row("zero(stage=1, over={})", ["pp"], "replicas")
    '`zero(stage=1, over=dp)`, with `dp` among the axes of the mesh, which are `pp`'
    """
    axis, example = usual_axis(axes, role), USUAL_NAMES[role][0]
    if axis is not None:
        return f"`{row.format(axis)}`"
    axis_list = ", ".join(f"`{name}`" for name in axes)
    axes_text = f"which are {axis_list}" if axis_list else "of which there are none"
    return f"`{row.format(example)}`, with `{example}` among the axes of the mesh, {axes_text}"
