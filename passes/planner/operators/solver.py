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

    seconds    of every variable, a vector over its options
    bytes      the same; they are finite
    pairs      (i, j) with i < j -> seconds, options of i by options of j
    operators  the number of leading variables that are operators; the others depend on these alone
    """

    seconds: tuple[Costs, ...]
    bytes: tuple[Costs, ...]
    pairs: Mapping[tuple[int, int], Costs]
    operators: int = 0

    def cost(self, choice: Sequence[int]) -> tuple[float, float]:
        """Return seconds and bytes of one choice."""
        seconds = [float(costs[k]) for costs, k in zip(self.seconds, choice)]
        seconds += [float(m[choice[i], choice[j]]) for (i, j), m in self.pairs.items()]
        return math.fsum(seconds), sum(float(costs[k]) for costs, k in zip(self.bytes, choice))

    def with_fixed(self, variable: int, option: int) -> Problem:
        """Return the problem with one variable decided."""
        only = np.full_like(self.seconds[variable], np.inf)
        only[option] = self.seconds[variable][option]
        seconds = (*self.seconds[:variable], only, *self.seconds[variable + 1 :])
        return replace(self, seconds=seconds)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The order of elimination: next the variable whose table is the smallest."""
        return _order([len(costs) for costs in self.seconds], self.pairs)


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
    reduced, kept = _possible(problem)
    if not all(map(len, kept)):
        return None
    solution = _least(reduced, 0.0)
    if solution is not None and solution.bytes > limit:
        solution = _limited(reduced, limit, branches)
    if solution is None:
        return None
    return replace(solution, choice=tuple(int(row[k]) for row, k in zip(kept, solution.choice)))


def _possible(problem: Problem) -> tuple[Problem, list[NDArray[np.intp]]]:
    """Remove options that no option of another variable allows; also return the remaining options.

    Arc consistency (Mackworth 1977).
    """
    allowed_options: list[NDArray[Any]] = [np.isfinite(values) for values in problem.seconds]
    count = -1
    while count != (count := sum(int(values.sum()) for values in allowed_options)):
        for (i, j), costs in problem.pairs.items():
            allowed = np.isfinite(costs) & allowed_options[i][:, None] & allowed_options[j]
            allowed_options[i], allowed_options[j] = allowed.any(axis=1), allowed.any(axis=0)
    kept = [np.flatnonzero(values) for values in allowed_options]
    reduced = replace(
        problem,
        seconds=tuple(values[k] for values, k in zip(problem.seconds, kept)),
        bytes=tuple(values[k] for values, k in zip(problem.bytes, kept)),
        pairs={(i, j): costs[np.ix_(kept[i], kept[j])] for (i, j), costs in problem.pairs.items()},
    )
    return reduced, kept


# -- without a limit ------------------------------------------------------------------------------


def _order(sizes: Sequence[int], pairs: Mapping[tuple[int, int], Costs]) -> tuple[int, ...]:
    neighbours: dict[int, set[int]] = {k: set() for k in range(len(sizes))}
    for i, j in pairs:
        neighbours[i].add(j)
        neighbours[j].add(i)

    def cells(k: int) -> int:
        return sizes[k] * math.prod(sizes[neighbour] for neighbour in neighbours[k])

    table, order = {k: cells(k) for k in neighbours}, []
    while table:
        variable = min(table, key=table.__getitem__)
        around = neighbours.pop(variable)
        del table[variable]
        for neighbour in around:
            neighbours[neighbour] |= around - {neighbour}
            neighbours[neighbour].discard(variable)
        table |= {neighbour: cells(neighbour) for neighbour in around}  # other tables do not change
        order.append(variable)
    return tuple(order)


def _least(problem: Problem, price: float) -> Solution | None:
    """Minimise seconds plus `price` times bytes; None where every choice is forbidden."""
    factors: list[Factor] = [
        ((k,), vector + price * byte_costs if price else vector)
        for k, (vector, byte_costs) in enumerate(zip(problem.seconds, problem.bytes))
    ]
    factors += [(pair, costs) for pair, costs in problem.pairs.items()]
    sizes = [len(vector) for vector in problem.seconds]
    choice = _eliminated(factors, sizes, problem.order)
    if choice is None:
        return None
    seconds, size = problem.cost(choice)
    return Solution(choice, seconds, size, seconds + price * size)


def _eliminated(
    factors: list[Factor], sizes: Sequence[int], order: Sequence[int]
) -> tuple[int, ...] | None:
    """Find the cheapest choice by elimination; a variable whose table would be too large is
    enumerated."""
    steps: list[tuple[int, tuple[int, ...], NDArray[np.intp]]] = []
    for variable in order:
        touching = [factor for factor in factors if variable in factor[0]]
        scope = tuple(sorted({v for variables, _ in touching for v in variables} - {variable}))
        if sizes[variable] * math.prod(sizes[v] for v in scope) > MAX_CELLS:
            widest = max(scope, key=lambda v: sum(v in variables for variables, _ in factors))
            return _conditioned(factors, sizes, [v for v in order if v != widest], widest, steps)
        table = _joined(touching, (*scope, variable), sizes)
        factors = [factor for factor in factors if variable not in factor[0]]
        factors.append((scope, table.min(axis=-1)))
        steps.append((variable, scope, table.argmin(axis=-1)))
    total = sum(float(table) for _, table in factors)
    return None if math.isinf(total) else _traced(steps, {}, len(sizes))


def _joined(factors: Sequence[Factor], scope: tuple[int, ...], sizes: Sequence[int]) -> Costs:
    """Add factors over all of their variables, in the order of `scope`."""
    table = np.zeros([sizes[v] for v in scope])
    axis_of = {v: k for k, v in enumerate(scope)}
    for variables, costs in factors:
        ranked = sorted(range(len(variables)), key=lambda k: axis_of[variables[k]])
        shape = [1] * len(scope)
        for v in variables:
            shape[axis_of[v]] = sizes[v]
        table += costs.transpose(ranked).reshape(shape)
    return table


def _conditioned(
    factors: Sequence[Factor],
    sizes: Sequence[int],
    order: Sequence[int],
    variable: int,
    steps: list[tuple[int, tuple[int, ...], NDArray[np.intp]]],
) -> tuple[int, ...] | None:
    """Find the cheapest choice over all options of one variable, each tried by itself."""
    best: tuple[float, tuple[int, ...]] | None = None
    decided = {earlier for earlier, _, _ in steps}
    remaining = [v for v in order if v not in decided]
    for option in range(sizes[variable]):
        cut: list[Factor] = []
        for variables, costs in factors:
            if variable in variables:
                costs = np.asarray(costs.take(option, axis=variables.index(variable)))
                variables = tuple(v for v in variables if v != variable)
            cut.append((variables, costs))
        inner = _eliminated(cut, sizes, remaining)
        if inner is None:
            continue
        choice = {v: inner[v] for v in remaining} | {variable: option}
        value = sum(float(costs[tuple(choice[v] for v in variables)]) for variables, costs in cut)
        if best is None or value < best[0]:
            best = value, _traced(steps, choice, len(sizes))
    return None if best is None else best[1]


def _traced(
    steps: Sequence[tuple[int, tuple[int, ...], NDArray[np.intp]]],
    choice: dict[int, int],
    count: int,
) -> tuple[int, ...]:
    """Return the choices of eliminated variables, from the last to the first."""
    choice = dict(choice)
    for variable, scope, best in reversed(steps):
        choice[variable] = int(best[tuple(choice[v] for v in scope)])
    return tuple(choice.get(v, 0) for v in range(count))


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

    smallest = _least(
        replace(
            problem,
            seconds=tuple(allowed(s) + b for s, b in zip(problem.seconds, problem.bytes)),
            pairs={pair: allowed(costs) for pair, costs in problem.pairs.items()},
        ),
        0.0,
    )
    if smallest is None:
        return None
    seconds, size = problem.cost(smallest.choice)
    return Solution(smallest.choice, seconds, size, seconds)


def _limited(problem: Problem, limit: float, branches: int) -> Solution | None:
    """Branch and bound, best first: the branch with the lowest bound splits where its choices
    differ."""
    root, counter = _bounded(problem, limit), itertools.count()
    if root is None:
        return None
    best, heap = root.fits, [(root.bound, next(counter), problem, root)]
    while heap:
        bound, _, node, branch = heapq.heappop(heap)
        if bound >= best.seconds - RELATIVE_TIE * max(1.0, abs(best.seconds)):
            return replace(best, bound=best.seconds)
        if next(counter) > branches:
            return replace(best, bound=bound)
        if branch.over is None:
            continue
        pairs = zip(branch.fits.choice, branch.over.choice)
        differ = [v for v, (a, b) in enumerate(pairs) if a != b]
        widest = max(differ, key=lambda v: abs(np.ptp(node.bytes[v])))
        for option in np.flatnonzero(np.isfinite(node.seconds[widest])):
            child = node.with_fixed(widest, int(option))
            bounded = _bounded(child, limit)
            if bounded is None or bounded.bound >= best.seconds:
                continue
            best = min(best, bounded.fits, key=lambda solution: solution.seconds)
            heapq.heappush(heap, (bounded.bound, next(counter), child, bounded))
    return replace(best, bound=best.seconds)
