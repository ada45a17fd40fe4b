"""A walk finds the best plan of small spaces; what a move prices again is the whole cost."""

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
from tests.planner.test_operators_solve import drawn


def test_a_walk_leaves_a_valley_and_never_takes_what_does_not_fit() -> None:
    """Heat leads out of a valley; infinite costs are never taken."""
    costs = [3.0, 2.0, 2.5, 3.0, 1.0, float("inf"), 0.5]

    def propose(at: int, chance: random.Random) -> int:
        return min(len(costs) - 1, max(0, at + chance.choice((-1, 1))))

    found = walk(1, propose, costs.__getitem__, 400, heat=0.5)
    assert (found.plan, found.cost) == (4, 1.0)
    stuck = walk(1, propose, costs.__getitem__, 400, heat=1e-6)
    assert stuck.plan == 1


@given(seed=st.integers(0, 2**32 - 1), forbidden=st.sampled_from([0.0, 0.1, 0.4]), data=st.data())
@settings(max_examples=40, deadline=None)
def test_what_a_move_prices_again_is_the_whole_cost_exactly(
    seed: int, forbidden: float, data: st.DataObject
) -> None:
    """Of operators and of values that follow them; what the language says it still says after."""
    made = drawn(seed, 8, 0.5, forbidden)
    own = data.draw(st.integers(1, 8))
    pairs = {pair: costs / 7 for pair, costs in made.pairs.items() if pair[0] < own}
    problem = replace(made, seconds=tuple(s / 3 for s in made.seconds), pairs=pairs, operators=own)
    priced = IncrementalCost(problem, [0] * 8)
    for _ in range(4):
        at = data.draw(st.integers(0, own - 1))
        option = data.draw(st.integers(0, len(problem.seconds[at]) - 1))
        before, looked, there = priced.seconds, priced.lookups, priced.propose_move(at, option)
        priced.change(there)
        whole = IncrementalCost(problem, there)
        assert priced.seconds == whole.seconds == problem.cost(priced.choice)[0]
        assert priced.choice == whole.choice and priced.lookups - looked <= whole.lookups
        if math.isfinite(before + problem.seconds[at][there[at]]):
            assert math.isfinite(priced.seconds)
    values = (range(len(one)) for one in problem.seconds[own:])
    every = (problem.cost((*priced.choice[:own], *rest))[0] for rest in product(*values))
    assert priced.seconds == pytest.approx(min(every))


def test_one_operator_of_many_prices_its_own_edges_alone() -> None:
    """Of a chain of 100 operators a move looks at three, and a walk comes to the optimum."""
    costs = np.array([[1.0, 1.5], [1.5, 0.9]])
    one = drawn(0, 1, 0.0, 0.0)
    chain = replace(
        one,
        seconds=(np.ones(2),) * 100,
        bytes=(np.zeros(2),) * 100,
        pairs={(k, k + 1): costs for k in range(99)},
        operators=100,
    )
    priced = IncrementalCost(chain, [0] * 100)
    before = priced.lookups
    priced.change([*[0] * 50, 1, *[0] * 49])
    assert priced.lookups - before == 3
    few = replace(
        chain,
        seconds=chain.seconds[:6],
        bytes=chain.bytes[:6],
        pairs=dict([*chain.pairs.items()][:5]),
    )
    few = replace(few, operators=6)
    found, best = solve_by_walk(few), solve(few)
    assert found is not None and best is not None and found.seconds == best.seconds < 11.0
    assert solve_by_walk(few, -1.0) is None and not found.proven
