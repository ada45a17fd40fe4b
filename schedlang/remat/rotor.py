"""The tree with the least recomputation for a chain of unequal modules and a memory limit.

Dynamic programming over runs of the chain: Rotor (Beaumont, Eyraud-Dubois, Herrmann, Joly and
Shilova, Optimal checkpointing for heterogeneous chains, 2019).  Only saved bytes count: what a
module saves, or the input of a region; not what an operator needs while it runs.  When backward
reaches a region, everything behind the region is freed, and everything before it and its own input
is held: the remaining memory is for what its recomputation saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from schedlang.remat import RematTree, places_of

if TYPE_CHECKING:
    from schedlang.remat.operators import Operator

MEMORY_STEPS = 500  # steps of memory
IMPOSSIBLE = np.inf


@dataclass(frozen=True)
class ModuleCost:
    """One module of a chain.

    work       of its forward, in any unit
    saved      bytes that it saves where it is not recomputed
    input      bytes of its input, which a region that begins here saves
    operators  whose results can be saved; `fixed` is the repeated work of all others
    forward    all work of its forward, in the unit of `operators`
    small      bytes of `saved` that are too small to move
    """

    work: float
    saved: int
    input: int
    operators: tuple[Operator, ...] = ()
    fixed: float = 0.0
    forward: float = 0.0
    small: int = 0


def peak_saved(tree: RematTree, chain: Sequence[ModuleCost]) -> int:
    """Return the most bytes that are saved at a time in a forward and its backward."""
    peak = before = 0
    for item in tree:
        if isinstance(item, tuple):
            entered = chain[places_of(item)[0]].input
            peak = max(peak, before + entered + peak_saved(item, chain))
            before += entered
        else:
            before += chain[item].saved
        peak = max(peak, before)
    return peak


def smallest_tree(chain: Sequence[ModuleCost]) -> tuple[int, RematTree]:
    """Return the fewest bytes that any tree saves at its peak, and such a tree."""
    n = len(chain)
    need = [[0] * (n + 1) for _ in range(n + 2)]  # need[s][t]: places s to t - 1
    first = [[0] * (n + 1) for _ in range(n + 1)]  # end of the region that begins at s; s: none
    for length in range(1, n + 1):
        for s in range(n - length + 1):
            t = s + length
            options = [(chain[s].saved + need[s + 1][t], s)]
            options += [(chain[s].input + max(need[s][j], need[j][t]), j) for j in range(s + 1, t)]
            need[s][t], first[s][t] = min(options)

    def tree(s: int, t: int) -> RematTree:
        if s == t:
            return ()
        end = first[s][t]
        return (s, *tree(s + 1, t)) if end == s else (tree(s, end), *tree(end, t))

    return need[0][n], tree(0, n)


def rotor(chain: Sequence[ModuleCost], memory: int, slots: int = MEMORY_STEPS) -> RematTree | None:
    """Return the tree with the least recomputation and a `peak_saved` of at most `memory`; None:
    nothing fits.

    Memory is counted in `slots` steps, sizes rounded up: the result fits, and is optimal where
    sizes are multiples of a step.
    """
    if memory < 0 or smallest_tree(chain)[0] > memory:
        return None
    if peak_saved(tuple(range(len(chain))), chain) <= memory:
        return tuple(range(len(chain)))
    step = max(1, -(-memory // slots))
    table = _Table(
        [ModuleCost(cost.work, -(-cost.saved // step), -(-cost.input // step)) for cost in chain],
        memory // step,
    )
    tree = table.tree(0, len(chain), memory // step)
    # with rounding up nothing may fit, although the smallest tree does
    return tree if tree is not None else smallest_tree(chain)[1]


class _Table:
    """best[s][t][m]: the least repeated work for places s to t - 1 with m steps of memory."""

    def __init__(self, chain: Sequence[ModuleCost], memory: int) -> None:
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
        best = _shifted(self.best[s + 1, t], self.chain[s].saved)
        first = np.full(best.shape, s)
        work = 0.0
        for j in range(s + 1, t):  # a region s to j - 1, and the rest
            work += self.chain[j - 1].work
            inner = self.best[s, j] + self.best[j, t] + work
            candidate = _shifted(inner, self.chain[s].input)
            first = np.where(candidate < best, j, first)
            best = np.minimum(best, candidate)
        self.best[s, t], self.first[s, t] = best, first

    def tree(self, s: int, t: int, memory: int) -> RematTree | None:
        """Return the tree over places s to t - 1; None if nothing fits."""
        if s == t:
            return ()
        if self.best[s, t][memory] == IMPOSSIBLE:
            return None
        end = int(self.first[s, t][memory])
        if end == s:
            rest = self.tree(s + 1, t, memory - self.chain[s].saved)
            return None if rest is None else (s, *rest)
        left = memory - self.chain[s].input
        inner, rest = self.tree(s, end, left), self.tree(end, t, left)
        return None if inner is None or rest is None else (inner, *rest)


def _shifted(row: NDArray[Any], by: int) -> NDArray[Any]:
    """Shift a row by `by` steps of memory, which are used up."""
    shifted = np.full(row.shape, IMPOSSIBLE)
    if by < len(row):
        shifted[by:] = row[: len(row) - by]
    return shifted
