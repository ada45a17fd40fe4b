"""A walk finds the best plan of small spaces, and delta simulation equals the whole one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.passes.planner.simulated import simulated
from schedlang.passes.planner.walk import Retimed, walk, walk_cuts
from schedlang.pipeline.schedules import order
from schedlang.pipeline.timeline.simulation import timing

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
