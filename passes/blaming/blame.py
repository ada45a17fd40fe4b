"""Blame: the fewest rows of a schedule that break it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Blame(Generic[T]):
    """`rows` fail together, and none can be left out; empty if it fails without any row."""

    rows: tuple[T, ...]
    prefix: int  # rows of the shortest failing prefix that was found
    runs: int  # how often the predicate was asked


def blame(rows: Sequence[T], fails: Callable[[tuple[T, ...]], bool]) -> Blame[T]:
    """Find the rows to blame: bisect prefixes, then debug by deltas rows that fail only together.

    `fails(subset)` is asked for subsets in their order; a subset that is not legal must answer
    False. The whole is known to fail. About log2(n) runs for a single culprit. Delta debugging
    after Zeller, Hildebrandt: Simplifying and isolating failure-inducing input, TSE 2002.
    """
    asked = _Asked(rows, fails)
    everything = tuple(range(len(rows)))
    if not everything or asked(()):
        return Blame((), 0, asked.runs)
    low, high = 0, len(rows)  # the prefix of `low` rows holds, that of `high` rows fails
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if asked(everything[:middle]) else (middle, high)
    culprit = high - 1
    found = (culprit,) if asked((culprit,)) else _minimal(everything[:high], culprit, asked)
    found = _without_pairs(found, asked)
    return Blame(tuple(rows[i] for i in found), high, asked.runs)


def _without_pairs(
    failing: tuple[int, ...], asked: Callable[[tuple[int, ...]], bool]
) -> tuple[int, ...]:
    """Leave out what can be, one or two at a time: two rows may be legal only together."""
    if len(failing) < 2:
        return failing
    for count in (1, 2):
        for out in itertools.combinations(failing, count):
            rest = tuple(i for i in failing if i not in out)
            if rest and asked(rest):
                return _without_pairs(rest, asked)
    return failing


class _Asked(Generic[T]):
    """The predicate on sets of indices; no set is asked twice."""

    def __init__(self, rows: Sequence[T], fails: Callable[[tuple[T, ...]], bool]) -> None:
        self.rows, self.fails = rows, fails
        self.known: dict[tuple[int, ...], bool] = {tuple(range(len(rows))): True}
        self.runs = 0

    def __call__(self, subset: tuple[int, ...]) -> bool:
        if subset not in self.known:
            self.runs += 1
            self.known[subset] = self.fails(tuple(self.rows[i] for i in subset))
        return self.known[subset]


def _minimal(
    failing: tuple[int, ...], culprit: int, asked: Callable[[tuple[int, ...]], bool]
) -> tuple[int, ...]:
    """A failing subset from which none of the others can be left out."""
    others = tuple(i for i in failing if i != culprit)
    pieces = 2
    while others:
        pieces = min(pieces, len(others))
        size = -(-len(others) // pieces)
        chunks = [others[i : i + size] for i in range(0, len(others), size)]
        less = _less(others, chunks, lambda rest: asked((*rest, culprit)))
        if less is not None:
            others, pieces = less, max(2, pieces - 1)
        elif pieces < len(others):
            pieces = min(2 * pieces, len(others))
        else:
            break
    return (*others, culprit)


def _less(
    others: tuple[int, ...],
    chunks: list[tuple[int, ...]],
    fails: Callable[[tuple[int, ...]], bool],
) -> tuple[int, ...] | None:
    """One chunk alone, or all without one chunk, that still fails."""
    alone = [chunk for chunk in chunks if len(chunk) < len(others)]
    without = [tuple(i for i in others if i not in chunk) for chunk in chunks]
    return next((rest for rest in (*alone, *without) if fails(rest)), None)
