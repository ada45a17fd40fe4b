"""Aims other than time, and fabrics: each equal to brute force."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.ir.limits import Limits
from schedlang.passes.planner.aims import (
    Run,
    by_energy,
    cheapest,
    cheapest_nodes,
    energy_cost,
    found_while_training,
)
from schedlang.passes.planner.fabric import (
    Traffic,
    in_turns,
    routes,
    seconds,
    strides,
    wired,
    wired_in_turn,
)
from schedlang.passes.planner.search import search
from schedlang.passes.planner.space import Job
from schedlang.passes.simulate.machine import CLUSTERS
from schedlang.passes.simulate.nodes import Node, Nodes, of_nodes
from tests.planner.decoders import decoder

A100 = replace(CLUSTERS["a100"], memory=16 << 30)
SMALL = decoder(12, 2048, 16, 8192, 32000, 1024)
COUNTS = (1, 2, 4, 8, 16)


def job(ranks: int) -> Job:
    """Small enough to be searched often."""
    return Job(ranks, 32, A100, orders=("1F1B",))


def rate(ranks: int) -> float:
    """Money for a second: more for each rank of a second node."""
    return ranks * (1.0 if ranks <= 8 else 1.5)


def test_the_cheapest_number_of_ranks_meets_the_deadline() -> None:
    """Equal to pricing every number of ranks, for every deadline between their times."""
    took: dict[int, float] = {}
    for ranks in COUNTS:
        *_, last = search(SMALL, job(ranks))
        if last.best is not None and last.best.priced is not None:
            took[ranks] = 100 * last.best.priced.seconds
    assert len(took) > 2
    for deadline in [0.0, *took.values(), 1e9]:
        meet = {ranks: t * rate(ranks) for ranks, t in took.items() if t <= deadline}
        found = cheapest(SMALL, job, COUNTS, 100, deadline, rate)
        if not meet:
            assert found is None
            continue
        assert found is not None and found.seconds <= deadline
        assert found.money == pytest.approx(min(meet.values()))


RUNS = st.dictionaries(
    st.tuples(st.sampled_from([32, 64, 128]), st.sampled_from([100, 175, 250])),
    st.builds(Run, st.floats(1, 100), st.floats(50, 250)),
    min_size=1,
)


@given(runs=RUNS, eta=st.floats(0, 1))
@settings(max_examples=40)
def test_energy_and_time_weigh_as_zeus_has_them(
    runs: dict[tuple[int, int], Run], eta: float
) -> None:
    """No batch and limit cost less; eta of 1 is energy alone, of 0 time alone."""
    most = max(limit for _, limit in runs)
    chosen = by_energy(runs, eta)
    assert all(
        energy_cost(runs[chosen], most, eta) <= energy_cost(run, most, eta) for run in runs.values()
    )
    one = Run(10.0, 100.0)
    assert energy_cost(one, 250, 1.0) == 1000.0 and energy_cost(one, 250, 0.0) == 2500.0


@pytest.mark.parametrize("seed", range(4))
def test_sampling_finds_the_best_batch_of_noisy_runs(seed: int) -> None:
    """On a convex curve with a tenth of noise, the last runs take the best batch or its like."""
    curve = {8: 140.0, 16: 110.0, 32: 100.0, 64: 118.0, 128: 170.0}

    def train(batch: int, chance: random.Random) -> float:
        return curve[batch] * chance.gauss(1.0, 0.05)

    chosen = found_while_training(train, list(curve), 80, seed)
    assert len(chosen) == 80 and set(chosen[:5]) == set(curve)
    assert chosen[-20:].count(32) >= 12


@pytest.mark.parametrize("weigh", ["money", "energy"])
def test_the_cheapest_of_unlike_nodes_meet_the_deadline(weigh: str) -> None:
    """Equal to pricing all that some of three nodes can be, for deadlines between their times."""
    quick, slow = (
        Node(replace(CLUSTERS[name], node=1), price, watts)
        for name, price, watts in (("a100", 36.0, 300.0), ("v100", 10.0, 350.0))
    )
    whole = of_nodes("mixed", [quick, slow, slow])
    task = Job(3, 12, whole, orders=("1F1B",))
    limits = Limits(pinned={"zero": (0, 1), "rows": (1, 2), "sequence": (False,)})

    def rate(nodes: Nodes) -> float:
        return nodes.rate(nodes.ranks) if weigh == "money" else nodes.watts(nodes.ranks)

    took = {}
    for some in ([quick], [slow], [quick, slow], [slow, slow], [quick, slow, slow]):
        nodes = of_nodes("mixed", some)
        one = replace(task, ranks=nodes.ranks, cluster=nodes)
        *_, last = search(SMALL, one, limits)
        assert last.best is not None
        took[nodes] = 10 * last.best.least
    for deadline in (0.0, sorted(took.values())[2], 1e9):
        meet = {nodes: t * rate(nodes) for nodes, t in took.items() if t <= deadline}
        found = cheapest_nodes(SMALL, task, 10, deadline, rate, limits)
        assert (found is None) == (not meet)
        if found is not None:
            assert found[1].money == pytest.approx(min(meet.values()))
            assert found[1].ranks == found[0].ranks and found[1].seconds <= deadline
    with pytest.raises(TypeError, match="nodes are chosen"):
        cheapest_nodes(SMALL, job(2), 10, 1.0)


# -- fabrics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hosts", "count"), [(4, 2), (8, 4), (9, 6), (12, 4), (16, 8)])
def test_strides_are_the_rings_of_totient_perms(hosts: int, count: int) -> None:
    """As many as Euler's phi says, each a ring over all hosts, no link in two of them."""
    found = strides(hosts)
    assert len(found) == count
    links = set()
    for stride in found:
        ring = [(at, (at + stride) % hosts) for at in range(hosts)]
        met, at = {0}, 0
        for _ in range(hosts - 1):
            at = (at + stride) % hosts
            met.add(at)
        assert len(met) == hosts
        assert not links & set(ring)
        links |= set(ring)


MESSAGES = st.dictionaries(
    st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] != pair[1]),
    st.integers(1, 50).map(float),
    max_size=6,
)


@given(messages=MESSAGES, reduced=st.integers(0, 100), degree=st.integers(1, 3))
@settings(max_examples=40)
def test_fabrics_of_eight_hosts_equal_brute_force(
    messages: dict[tuple[int, int], float], reduced: int, degree: int
) -> None:
    """No other set of strides is quicker; choosing them in turn is legal, and never better."""
    traffic = Traffic(float(reduced), messages)
    chosen, took = wired(8, degree, traffic, 2.0)
    assert took == min(seconds(8, s, traffic, 2.0) for s in combinations((1, 3, 5, 7), degree))
    quick, then = wired_in_turn(8, degree, traffic, 2.0)
    assert len(set(quick)) == degree and then >= took
    for distance, way in enumerate(routes(8, chosen)):
        assert sum(way) % 8 == distance and set(way) <= set(chosen)


def test_more_rings_carry_an_all_reduce_in_less_time() -> None:
    """In closed form: 2 (n - 1) / n of the bytes, over as many links as a host has."""
    traffic = Traffic(80.0, {})
    took = [wired(8, degree, traffic, 1.0)[1] for degree in (1, 2, 4)]
    assert took == [140.0, 70.0, 35.0]


def test_messages_load_each_link_of_their_way() -> None:
    """By hand: ways of one stride share its links, another stride takes some off them."""
    both = Traffic(0.0, {(0, 3): 4.0, (1, 2): 3.0})
    assert seconds(8, (1,), both, 1.0) == 7.0  # the link from 1 to 2 carries both
    assert seconds(8, (1, 3), both, 1.0) == 4.0
    assert seconds(8, (1, 3), Traffic(8.0, both.messages), 2.0) == (7.0 + 4.0) / 2


@given(
    plans=st.lists(
        st.tuples(
            st.just("plan"), st.integers(0, 30), st.builds(Traffic, st.floats(0, 90), MESSAGES)
        ),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=30)
def test_plan_and_fabric_in_turns_never_get_slower(plans: list[tuple[str, int, Traffic]]) -> None:
    """Each turn is as quick or quicker, and none beats the best of all pairs."""
    found = in_turns(8, 2, 1.0, plans)
    assert list(found.turns) == sorted(found.turns, reverse=True)
    quick = in_turns(8, 2, 1.0, plans, wired_in_turn)
    assert list(quick.turns) == sorted(quick.turns, reverse=True)
    best = min(
        computing + seconds(8, s, traffic, 1.0)
        for _, computing, traffic in plans
        for s in combinations(strides(8), 2)
    )
    assert found.turns[-1] >= best - 1e-9
    alone = min(computing + wired(8, 2, traffic, 1.0)[1] for _, computing, traffic in plans[:1])
    assert found.turns[-1] <= alone + 1e-9
