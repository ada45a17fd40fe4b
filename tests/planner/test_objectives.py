"""Cost within a deadline, and energy under limits, beside every choice there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlang.passes.planner.objectives import Bandit, Power, Work, cheapest, provisions, runs

SIZES = (1, 2, 4, 8, 16)
V100 = Power(70.0, 250.0, (100.0, 125.0, 150.0, 175.0, 200.0, 225.0, 250.0))


@given(st.dictionaries(st.sampled_from(SIZES), st.floats(0.1, 100)), st.floats(10, 1e5))
def test_the_cheapest_in_time(steps: dict[int, float], deadline: float) -> None:
    """No number of ranks that ends in time costs less; none is found only where none does."""
    found = provisions(SIZES, steps.get, 1000, 2.0)
    best = cheapest(found, deadline)
    fit = [(n * 2.0 * 1000 * t / 3600, n) for n, t in steps.items() if 1000 * t <= deadline]
    assert (best is None) == (not fit)
    if best is not None:
        assert best.cost == pytest.approx(min(fit)[0]) and best.seconds <= deadline


def test_a_later_deadline_never_costs_more() -> None:
    """Ranks that scale badly are rented only for those in a hurry."""
    found = provisions(SIZES, lambda ranks: 10.0 / ranks**0.8, 1000, 2.0)
    costs = [one.cost for time in (1200, 2500, 5000, 1e4) if (one := cheapest(found, time))]
    assert costs == sorted(costs, reverse=True) and len(set(costs)) == 4
    ideal = provisions(SIZES, lambda ranks: 10.0 / ranks, 1000, 2.0)
    assert cheapest(ideal) == ideal[-1]  # equal costs: the quickest


@given(st.floats(0, 1), st.floats(0.01, 10), st.floats(0, 10))
def test_energy_alone_wants_lower_limits(eta: float, computing: float, other: float) -> None:
    """The cost is eta E + (1 - eta) P T; whoever asks for time takes no limit, and the more energy
    counts the lower the best limit is."""
    work = {32: Work(computing, other, 100.0)}
    made = runs(work, V100, eta)
    for one in made:
        assert one.cost == pytest.approx(eta * one.joules + (1 - eta) * 250.0 * one.seconds)
    best = [min(runs(work, V100, share), key=lambda r: r.cost).limit for share in (0.0, 0.5, 1.0)]
    assert best[0] == 250.0 and best == sorted(best, reverse=True)


def test_the_best_limit_of_a_rank_that_computes() -> None:
    """With c the power above idle, joules go as (idle + c) / c^(1/3): least at c = idle / 2."""
    power = Power(100.0, 300.0, tuple(float(w) for w in range(110, 301, 5)))
    best = min(runs({1: Work(1.0, 0.0, 1.0)}, power, 1.0), key=lambda one: one.joules)
    assert best.limit == 150.0


@pytest.mark.parametrize("seed", range(5))
def test_the_bandit_finds_the_batch(seed: int) -> None:
    """Of batches whose costs are noisy, that of least mean is played most, and told."""
    mean = {8: 130.0, 16: 100.0, 32: 112.0, 64: 160.0}
    noise = np.random.default_rng(seed + 100)
    bandit = Bandit(tuple(mean), seed)
    for _ in range(60):
        batch = bandit.next()
        bandit.told(batch, mean[batch] * float(noise.normal(1.0, 0.05)))
    often = {batch: len(costs) for batch, costs in bandit.costs.items()}
    assert bandit.best == 16 and max(often, key=often.__getitem__) == 16


def test_what_no_limit_is() -> None:
    """Limits below idle, and shares beyond one, are refused."""
    with pytest.raises(ValueError, match="above 70"):
        V100.slowed(60.0)
    with pytest.raises(ValueError, match="eta"):
        runs({}, V100, 1.5)
