"""Recomputation of a chain of modules: a tree over places in the chain.

A place alone keeps what its module saves. A tuple is a region: it keeps what enters it, and is run
again in backward; then the regions inside of it keep what enters them, and so on.

* Modules that run again in backward as one: from what, and which results spare what in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedlang.remat.operators import Key


@dataclass(frozen=True)
class Again:
    """Modules, in the order of their calls, that run again from what enters them from outside.

    save    the classes of operators whose results are kept for the second run
    chosen  single operators, likewise
    once    what enters several times, of one call or of several, is kept once
    """

    modules: tuple[str, ...]
    save: tuple[str, ...] = ()
    chosen: frozenset[Key] = frozenset()
    once: bool = False

    @property
    def results(self) -> bool:
        """True where more than the inputs is kept."""
        return bool(self.save or self.chosen)


Tree = tuple[Any, ...]  # of places (int) and of trees


def paths(tree: Tree) -> tuple[tuple[int, ...], ...]:
    """The regions around each place, outermost first, as numbers that no two regions share."""
    found: list[tuple[int, ...]] = []
    numbers = iter(range(10**9))

    def walk(items: Tree, around: tuple[int, ...]) -> None:
        for item in items:
            if isinstance(item, tuple):
                walk(item, (*around, next(numbers)))
            else:
                assert item == len(found), "places stand in their order, each once"
                found.append(around)

    walk(tree, ())
    return tuple(found)


def decided(last: Any) -> tuple[Any, ...]:
    """Each choice `last`, in order, of a partial plan and of all those `before` it."""
    found = []
    while last is not None and last.last is not None:
        found.append(last.last)
        last = last.before
    return tuple(found[::-1])


def places(item: Any) -> list[int]:
    """The places of an item, in order."""
    return [item] if isinstance(item, int) else [place for part in item for place in places(part)]


def regions(tree: Tree) -> Iterator[tuple[int, ...]]:
    """The places of each outermost region."""
    for item in tree:
        if isinstance(item, tuple):
            yield tuple(places(item))


def groups(count: int, size: int, every: int = 1) -> Tree:
    """Regions of `size` places each, the last with what is left; of `every` of them the first."""
    found: list[Any] = []
    for number, first in enumerate(range(0, count, size)):
        run = tuple(range(first, min(first + size, count)))
        found += [run] if number % every == 0 else run
    return tuple(found)


def root(count: int) -> int:
    """The size of regions that keeps least in all, for equal modules: n / s inputs and s modules.

    Chen et al. (2016) take the square root of the number of modules.
    """
    return max(1, math.isqrt(max(0, count - 1)) + 1) if count > 1 else 1


def runs(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Elements of lists, taken together where they follow each other: `h.3`, `h.4`."""
    found: list[list[str]] = []
    for name in names:
        if found and _next(found[-1][-1]) == name:
            found[-1].append(name)
        else:
            found.append([name])
    return [tuple(run) for run in found]


def _next(name: str) -> str:
    parent, dot, last = name.rpartition(".")
    return f"{parent}{dot}{int(last) + 1}" if last.isdigit() else ""
