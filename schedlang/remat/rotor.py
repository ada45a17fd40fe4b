"""The tree that computes least again, for a chain of unequal modules and a limit of memory.

By dynamic programming over runs of the chain, as Beaumont, Eyraud-Dubois, Herrmann, Joly and
Shilova have it (Optimal checkpointing for heterogeneous chains, 2019; Rotor). Counted are the bytes
that are kept: what a module saves, or the input of a region; not what an operator takes while it
runs. When backward comes to a region, what stands behind it is gone, and what stands before it and
its own input are there: the rest is for what its second run keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from schedlang.remat import Tree, places

if TYPE_CHECKING:
    from schedlang.remat.operators import Operator

SLOTS = 500  # steps of memory that are told apart
NEVER = np.inf


@dataclass(frozen=True)
class Cost:
    """One module of a chain.

    work   of its forward, in any unit
    saved  bytes that it keeps where it is not recomputed
    input  bytes of what it is called with, that a region which begins here keeps
    operators  those whose results can be kept; `fixed` is what the others work a second time
    forward    all the work of its forward, counted as that of operators is
    small      of `saved` what is too small to move
    """

    work: float
    saved: int
    input: int
    operators: tuple[Operator, ...] = ()
    fixed: float = 0.0
    forward: float = 0.0
    small: int = 0


def peak(tree: Tree, chain: Sequence[Cost]) -> int:
    """The most bytes that are kept at a time in a forward and its backward."""
    found = before = 0
    for item in tree:
        if isinstance(item, tuple):
            entered = chain[places(item)[0]].input
            found = max(found, before + entered + peak(item, chain))
            before += entered
        else:
            before += chain[item].saved
        found = max(found, before)
    return found


def least(chain: Sequence[Cost]) -> tuple[int, Tree]:
    """The fewest bytes that any tree keeps at its peak, and such a tree."""
    n = len(chain)
    need = [[0] * (n + 1) for _ in range(n + 2)]  # need[s][t]: places s to t - 1
    first = [[0] * (n + 1) for _ in range(n + 1)]  # where the region ends that begins; s: none
    for length in range(1, n + 1):
        for s in range(n - length + 1):
            t = s + length
            options = [(chain[s].saved + need[s + 1][t], s)]
            options += [(chain[s].input + max(need[s][j], need[j][t]), j) for j in range(s + 1, t)]
            need[s][t], first[s][t] = min(options)

    def tree(s: int, t: int) -> Tree:
        if s == t:
            return ()
        end = first[s][t]
        return (s, *tree(s + 1, t)) if end == s else (tree(s, end), *tree(end, t))

    return need[0][n], tree(0, n)


def rotor(chain: Sequence[Cost], memory: int, slots: int = SLOTS) -> Tree | None:
    """The tree of least `again` whose `peak` is at most `memory`; None where there is none.

    Memory is counted in `slots` steps, sizes rounded up: what it gives fits, and is the best there
    is where sizes are multiples of a step.
    """
    if memory < 0 or least(chain)[0] > memory:
        return None
    if peak(tuple(range(len(chain))), chain) <= memory:
        return tuple(range(len(chain)))
    step = max(1, -(-memory // slots))
    table = _Table(
        [Cost(c.work, -(-c.saved // step), -(-c.input // step)) for c in chain], memory // step
    )
    found = table.tree(0, len(chain), memory // step)
    # rounded up, nothing may fit where the least does
    return found if found is not None else least(chain)[1]


class _Table:
    """best[s][t][m]: the least work again for places s to t - 1 with m steps of memory."""

    def __init__(self, chain: Sequence[Cost], memory: int) -> None:
        n = len(chain)
        self.chain = chain
        self.best: dict[tuple[int, int], NDArray[Any]] = {
            (s, s): np.zeros(memory + 1) for s in range(n + 1)
        }
        self.first: dict[tuple[int, int], NDArray[Any]] = {}
        for length in range(1, n + 1):
            for s in range(n - length + 1):
                self._solve(s, s + length)

    def _solve(self, s: int, t: int) -> None:
        best = _later(self.best[s + 1, t], self.chain[s].saved)
        first = np.full(best.shape, s)
        work = 0.0
        for j in range(s + 1, t):  # a region s to j - 1, and what stands behind it
            work += self.chain[j - 1].work
            inner = self.best[s, j] + self.best[j, t] + work
            found = _later(inner, self.chain[s].input)
            first = np.where(found < best, j, first)
            best = np.minimum(best, found)
        self.best[s, t], self.first[s, t] = best, first

    def tree(self, s: int, t: int, memory: int) -> Tree | None:
        """The tree over places s to t - 1; None if nothing fits."""
        if s == t:
            return ()
        if self.best[s, t][memory] == NEVER:
            return None
        end = int(self.first[s, t][memory])
        if end == s:
            rest = self.tree(s + 1, t, memory - self.chain[s].saved)
            return None if rest is None else (s, *rest)
        left = memory - self.chain[s].input
        inner, rest = self.tree(s, end, left), self.tree(end, t, left)
        return None if inner is None or rest is None else (inner, *rest)


def _later(row: NDArray[Any], by: int) -> NDArray[Any]:
    """The same row, of which `by` steps of memory are gone."""
    moved = np.full(row.shape, NEVER)
    if by < len(row):
        moved[by:] = row[: len(row) - by]
    return moved
