"""A walk finds the best plan of small spaces, and delta simulation equals the whole one."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.passes.planner.operators.solve import solve
from schedlang.passes.planner.operators.walked import Repriced, walked
from schedlang.passes.planner.simulated import simulated
from schedlang.passes.planner.walk import Retimed, walk, walk_cuts
from schedlang.pipeline.schedules import order
from schedlang.pipeline.timeline.simulation import timing
from tests.planner.test_operators_solve import drawn

ORDERS = [("1F1B", 1), ("GPipe", 1), ("ZB-H1", 1), ("Interleaved1F1B", 2), ("ZB-V", 2)]


@pytest.mark.parametrize(("name", "chunks"), ORDERS)
@given(data=st.data())
@settings(max_examples=10)
def test_delta_simulation_is_the_whole_simulation_exactly(
    name: str, chunks: int, data: st.DataObject
) -> None:
    """Operations timed again from a change end exactly as when all are timed."""
    ranks = data.draw(st.integers(2, 4))
    line = order(name, ranks, 2 * ranks, chunks)
    seconds = st.integers(1, 20).map(float)
    took = data.draw(st.lists(seconds, min_size=len(line), max_size=len(line)))
    send = data.draw(st.sampled_from([0.0, 0.5]))
    timed = Retimed(line, took, send)
    for _ in range(3):
        change = data.draw(st.dictionaries(st.integers(0, len(line) - 1), seconds, max_size=4))
        timed.change(change.items())
        for row, new in change.items():
            took[row] = new
        whole = timing(line, np.array(took), send)
        assert timed.seconds == whole.makespan
        assert timed.end == whole.end.tolist()


def test_only_what_a_change_reaches_is_timed_again() -> None:
    """A change at the end, or none, times next to nothing."""
    line = order("1F1B", 4, 16)
    timed = Retimed(line, [1.0] * len(line))
    before = timed.timed
    assert before == len(line)
    timed.change([(len(line) - 1, 2.0)])
    assert timed.timed - before < len(line) / 10
    timed.change([])
    timed.change([(0, 1.0)])  # as it was
    assert timed.timed - before < len(line) / 10


def test_orders_with_copies_are_refused() -> None:
    """Copy streams are no part of the delta simulation, which says so."""
    with pytest.raises(ValueError, match="compute and send"):
        Retimed(order("BPipe", 4, 8), [1.0] * len(order("BPipe", 4, 8)))


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_a_walk_over_cuts_comes_to_the_optimum(name: str) -> None:
    """A walk from a bad cut ends at the proven optimum."""
    times = [(3.0, 5.0), (1.0, 2.0), (1.0, 2.0), (2.0, 4.0), (1.0, 1.0), (2.0, 2.0), (4.0, 9.0)]
    line = order(name, 3, 6)
    best = simulated(line, times)
    assert best is not None and best.proven
    found = walk_cuts(line, times, (5, 1, 1), 150)
    assert found.cost == pytest.approx(best.seconds) and sum(found.plan) == len(times)
    assert 0 < found.taken < 150


def test_a_walk_leaves_a_valley_and_never_takes_what_does_not_fit() -> None:
    """Heat leads out of a valley; infinite costs are never taken."""
    costs = [3.0, 2.0, 2.5, 3.0, 1.0, float("inf"), 0.5]

    def propose(at: int, chance: random.Random) -> int:
        return min(len(costs) - 1, max(0, at + chance.choice((-1, 1))))

    found = walk(1, propose, costs.__getitem__, 400, heat=0.5)
    assert (found.plan, found.cost) == (4, 1.0)
    stuck = walk(1, propose, costs.__getitem__, 400, heat=1e-6)
    assert stuck.plan == 1


# -- operators ---------------------------------------------------------------------------------


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
    priced = Repriced(problem, [0] * 8)
    for _ in range(4):
        at = data.draw(st.integers(0, own - 1))
        option = data.draw(st.integers(0, len(problem.seconds[at]) - 1))
        before, looked, there = priced.seconds, priced.priced, priced.moved(at, option)
        priced.change(there)
        whole = Repriced(problem, there)
        assert priced.seconds == whole.seconds == problem.cost(priced.choice)[0]
        assert priced.choice == whole.choice and priced.priced - looked <= whole.priced
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
    priced = Repriced(chain, [0] * 100)
    before = priced.priced
    priced.change([*[0] * 50, 1, *[0] * 49])
    assert priced.priced - before == 3
    few = replace(
        chain,
        seconds=chain.seconds[:6],
        bytes=chain.bytes[:6],
        pairs=dict([*chain.pairs.items()][:5]),
    )
    few = replace(few, operators=6)
    found, best = walked(few), solve(few)
    assert found is not None and best is not None and found.seconds == best.seconds < 11.0
    assert walked(few, -1.0) is None and not found.proven
