"""Equality of the solver of layouts with trying every choice, on drawn graphs of few operators."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.passes.planner.operators import solver as solver
from schedlang.passes.planner.operators.solver import Problem, solve

MOST = 8  # operators


def tried(problem: Problem, limit: float = math.inf) -> tuple[float, float] | None:
    """Return the least seconds, and bytes of that choice, of all choices that fit."""
    spaces = [range(len(one)) for one in problem.seconds]
    costs = (problem.cost(choice) for choice in itertools.product(*spaces))
    fits = [one for one in costs if one[1] <= limit and math.isfinite(one[0])]
    return min(fits, default=None)


def drawn(seed: int, variables: int, density: float, forbidden: float) -> Problem:
    """A graph of some operators with costs that few whole numbers make, so that ties are common."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 4, variables)

    def costs(*shape: int) -> np.ndarray:
        made = random.integers(0, 12, shape).astype(float)
        made[random.random(shape) < forbidden] = np.inf
        return made

    pairs = [p for p in itertools.combinations(range(variables), 2) if random.random() < density]
    return Problem(
        tuple(costs(n) for n in sizes),
        tuple(random.integers(0, 9, n).astype(float) for n in sizes),
        {(i, j): costs(sizes[i], sizes[j]) for i, j in pairs},
    )


graphs = st.builds(
    drawn,
    st.integers(0, 2**32 - 1),
    st.integers(1, MOST),
    st.sampled_from([0.2, 0.5, 1.0]),
    st.sampled_from([0.0, 0.1, 0.4]),
)


@given(graphs)
@settings(max_examples=60, deadline=None)
def test_equals_every_choice(problem: Problem) -> None:
    """The least of all choices, or none where all are forbidden."""
    best, found = tried(problem), solve(problem)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.seconds == best[0] and found.proven
        assert problem.cost(found.choice) == (found.seconds, found.bytes)


@given(graphs, st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_equals_every_choice_under_a_limit(problem: Problem, share: float) -> None:
    """The least of all choices that fit, or none where none does."""
    sizes = [one.min() for one in problem.bytes], [one.max() for one in problem.bytes]
    low, high = (float(sum(one)) for one in sizes)
    limit = low + share * (high - low)
    best, found = tried(problem, limit), solve(problem, limit)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.seconds == best[0] and found.proven and found.bytes <= limit


@given(graphs)
@settings(max_examples=30, deadline=None)
def test_fixes_a_variable_where_a_table_would_be_too_large(problem: Problem) -> None:
    """The least is found through small tables, too."""
    best, large = tried(problem), solver.MAX_CELLS
    try:
        solver.MAX_CELLS = 9
        found = solve(problem)
    finally:
        solver.MAX_CELLS = large
    assert (found.seconds if found else None) == (best[0] if best else None)
