"""Planner aims (cost, energy, time) as auctions of nodes, and fabrics, against brute force."""

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
from tests.proofs import make_plan
from tests.tuning.test_simulated_time import ROWS, WIDTH, Net, loss

SMALL = decoder(12, 2048, 16, 8192, 32000, 1024)
LIMITS = Limits(pinned={"zero": (0, 1), "rows": (1, 2), "sequence": (False,)})


def single_rank_nodes(*nodes: Node) -> Nodes:
    """Return a cluster of nodes of one rank each."""
    return cluster_of_nodes("mixed", nodes)


QUICK, SLOW = (
    Node(replace(CLUSTERS[name], node=1), price, watts, limits)
    for name, price, watts, limits in (
        ("a100", 36.0, 300.0, ((150.0, 0.7),)),
        ("v100", 10.0, 350.0, ()),
    )
)
TASK = Job(3, 12, single_rank_nodes(QUICK, SLOW, SLOW), orders=("1F1B",))


@cache
def last_result(job: Job) -> SearchResult:
    """Return the last result of a search."""
    *_, result = search(SMALL, job, LIMITS)
    return result


def build_auction(aim: Aim, job: Job = TASK) -> ChoiceSearch:
    """Return the search over all choices of nodes for the task."""
    return ChoiceSearch(SMALL, job, aim, last_result)


@pytest.mark.parametrize("aim", [COST, ENERGY, TIME])
def test_bids_come_by_what_they_are_worth_within_the_deadline(aim: str) -> None:
    """Bids equal pricing all nodes, power limits and batches, for several deadlines; what cannot be
    the best is not searched."""
    variants = list(QUICK.with_power_limits) if aim == ENERGY else [QUICK]
    clusters = [single_rank_nodes(SLOW), single_rank_nodes(SLOW, SLOW)]
    clusters += [single_rank_nodes(bid, *[SLOW] * k) for bid in variants for k in range(3)]
    if aim == TIME:
        clusters = [TASK.cluster]
    samples = {12: 120.0, 24: 130.0}
    training_time = {}
    for nodes, rows in product(clusters, samples):
        job = replace(TASK, ranks=nodes.ranks, cluster=nodes, rows=rows)
        steps = -(-samples[rows] // rows)
        if (best := last_result(job).best) is not None:
            training_time[nodes, rows] = steps * best.least
    weigh = {
        COST: lambda n: n.price_per_second(n.ranks),
        ENERGY: lambda n: n.watts(n.ranks),
        TIME: lambda n: 1,
    }
    for deadline in (0.0, sorted(training_time.values())[len(training_time) // 2], 1e9):
        worths = sorted(t * weigh[aim](key[0]) for key, t in training_time.items() if t <= deadline)
        bids = build_auction(Aim(aim, samples, deadline))
        best_bid = next(bids.iter_evaluated(), None)
        searched = len(bids.evaluated)
        assert len(bids.offers) == len(clusters) * len(samples)
        assert [bid.worth for bid in bids.iter_evaluated()] == pytest.approx(worths)
        assert (best_bid is None) == (not worths)
        if best_bid is not None:
            assert best_bid.seconds <= deadline and searched <= len(bids.offers)
            assert best_bid.offer.job.ranks == best_bid.offer.job.cluster.ranks
    weighed = build_auction(Aim(ENERGY, samples, eta=0.5))
    max_watts = 300.0 + 2 * 350.0
    for bid in weighed.iter_evaluated():
        nodes = bid.offer.job.cluster
        assert bid.worth == pytest.approx(bid.seconds * (nodes.watts(nodes.ranks) + max_watts) / 2)


def test_floors_lie_below_all_that_is_found() -> None:
    """The lower bound of a training time is its operations on all ranks at full speed."""
    auction_search = build_auction(Aim(ENERGY, {12: 120.0}))
    row = SMALL(Placement())
    bids = list(auction_search.iter_evaluated())
    assert len(bids) == len(auction_search.offers) == 8
    assert all(0 < bid.offer.floor(row) <= bid.seconds for bid in bids)


def test_what_is_aimed_at_must_be_told() -> None:
    """Missing prices and powers, and too many choices, are refused."""
    kinds = single_rank_nodes(*[replace(SLOW, price=float(k)) for k in range(11)])
    unpriced = replace(TASK, cluster=single_rank_nodes(QUICK, replace(SLOW, price=None)))
    for aim, job, message in (
        (COST, unpriced, "node 2 of `mixed` says no `price`"),
        (ENERGY, replace(TASK, cluster=CLUSTERS["a100"]), "`a100` says none"),
        (COST, replace(TASK, cluster=kinds), "2047 choices of nodes and limits are too many"),
    ):
        with pytest.raises(Refusal, match=message):
            build_auction(Aim(aim, {12: 120.0}), job)


@given(run=st.builds(TrainingCost, st.floats(1, 100), st.floats(50, 250)), eta=st.floats(0, 1))
@settings(max_examples=40)
def test_energy_and_time_weigh_as_zeus_has_them(run: TrainingCost, eta: float) -> None:
    """With eta 1 the cost is energy, with 0 time at the highest power; linear in between."""
    energy, time = energy_cost(run, 250, 1.0), energy_cost(run, 250, 0.0)
    assert (energy, time) == (run.seconds * run.watts, run.seconds * 250)
    assert energy_cost(run, 250, eta) == pytest.approx(eta * energy + (1 - eta) * time)


# -- fabrics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hosts", "count"), [(4, 2), (8, 4), (9, 6), (12, 4), (16, 8)])
def test_strides_are_the_rings_of_totient_perms(hosts: int, count: int) -> None:
    """As many strides as Euler's phi says, each a ring over all hosts, with disjoint links."""
    strides = ring_strides(hosts)
    assert len(strides) == count
    links = set()
    for stride in strides:
        ring = [(host, (host + stride) % hosts) for host in range(hosts)]
        visited, host = {0}, 0
        for _ in range(hosts - 1):
            host = (host + stride) % hosts
            visited.add(host)
        assert len(visited) == hosts
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
    """No other set of strides is quicker; the greedy choice is valid, and never better."""
    traffic = Traffic(float(reduced), messages, {(1, 5): 9.0, (0, 2, 4, 6): 7.0, (0, 1, 2): 3.0})
    strides, seconds = choose_strides(8, degree, traffic, 2.0)
    assert seconds == min(
        link_seconds(8, s, traffic, 2.0) for s in combinations(range(1, 8), degree)
    )
    greedy, greedy_seconds = choose_strides_greedily(8, degree, traffic, 2.0)
    assert len(set(greedy)) == degree and greedy_seconds >= seconds
    for distance, route in enumerate(routes(8, strides)):
        assert sum(route) % 8 == distance and set(route) <= set(strides)


def test_more_rings_carry_an_all_reduce_in_less_time() -> None:
    """In closed form: 2 (n - 1) / n of the bytes, over as many links as a host has."""
    traffic = Traffic(80.0, {})
    seconds = [choose_strides(8, degree, traffic, 1.0)[1] for degree in (1, 2, 4)]
    assert seconds == [140.0, 70.0, 35.0]


def test_messages_load_each_link_of_their_way() -> None:
    """By hand: routes of one stride share its links, and another stride takes over some of them."""
    traffic = Traffic(0.0, {(0, 3): 4.0, (1, 2): 3.0})
    assert link_seconds(8, (1,), traffic, 1.0) == 7.0  # the link from 1 to 2 carries both
    assert link_seconds(8, (1, 3), traffic, 1.0) == 4.0
    assert link_seconds(8, (1, 3), Traffic(8.0, traffic.messages), 2.0) == (7.0 + 4.0) / 2


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
    """An all-reduce goes round all hosts; a stage sends activations on, and gradients back."""
    net = Net(8)
    sent = account(make_plan(net, rows, mesh), {"ids": torch.zeros(ROWS, dtype=torch.long)}, loss)
    traffic = traffic_of(
        make_plan(net, rows, mesh), sent.collectives or (), lambda rank: rank // node
    )
    if expected == "ring":
        ((hosts, size),) = traffic.rings.items()
        numel = sum(p.numel() for p in net.parameters())
        assert hosts == tuple(range(4 // node)) and not traffic.messages
        assert size == pytest.approx(2 * 3 / 4 * 4 * numel, rel=0.01)
        return
    pairs = {(k, k + 1) for k in range(3)} | {(k + 1, k) for k in range(3)}
    assert traffic.messages == dict.fromkeys(pairs, ROWS * WIDTH * 4)
    assert sum(traffic.rings.values()) < 100  # the loss is told to all
    tied = Collective("all-reduce", ("pp",), "step", "grads", "", 1, 1000, frozenset({0, 3}))
    single_place = replace(tied, axes=(), places=frozenset({1}))
    traffic = traffic_of(make_plan(net, rows, mesh), [tied, single_place], lambda rank: rank)
    assert traffic.rings == {(0, 3): 1000.0} and not traffic.messages
