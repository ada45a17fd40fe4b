"""The layout solver against brute force, on random graphs of a few operators."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.passes.planner.operators import solver as solver
from schedlang.passes.planner.operators.solver import Problem, solve

MAX_OPERATORS = 8  # operators


def brute_force(problem: Problem, limit: float = math.inf) -> tuple[float, float] | None:
    """Return the least seconds and that choice's bytes, over all choices within the limit."""
    spaces = [range(len(item)) for item in problem.seconds]
    costs = (problem.cost(choice) for choice in itertools.product(*spaces))
    fits = [item for item in costs if item[1] <= limit and math.isfinite(item[0])]
    return min(fits, default=None)


def random_problem(seed: int, variables: int, density: float, forbidden: float) -> Problem:
    """Return a random problem whose costs are small integers, so that ties are common."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 4, variables)

    def costs(*shape: int) -> np.ndarray:
        values = random.integers(0, 12, shape).astype(float)
        values[random.random(shape) < forbidden] = np.inf
        return values

    pairs = [p for p in itertools.combinations(range(variables), 2) if random.random() < density]
    return Problem(
        tuple(costs(n) for n in sizes),
        tuple(random.integers(0, 9, n).astype(float) for n in sizes),
        {(i, j): costs(sizes[i], sizes[j]) for i, j in pairs},
    )


graphs = st.builds(
    random_problem,
    st.integers(0, 2**32 - 1),
    st.integers(1, MAX_OPERATORS),
    st.sampled_from([0.2, 0.5, 1.0]),
    st.sampled_from([0.0, 0.1, 0.4]),
)


@given(graphs)
@settings(max_examples=60, deadline=None)
def test_equals_every_choice(problem: Problem) -> None:
    """The solution is the least of all choices, or None where all are forbidden."""
    best, solution = brute_force(problem), solve(problem)
    assert (solution is None) == (best is None)
    if solution is not None and best is not None:
        assert solution.seconds == best[0] and solution.proven
        assert problem.cost(solution.choice) == (solution.seconds, solution.bytes)


@given(graphs, st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_equals_every_choice_under_a_limit(problem: Problem, share: float) -> None:
    """The solution is the least of all choices that fit, or None where none fits."""
    sizes = [item.min() for item in problem.bytes], [item.max() for item in problem.bytes]
    smallest, largest = (float(sum(item)) for item in sizes)
    limit = smallest + share * (largest - smallest)
    best, solution = brute_force(problem, limit), solve(problem, limit)
    assert (solution is None) == (best is None)
    if solution is not None and best is not None:
        assert solution.seconds == best[0] and solution.proven and solution.bytes <= limit


@given(graphs)
@settings(max_examples=30, deadline=None)
def test_fixes_a_variable_where_a_table_would_be_too_large(problem: Problem) -> None:
    """The optimum is found with very small tables, too."""
    best, old_limit = brute_force(problem), solver.MAX_CELLS
    try:
        solver.MAX_CELLS = 9
        solution = solve(problem)
    finally:
        solver.MAX_CELLS = old_limit
    assert (solution.seconds if solution else None) == (best[0] if best else None)
