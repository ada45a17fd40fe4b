"""Random-walk search: finds the optimum of small spaces; incremental costs are exact."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.passes.planner.operators.layout_walk import IncrementalCost, solve_by_walk
from schedlang.passes.planner.operators.solver import solve
from schedlang.passes.planner.random_walk import walk
from tests.planner.test_operators_solve import random_problem


def test_a_walk_leaves_a_valley_and_never_takes_what_does_not_fit() -> None:
    """Heat leads out of a local minimum; infinite costs are never accepted."""
    costs = [3.0, 2.0, 2.5, 3.0, 1.0, float("inf"), 0.5]

    def propose(plan: int, rng: random.Random) -> int:
        return min(len(costs) - 1, max(0, plan + rng.choice((-1, 1))))

    result = walk(1, propose, costs.__getitem__, 400, heat=0.5)
    assert (result.plan, result.cost) == (4, 1.0)
    stuck = walk(1, propose, costs.__getitem__, 400, heat=1e-6)
    assert stuck.plan == 1


@given(seed=st.integers(0, 2**32 - 1), forbidden=st.sampled_from([0.0, 0.1, 0.4]), data=st.data())
@settings(max_examples=40, deadline=None)
def test_what_a_move_prices_again_is_the_whole_cost_exactly(
    seed: int, forbidden: float, data: st.DataObject
) -> None:
    """The incremental cost equals the full cost, for operators and values that follow them."""
    random_one = random_problem(seed, 8, 0.5, forbidden)
    operator_count = data.draw(st.integers(1, 8))
    pairs = {
        pair: costs / 7 for pair, costs in random_one.pairs.items() if pair[0] < operator_count
    }
    problem = replace(
        random_one,
        seconds=tuple(s / 3 for s in random_one.seconds),
        pairs=pairs,
        operators=operator_count,
    )
    priced = IncrementalCost(problem, [0] * 8)
    for _ in range(4):
        operator = data.draw(st.integers(0, operator_count - 1))
        option = data.draw(st.integers(0, len(problem.seconds[operator]) - 1))
        old_seconds, old_lookups, new_choice = (
            priced.seconds,
            priced.lookups,
            priced.propose_move(operator, option),
        )
        priced.change(new_choice)
        full_cost = IncrementalCost(problem, new_choice)
        assert priced.seconds == full_cost.seconds == problem.cost(priced.choice)[0]
        assert (
            priced.choice == full_cost.choice and priced.lookups - old_lookups <= full_cost.lookups
        )
        if math.isfinite(old_seconds + problem.seconds[operator][new_choice[operator]]):
            assert math.isfinite(priced.seconds)
    values = (range(len(options)) for options in problem.seconds[operator_count:])
    all_costs = (
        problem.cost((*priced.choice[:operator_count], *value_choice))[0]
        for value_choice in product(*values)
    )
    assert priced.seconds == pytest.approx(min(all_costs))


def test_one_operator_of_many_prices_its_own_edges_alone() -> None:
    """In a chain of 100 operators a move looks up three costs; a walk reaches the optimum."""
    costs = np.array([[1.0, 1.5], [1.5, 0.9]])
    single = random_problem(0, 1, 0.0, 0.0)
    chain = replace(
        single,
        seconds=(np.ones(2),) * 100,
        bytes=(np.zeros(2),) * 100,
        pairs={(k, k + 1): costs for k in range(99)},
        operators=100,
    )
    priced = IncrementalCost(chain, [0] * 100)
    old_lookups = priced.lookups
    priced.change([*[0] * 50, 1, *[0] * 49])
    assert priced.lookups - old_lookups == 3
    few = replace(
        chain,
        seconds=chain.seconds[:6],
        bytes=chain.bytes[:6],
        pairs=dict([*chain.pairs.items()][:5]),
    )
    few = replace(few, operators=6)
    by_walk, best = solve_by_walk(few), solve(few)
    assert by_walk is not None and best is not None and by_walk.seconds == best.seconds < 11.0
    assert solve_by_walk(few, -1.0) is None and not by_walk.proven
