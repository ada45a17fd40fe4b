"""Exact choice of one option for each variable, with costs of variables and of pairs of variables.

* Elimination of variables one by one (Bertele & Brioschi 1972; Dechter 1999, bucket elimination):
  time grows with the width of the graph, which is small for models, not with their length.
* Under a limit of bytes the same with a price of a byte, and branch and bound: Lagrangian
  relaxation (Geoffrion 1974) bounds every branch, so the best is proven.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
Factor = tuple[tuple[int, ...], Costs]

MAX_CELLS = 1 << 22  # maximal cells of a table; instead of a larger one a variable is enumerated
MAX_BRANCHES = 4000  # maximal branches under a limit of bytes; then the best so far is returned
RELATIVE_TIE = 1e-12  # relative difference below which seconds are equal


@dataclass(frozen=True)
class Problem:
    """Variables, each with some options; an infinite cost forbids an option or a pair.

    seconds  of every variable, a vector over its options
    bytes    the same; they are finite
    pairs    (i, j) with i < j -> seconds, options of i by options of j
    operators  the number of leading variables that are operators; the others depend on these alone
    """

    seconds: tuple[Costs, ...]
    bytes: tuple[Costs, ...]
    pairs: Mapping[tuple[int, int], Costs]
    operators: int = 0

    def cost(self, choice: Sequence[int]) -> tuple[float, float]:
        """Return seconds and bytes of one choice."""
        seconds = [float(one[k]) for one, k in zip(self.seconds, choice)]
        seconds += [float(m[choice[i], choice[j]]) for (i, j), m in self.pairs.items()]
        return math.fsum(seconds), sum(float(one[k]) for one, k in zip(self.bytes, choice))

    def with_fixed(self, variable: int, option: int) -> Problem:
        """Return the problem with one variable decided."""
        only = np.full_like(self.seconds[variable], np.inf)
        only[option] = self.seconds[variable][option]
        seconds = (*self.seconds[:variable], only, *self.seconds[variable + 1 :])
        return replace(self, seconds=seconds)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The order of elimination: next the variable whose table is the smallest."""
        return _order([len(one) for one in self.seconds], self.pairs)


@dataclass(frozen=True)
class Solution:
    """A choice and its costs; no choice costs fewer seconds than `bound`."""

    choice: tuple[int, ...]
    seconds: float
    bytes: float
    bound: float

    @property
    def proven(self) -> bool:
        """Whether the choice is the best."""
        return self.seconds - self.bound <= RELATIVE_TIE * max(1.0, abs(self.seconds))


Solver = Callable[[Problem, float], Solution | None]


def solve(
    problem: Problem, limit: float = math.inf, branches: int = MAX_BRANCHES
) -> Solution | None:
    """Find the quickest choice of at most `limit` bytes; None where there is none.

    The result is proven to be the best (`Solution.proven`) unless more than `branches` were needed.
    """
    if not all(map(len, problem.seconds)):
        return None
    small, kept = _possible(problem)
    if not all(map(len, kept)):
        return None
    found = _least(small, 0.0)
    if found is not None and found.bytes > limit:
        found = _limited(small, limit, branches)
    if found is None:
        return None
    return replace(found, choice=tuple(int(one[k]) for one, k in zip(kept, found.choice)))


def _possible(problem: Problem) -> tuple[Problem, list[NDArray[np.intp]]]:
    """Remove options that no option of another variable allows; also return the remaining options.

    Arc consistency (Mackworth 1977).
    """
    allowed_options: list[NDArray[Any]] = [np.isfinite(one) for one in problem.seconds]
    count = -1
    while count != (count := sum(int(one.sum()) for one in allowed_options)):
        for (i, j), costs in problem.pairs.items():
            allowed = np.isfinite(costs) & allowed_options[i][:, None] & allowed_options[j]
            allowed_options[i], allowed_options[j] = allowed.any(axis=1), allowed.any(axis=0)
    kept = [np.flatnonzero(one) for one in allowed_options]
    small = replace(
        problem,
        seconds=tuple(one[k] for one, k in zip(problem.seconds, kept)),
        bytes=tuple(one[k] for one, k in zip(problem.bytes, kept)),
        pairs={(i, j): costs[np.ix_(kept[i], kept[j])] for (i, j), costs in problem.pairs.items()},
    )
    return small, kept


# -- without a limit ------------------------------------------------------------------------------


def _order(sizes: Sequence[int], pairs: Mapping[tuple[int, int], Costs]) -> tuple[int, ...]:
    near: dict[int, set[int]] = {k: set() for k in range(len(sizes))}
    for i, j in pairs:
        near[i].add(j)
        near[j].add(i)

    def cells(k: int) -> int:
        return sizes[k] * math.prod(sizes[other] for other in near[k])

    table, order = {k: cells(k) for k in near}, []
    while table:
        chosen = min(table, key=table.__getitem__)
        around = near.pop(chosen)
        del table[chosen]
        for other in around:
            near[other] |= around - {other}
            near[other].discard(chosen)
        table |= {other: cells(other) for other in around}  # other tables do not change
        order.append(chosen)
    return tuple(order)


def _least(problem: Problem, price: float) -> Solution | None:
    """Minimise seconds plus `price` times bytes; None where every choice is forbidden."""
    factors: list[Factor] = [
        ((k,), one + price * more if price else one)
        for k, (one, more) in enumerate(zip(problem.seconds, problem.bytes))
    ]
    factors += [(pair, costs) for pair, costs in problem.pairs.items()]
    sizes = [len(one) for one in problem.seconds]
    found = _eliminated(factors, sizes, problem.order)
    if found is None:
        return None
    seconds, size = problem.cost(found)
    return Solution(found, seconds, size, seconds + price * size)


def _eliminated(
    factors: list[Factor], sizes: Sequence[int], order: Sequence[int]
) -> tuple[int, ...] | None:
    """Find the cheapest choice by elimination; a variable whose table would be too large is
    enumerated."""
    done: list[tuple[int, tuple[int, ...], NDArray[np.intp]]] = []
    for variable in order:
        mine = [one for one in factors if variable in one[0]]
        scope = tuple(sorted({v for own, _ in mine for v in own} - {variable}))
        if sizes[variable] * math.prod(sizes[v] for v in scope) > MAX_CELLS:
            widest = max(scope, key=lambda v: sum(v in own for own, _ in factors))
            return _conditioned(factors, sizes, [v for v in order if v != widest], widest, done)
        table = _joined(mine, (*scope, variable), sizes)
        factors = [one for one in factors if variable not in one[0]]
        factors.append((scope, table.min(axis=-1)))
        done.append((variable, scope, table.argmin(axis=-1)))
    total = sum(float(table) for _, table in factors)
    return None if math.isinf(total) else _traced(done, {}, len(sizes))


def _joined(factors: Sequence[Factor], scope: tuple[int, ...], sizes: Sequence[int]) -> Costs:
    """Add factors over all of their variables, in the order of `scope`."""
    table = np.zeros([sizes[v] for v in scope])
    place = {v: k for k, v in enumerate(scope)}
    for own, costs in factors:
        ranked = sorted(range(len(own)), key=lambda k: place[own[k]])
        shape = [1] * len(scope)
        for v in own:
            shape[place[v]] = sizes[v]
        table += costs.transpose(ranked).reshape(shape)
    return table


def _conditioned(
    factors: Sequence[Factor],
    sizes: Sequence[int],
    order: Sequence[int],
    variable: int,
    done: list[tuple[int, tuple[int, ...], NDArray[np.intp]]],
) -> tuple[int, ...] | None:
    """Find the cheapest choice over all options of one variable, each tried by itself."""
    best: tuple[float, tuple[int, ...]] | None = None
    gone = {one for one, _, _ in done}
    left = [v for v in order if v not in gone]
    for option in range(sizes[variable]):
        cut: list[Factor] = []
        for own, costs in factors:
            if variable in own:
                costs = np.asarray(costs.take(option, axis=own.index(variable)))
                own = tuple(v for v in own if v != variable)
            cut.append((own, costs))
        inner = _eliminated(cut, sizes, left)
        if inner is None:
            continue
        chosen = {v: inner[v] for v in left} | {variable: option}
        value = sum(float(costs[tuple(chosen[v] for v in own)]) for own, costs in cut)
        if best is None or value < best[0]:
            best = value, _traced(done, chosen, len(sizes))
    return None if best is None else best[1]


def _traced(
    done: Sequence[tuple[int, tuple[int, ...], NDArray[np.intp]]],
    chosen: dict[int, int],
    count: int,
) -> tuple[int, ...]:
    """Return the choices of eliminated variables, from the last to the first."""
    chosen = dict(chosen)
    for variable, scope, best in reversed(done):
        chosen[variable] = int(best[tuple(chosen[v] for v in scope)])
    return tuple(chosen.get(v, 0) for v in range(count))


# -- with a limit ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bounded:
    """One branch: a choice that fits and one that does not; none that fits is quicker than
    `bound`."""

    bound: float
    fits: Solution
    over: Solution | None


def _bounded(problem: Problem, limit: float) -> _Bounded | None:
    """Bound a branch by the best Lagrangian price of bytes; None where nothing fits."""
    over = _least(problem, 0.0)
    if over is None:
        return None
    if over.bytes <= limit:
        return _Bounded(over.seconds, over, None)
    small = solve_smallest(problem)
    if small is None or small.bytes > limit:
        return None
    fits, bound = small, over.seconds
    while True:
        price = (fits.seconds - over.seconds) / (over.bytes - fits.bytes)
        if price <= 0:
            return _Bounded(bound, fits, over)
        middle = _least(problem, price)
        assert middle is not None
        bound = max(bound, middle.bound - price * limit)
        line = over.seconds + price * over.bytes
        if middle.bound >= line - RELATIVE_TIE * max(1.0, abs(line)):
            return _Bounded(bound, fits, over)
        fits, over = (middle, over) if middle.bytes <= limit else (fits, middle)


def solve_smallest(problem: Problem) -> Solution | None:
    """Find the choice of the fewest bytes; None where all are forbidden."""

    def allowed(costs: Costs) -> Costs:
        return np.where(np.isinf(costs), np.inf, 0.0)

    least = _least(
        replace(
            problem,
            seconds=tuple(allowed(s) + b for s, b in zip(problem.seconds, problem.bytes)),
            pairs={pair: allowed(costs) for pair, costs in problem.pairs.items()},
        ),
        0.0,
    )
    if least is None:
        return None
    seconds, size = problem.cost(least.choice)
    return Solution(least.choice, seconds, size, seconds)


def _limited(problem: Problem, limit: float, branches: int) -> Solution | None:
    """Branch and bound, best first: the branch with the lowest bound splits where its choices
    differ."""
    first, turn = _bounded(problem, limit), itertools.count()
    if first is None:
        return None
    best, heap = first.fits, [(first.bound, next(turn), problem, first)]
    while heap:
        bound, _, node, branch = heapq.heappop(heap)
        if bound >= best.seconds - RELATIVE_TIE * max(1.0, abs(best.seconds)):
            return replace(best, bound=best.seconds)
        if next(turn) > branches:
            return replace(best, bound=bound)
        if branch.over is None:
            continue
        pairs = zip(branch.fits.choice, branch.over.choice)
        differ = [v for v, (a, b) in enumerate(pairs) if a != b]
        widest = max(differ, key=lambda v: abs(np.ptp(node.bytes[v])))
        for option in np.flatnonzero(np.isfinite(node.seconds[widest])):
            child = node.with_fixed(widest, int(option))
            found = _bounded(child, limit)
            if found is None or found.bound >= best.seconds:
                continue
            best = min(best, found.fits, key=lambda one: one.seconds)
            heapq.heappush(heap, (found.bound, next(turn), child, found))
    return replace(best, bound=best.seconds)
