"""Meshes that one machine runs, in place of one that it does not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

MOST = 8


def small_meshes(axes: Mapping[str, int], most: int = MOST) -> Iterator[dict[str, int]]:
    """Smaller sizes of the axes, the best first; the mesh itself where it is small enough.

    Best is a mesh that leaves no axis out, whose axes differ in size (so that a sum over the wrong
    one shows), and that has few ranks.
    """
    if math.prod(axes.values()) <= most:
        yield dict(axes)
        return
    ranges = [range(1, min(size, most) + 1) for size in axes.values()]
    found = [
        dict(zip(axes, sizes)) for sizes in itertools.product(*ranges) if math.prod(sizes) <= most
    ]
    yield from sorted(
        (mesh for mesh in found if max(mesh.values()) > 1), key=lambda m: _cost(m, axes)
    )


def _cost(mesh: Mapping[str, int], axes: Mapping[str, int]) -> tuple[int, int, int]:
    left_out = sum(mesh[name] == 1 < size for name, size in axes.items())
    sizes = [size for size in mesh.values() if size > 1]
    return left_out, len(sizes) - len(set(sizes)), math.prod(sizes)
