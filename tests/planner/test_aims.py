"""Aims other than time, and fabrics: each equal to brute force."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.limits import Limits
from schedlang.passes.planner.aims import (
    COST,
    ENERGY,
    TIME,
    Aim,
    ChoiceSearch,
    TrainingCost,
    energy_cost,
)
from schedlang.passes.planner.fabric import (
    Traffic,
    choose_strides,
    choose_strides_greedily,
    link_seconds,
    ring_strides,
    routes,
    traffic_of,
)
from schedlang.passes.planner.search import SearchResult, search
from schedlang.passes.planner.search_space import Job
from schedlang.passes.planner.values import Placement
from schedlang.passes.simulate.account import account
from schedlang.passes.simulate.machine import CLUSTERS
from schedlang.passes.simulate.node_cluster import Node, Nodes, cluster_of_nodes
from schedlang.passes.simulate.traffic import Collective
from tests.planner.decoders import decoder
from tests.proofs import planned
from tests.tuning.test_played_time import ROWS, WIDTH, Net, loss

SMALL = decoder(12, 2048, 16, 8192, 32000, 1024)
LIMITS = Limits(pinned={"zero": (0, 1), "rows": (1, 2), "sequence": (False,)})


def mixed(*nodes: Node) -> Nodes:
    """A cluster of nodes of one rank each."""
    return cluster_of_nodes("mixed", nodes)


QUICK, SLOW = (
    Node(replace(CLUSTERS[name], node=1), price, watts, limits)
    for name, price, watts, limits in (
        ("a100", 36.0, 300.0, ((150.0, 0.7),)),
        ("v100", 10.0, 350.0, ()),
    )
)
TASK = Job(3, 12, mixed(QUICK, SLOW, SLOW), orders=("1F1B",))


@cache
def quickest(job: Job) -> SearchResult:
    """What a search finds in the end."""
    *_, last = search(SMALL, job, LIMITS)
    return last


def auction(aim: Aim, job: Job = TASK) -> ChoiceSearch:
    """All that nodes of the task can be."""
    return ChoiceSearch(SMALL, job, aim, quickest)


@pytest.mark.parametrize("aim", [COST, ENERGY, TIME])
def test_bids_come_by_what_they_are_worth_within_the_deadline(aim: str) -> None:
    """Equal to pricing all nodes, limits and batches that there are, for deadlines between their
    times; what cannot be the best is not searched."""
    held = list(QUICK.with_power_limits) if aim == ENERGY else [QUICK]
    some = [mixed(SLOW), mixed(SLOW, SLOW)]
    some += [mixed(one, *[SLOW] * k) for one in held for k in range(3)]
    if aim == TIME:
        some = [TASK.cluster]
    samples = {12: 120.0, 24: 130.0}
    took = {}
    for nodes, rows in product(some, samples):
        job = replace(TASK, ranks=nodes.ranks, cluster=nodes, rows=rows)
        steps = -(-samples[rows] // rows)
        if (best := quickest(job).best) is not None:
            took[nodes, rows] = steps * best.least
    weigh = {
        COST: lambda n: n.price_per_second(n.ranks),
        ENERGY: lambda n: n.watts(n.ranks),
        TIME: lambda n: 1,
    }
    for deadline in (0.0, sorted(took.values())[len(took) // 2], 1e9):
        meet = sorted(t * weigh[aim](key[0]) for key, t in took.items() if t <= deadline)
        made = auction(Aim(aim, samples, deadline))
        first = next(made.iter_evaluated(), None)
        searched = len(made.evaluated)
        assert len(made.offers) == len(some) * len(samples)
        assert [one.worth for one in made.iter_evaluated()] == pytest.approx(meet)
        assert (first is None) == (not meet)
        if first is not None:
            assert first.seconds <= deadline and searched <= len(made.offers)
            assert first.offer.job.ranks == first.offer.job.cluster.ranks
    weighed = auction(Aim(ENERGY, samples, eta=0.5))
    most = 300.0 + 2 * 350.0
    for one in weighed.iter_evaluated():
        nodes = one.offer.job.cluster
        assert one.worth == pytest.approx(one.seconds * (nodes.watts(nodes.ranks) + most) / 2)


def test_floors_lie_below_all_that_is_found() -> None:
    """No training is quicker than its operations on all ranks at full speed."""
    made = auction(Aim(ENERGY, {12: 120.0}))
    row = SMALL(Placement())
    bids = list(made.iter_evaluated())
    assert len(bids) == len(made.offers) == 8
    assert all(0 < one.offer.floor(row) <= one.seconds for one in bids)


def test_what_is_aimed_at_must_be_told() -> None:
    """Prices and powers that nobody says, and too many choices, are refused."""
    kinds = mixed(*[replace(SLOW, price=float(at)) for at in range(11)])
    dear = replace(TASK, cluster=mixed(QUICK, replace(SLOW, price=None)))
    for aim, job, said in (
        (COST, dear, "node 2 of `mixed` says no `price`"),
        (ENERGY, replace(TASK, cluster=CLUSTERS["a100"]), "`a100` says none"),
        (COST, replace(TASK, cluster=kinds), "2047 choices of nodes and limits are too many"),
    ):
        with pytest.raises(Refusal, match=said):
            auction(Aim(aim, {12: 120.0}), job)


@given(run=st.builds(TrainingCost, st.floats(1, 100), st.floats(50, 250)), eta=st.floats(0, 1))
@settings(max_examples=40)
def test_energy_and_time_weigh_as_zeus_has_them(run: TrainingCost, eta: float) -> None:
    """eta of 1 is energy alone, of 0 time alone at the most watts; between them a line."""
    energy, time = energy_cost(run, 250, 1.0), energy_cost(run, 250, 0.0)
    assert (energy, time) == (run.seconds * run.watts, run.seconds * 250)
    assert energy_cost(run, 250, eta) == pytest.approx(eta * energy + (1 - eta) * time)


# -- fabrics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hosts", "count"), [(4, 2), (8, 4), (9, 6), (12, 4), (16, 8)])
def test_strides_are_the_rings_of_totient_perms(hosts: int, count: int) -> None:
    """As many as Euler's phi says, each a ring over all hosts, no link in two of them."""
    found = ring_strides(hosts)
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
    traffic = Traffic(float(reduced), messages, {(1, 5): 9.0, (0, 2, 4, 6): 7.0, (0, 1, 2): 3.0})
    chosen, took = choose_strides(8, degree, traffic, 2.0)
    assert took == min(link_seconds(8, s, traffic, 2.0) for s in combinations(range(1, 8), degree))
    quick, then = choose_strides_greedily(8, degree, traffic, 2.0)
    assert len(set(quick)) == degree and then >= took
    for distance, way in enumerate(routes(8, chosen)):
        assert sum(way) % 8 == distance and set(way) <= set(chosen)


def test_more_rings_carry_an_all_reduce_in_less_time() -> None:
    """In closed form: 2 (n - 1) / n of the bytes, over as many links as a host has."""
    traffic = Traffic(80.0, {})
    took = [choose_strides(8, degree, traffic, 1.0)[1] for degree in (1, 2, 4)]
    assert took == [140.0, 70.0, 35.0]


def test_messages_load_each_link_of_their_way() -> None:
    """By hand: ways of one stride share its links, another stride takes some off them."""
    both = Traffic(0.0, {(0, 3): 4.0, (1, 2): 3.0})
    assert link_seconds(8, (1,), both, 1.0) == 7.0  # the link from 1 to 2 carries both
    assert link_seconds(8, (1, 3), both, 1.0) == 4.0
    assert link_seconds(8, (1, 3), Traffic(8.0, both.messages), 2.0) == (7.0 + 4.0) / 2


def test_rings_over_some_hosts_go_round_strides_of_their_own() -> None:
    """By hand: every second host by strides 2 and 6, no link of which is used by the others; hosts
    that are not as far apart all the way send round their ring as messages."""
    half = Traffic(0.0, {}, {(0, 2, 4, 6): 6.0, (1, 3, 5, 7): 4.0})
    assert (
        link_seconds(8, (1, 2), half, 1.0) == 6.0 and link_seconds(8, (1, 2, 6), half, 1.0) == 3.0
    )
    assert link_seconds(8, (1,), half, 1.0) == 10.0  # all links are on a way of either
    assert link_seconds(8, (2, 6), half, 1.0) == math.inf  # odd hosts meet no even ones
    assert (
        link_seconds(8, (1, 7), Traffic(0.0, {}, {(0, 1, 2): 5.0}), 1.0) == 5.0
    )  # 2 to 0 by 7 + 7


@pytest.mark.parametrize(
    ("mesh", "rows", "node", "expected"),
    [
        ("dp=4", "zero(stage=0, over=dp)", 1, "ring"),
        ("dp=4", "zero(stage=0, over=dp)", 2, "ring"),
        ("pp=4", 'blocks  pipeline_split(over=pp)\npipeline(order="GPipe", micro=2)', 1, "sends"),
    ],
)
def test_traffic_between_hosts_is_that_of_the_plan(
    mesh: str, rows: str, node: int, expected: str
) -> None:
    """A sum goes round all hosts once, a stage hands its activations to the next and back."""
    net = Net(8)
    sent = account(planned(net, rows, mesh), {"ids": torch.zeros(ROWS, dtype=torch.long)}, loss)
    found = traffic_of(planned(net, rows, mesh), sent.collectives or (), lambda rank: rank // node)
    if expected == "ring":
        ((hosts, much),) = found.rings.items()
        numbers = sum(p.numel() for p in net.parameters())
        assert hosts == tuple(range(4 // node)) and not found.messages
        assert much == pytest.approx(2 * 3 / 4 * 4 * numbers, rel=0.01)
        return
    pairs = {(k, k + 1) for k in range(3)} | {(k + 1, k) for k in range(3)}
    assert found.messages == dict.fromkeys(pairs, ROWS * WIDTH * 4)
    assert sum(found.rings.values()) < 100  # the loss is told to all
    tied = Collective("all-reduce", ("pp",), "step", "grads", "", 1, 1000, frozenset({0, 3}))
    alone = replace(tied, axes=(), places=frozenset({1}))
    found = traffic_of(planned(net, rows, mesh), [tied, alone], lambda rank: rank)
    assert found.rings == {(0, 3): 1000.0} and not found.messages
