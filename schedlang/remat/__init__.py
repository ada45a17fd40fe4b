"""Plans of recomputation for a chain of modules, as trees; `checkpoint` uses them.

An item of a tree is a place in the chain, whose module saves its activations, or a tuple: a region,
which saves its input and is recomputed in backward.  Then the regions inside of it save their
inputs, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedlang.remat.operators import Key


@dataclass(frozen=True)
class RecomputedRegion:
    """Modules, in call order, that are recomputed from their saved inputs.

    saved_classes    classes of operators whose results are saved for the recomputation
    saved_operators  single operators whose results are saved
    dedupe_inputs    an input that occurs several times, in one call or in several, is saved once
    """

    modules: tuple[str, ...]
    saved_classes: tuple[str, ...] = ()
    saved_operators: frozenset[Key] = frozenset()
    dedupe_inputs: bool = False

    @property
    def saves_results(self) -> bool:
        """Whether more than the inputs is saved."""
        return bool(self.saved_classes or self.saved_operators)


RematTree = tuple[Any, ...]  # items: places (int) and trees


def region_paths(tree: RematTree) -> tuple[tuple[int, ...], ...]:
    """Return the regions around each place, outermost first, as numbers unique to each region."""
    paths: list[tuple[int, ...]] = []
    numbers = iter(range(10**9))

    def walk(items: RematTree, around: tuple[int, ...]) -> None:
        for item in items:
            if isinstance(item, tuple):
                walk(item, (*around, next(numbers)))
            else:
                assert item == len(paths), "places stand in their order, each once"
                paths.append(around)

    walk(tree, ())
    return tuple(paths)


def decisions_of(last: Any) -> tuple[Any, ...]:
    """Return the decisions of a partial plan in order, following its links `before`."""
    decisions = []
    while last is not None and last.last is not None:
        decisions.append(last.last)
        last = last.before
    return tuple(decisions[::-1])


def places_of(item: Any) -> list[int]:
    """Return the places of an item, in order."""
    return (
        [item] if isinstance(item, int) else [place for part in item for place in places_of(part)]
    )


def outer_regions(tree: RematTree) -> Iterator[tuple[int, ...]]:
    """Yield the places of each outermost region."""
    for item in tree:
        if isinstance(item, tuple):
            yield tuple(places_of(item))


def group_places(count: int, size: int, every: int = 1) -> RematTree:
    """Group places into regions of `size` (the last may be smaller); only each `every`-th is a
    region."""
    regions: list[Any] = []
    for number, first in enumerate(range(0, count, size)):
        run = tuple(range(first, min(first + size, count)))
        regions += [run] if number % every == 0 else run
    return tuple(regions)


def sqrt_region_size(count: int) -> int:
    """Return the size of regions that saves the least for equal modules: n / s inputs and s
    modules.

    Chen et al. (2016) take the square root of the number of modules.
    """
    return max(1, math.isqrt(max(0, count - 1)) + 1) if count > 1 else 1


def group_consecutive(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Group consecutive elements of lists: `h.3`, `h.4`."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _next(runs[-1][-1]) == name:
            runs[-1].append(name)
        else:
            runs.append([name])
    return [tuple(run) for run in runs]


def _next(name: str) -> str:
    parent, dot, last = name.rpartition(".")
    return f"{parent}{dot}{int(last) + 1}" if last.isdigit() else ""
