"""Bytes from rank to rank in one step: what each sends to each, from the counted collectives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from schedlang.ir.mesh import Mesh

if TYPE_CHECKING:
    from schedlang.passes.simulate.traffic import Collective

MOST = 64  # rows and columns
Bytes = NDArray[np.float64]
Ranks = NDArray[np.int64]

# of the whole tensor, what each rank of a group of n gives each other one, times n: what goes from
# one to the other when each part goes straight to those who need it; rings send as much in all,
# but to neighbours.  A broadcast and a reduction go from and to each rank of their group in turn.
SHARE = {
    "all-reduce": 2.0,
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-to-all": 1.0,
    "broadcast": 1.0,
    "reduce": 1.0,
}


@dataclass(frozen=True)
class Pairs:
    """Bytes that each block of neighbouring ranks sends to each, rows to columns.

    each    ranks of a block; on the diagonal of larger ones is what stays among them
    names   of the blocks: their coordinates on the axes that tell them apart
    ranks   so many are in these blocks; others are left out
    """

    bytes: Bytes
    names: tuple[str, ...]
    each: int
    ranks: int


def pairs(mesh: Mesh, line: str, found: Iterable[Collective], most: int = MOST) -> Pairs:
    """Add up what goes between ranks; `line` is the pipeline's axis, empty without one.

    Ranks that agree on the slower axes stand together where there are more than `most`; where the
    slowest alone is longer, the first `most` ranks are shown.
    """
    each, axes = _blocks(mesh, most)
    count = min(most, mesh.world // each)
    block = np.minimum(np.arange(mesh.world) // each, count)  # the last one is what is left out
    total = np.zeros((count + 1, count + 1))
    alike: Counter[tuple[str, tuple[str, ...], frozenset[int] | None, int | None]] = Counter()
    for one in found:
        alike[one.kind, mesh.fold(one.axes), one.places, one.to] += one.total
    for (kind, over, places, to), size in alike.items():
        groups = _groups(mesh, over, line, places)
        if to is not None:
            target = _at_place(mesh, line, groups.ravel(), to)
            total += size * _counted(block[groups.ravel()], block[target], count + 1)
        elif kind in SHARE:
            total += size * SHARE[kind] / groups.shape[1] * _everyone(block[groups], count + 1)
        elif groups.shape[1] > 1:  # around a ring
            target = np.roll(groups, -1, axis=1).ravel()
            total += size * _counted(block[groups.ravel()], block[target], count + 1)
    names = tuple(
        ", ".join(f"{axis}={mesh.coordinates(k * each)[axis]}" for axis in axes)
        for k in range(count)
    )
    return Pairs(total[:count, :count], names, each, count * each)


def _blocks(mesh: Mesh, most: int) -> tuple[int, tuple[str, ...]]:
    """Ranks of a block, and the axes on which blocks differ."""
    sizes = [size for _, size in mesh.axes]
    if mesh.world > most:
        for kept in reversed(range(1, len(sizes))):
            if 1 < math.prod(sizes[:kept]) <= most:
                return math.prod(sizes[kept:]), tuple(n for n, _ in mesh.axes[:kept])
    return 1, tuple(name for name, size in mesh.axes if size > 1)


def _groups(mesh: Mesh, over: tuple[str, ...], line: str, places: frozenset[int] | None) -> Ranks:
    """The groups along some axes, a row each; only of ranks at these places of the pipeline."""
    at = _coordinates(mesh)
    ranks = np.arange(mesh.world)
    if places is not None:
        ranks = ranks[np.isin(at[line], list(places))]
    named = {axis.partition("/")[0]: int(axis.partition("/")[2] or 0) for axis in over}
    own = np.zeros(len(ranks), dtype=np.int64)  # the number of each rank's group
    for axis, size in mesh.axes:
        run = named.get(axis, 1) or size
        own = own * size + at[axis][ranks] // run
    order = np.argsort(own, kind="stable")
    return ranks[order].reshape(len(np.unique(own)), -1)


def _coordinates(mesh: Mesh) -> dict[str, Ranks]:
    sizes = tuple(size for _, size in mesh.axes) or (1,)
    places = np.unravel_index(np.arange(mesh.world), sizes)
    return {name: place for (name, _), place in zip(mesh.axes, places)}


def _at_place(mesh: Mesh, line: str, ranks: Ranks, to: int) -> Ranks:
    """The rank at a place of the pipeline for each of some ranks, all else alike."""
    behind = math.prod(size for _, size in mesh.axes[list(mesh.sizes).index(line) + 1 :])
    here = _coordinates(mesh)[line][ranks]
    found: Ranks = ranks + (to - here) * behind
    return found


def _counted(source: Ranks, target: Ranks, blocks: int) -> Bytes:
    """Count the messages from each block to each."""
    found = np.zeros((blocks, blocks))
    np.add.at(found, (source, target), 1.0)
    return found


def _everyone(groups: Ranks, blocks: int) -> Bytes:
    """Count the ordered pairs of different group members for each two blocks."""
    members = np.zeros((len(groups), blocks))
    np.add.at(members, (np.arange(len(groups))[:, None], groups), 1.0)
    found: Bytes = members.T @ members - np.diag(members.sum(axis=0))
    return found
