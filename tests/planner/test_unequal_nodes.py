"""Search on unequal nodes: stages, rows and node orders, each against brute force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.ir.limits import Limits
from schedlang.passes.planner.evaluation import EvaluatedSetting
from schedlang.passes.planner.heterogeneous import (
    NODE_AXIS_ORDERS,
    HeterogeneousEvaluator,
    evaluator_of,
    node_orders,
    replica_machines,
    split_for_slowest,
    split_rows,
)
from schedlang.passes.planner.paper_planners import split_as_planner
from schedlang.passes.planner.price import price
from schedlang.passes.planner.search import search
from schedlang.passes.planner.search_space import (
    Job,
    iter_placements,
    list_candidates,
    microbatch_rows,
)
from schedlang.passes.planner.values import Placement, Recipe, Setting
from schedlang.passes.simulate.machine import CLUSTERS
from schedlang.passes.simulate.node_cluster import Node, Nodes, cluster_of_nodes
from tests.planner.decoders import decoder

A100, V100 = CLUSTERS["a100"], CLUSTERS["v100"]
SMALL = decoder(4, 1024, 8, 4096, 32000, 512)
Shape = tuple[int, ...]


def mixed_cluster(*ranks: int, **network: object) -> Nodes:
    """Return nodes with the given numbers of ranks, of A100 and V100 alternately."""
    kinds = (A100, V100)
    nodes = [Node(replace(kinds[k % 2], node=count)) for k, count in enumerate(ranks)]
    return cluster_of_nodes("mixed", nodes, **network)


def compositions(count: int, into: int) -> Iterator[Shape]:
    """Yield all ways to write `count` as an ordered sum of `into` positive integers."""
    for ends in combinations(range(1, count), into - 1):
        yield tuple(b - a for a, b in zip((0, *ends), (*ends, count)))


# -- stages and rows -------------------------------------------------------------------------------


@given(
    times=st.lists(st.integers(1, 9), min_size=2, max_size=7),
    speeds=st.lists(st.lists(st.sampled_from([1, 2, 5]), min_size=2, max_size=2), max_size=3),
    more=st.integers(0, 1),
)
@settings(max_examples=60)
def test_stages_are_cut_for_the_slowest_replica_of_each(
    times: list[int], speeds: list[list[int]], more: int
) -> None:
    """No other cut has a quicker slowest stage, for random replicas and device speeds."""
    replica_speeds = [[*replica, *[3] * more] for replica in [*speeds, [1, 1]]]
    totals = [
        [np.array([0.0, *accumulate(times)]) / v for v in replica] for replica in replica_speeds
    ]
    cuts_found = split_for_slowest(totals)
    stages = len(replica_speeds[0])
    if len(times) < stages:
        assert cuts_found is None
        return

    def slowest(cuts: Shape) -> float:
        ends = [0, *accumulate(cuts)]
        return max(
            float(stage[ends[k + 1]] - stage[ends[k]])
            for one in totals
            for k, stage in enumerate(one)
        )

    assert cuts_found is not None and sum(cuts_found) == len(times) and min(cuts_found) >= 1
    assert slowest(cuts_found) == pytest.approx(min(map(slowest, compositions(len(times), stages))))


@given(
    rows=st.integers(0, 9),
    speeds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=3),
    room=st.none() | st.lists(st.integers(1, 5), min_size=3, max_size=3),
)
@settings(max_examples=80)
def test_rows_are_dealt_so_that_the_last_ends_earliest(
    rows: int, speeds: list[tuple[int, int]], room: list[int] | None
) -> None:
    """The split of rows equals brute force, with start times and limits per replica."""
    count = rows + len(speeds)

    def took(replica: int, k: int) -> float:
        speed, start = speeds[replica]
        return np.inf if room and k > room[replica] else start + k / speed

    split = split_rows(count, [partial(took, replica) for replica in range(len(speeds))])
    assert sum(split) == count and min(split) >= 1

    def end(row_split: Shape) -> float:
        return max(took(replica, k) for replica, k in enumerate(row_split))

    assert end(split) == pytest.approx(min(map(end, compositions(count, len(speeds)))))


# -- where ranks lie -------------------------------------------------------------------------------


def test_orders_of_nodes_differ_and_all_are_there() -> None:
    """Equal nodes are not permuted; of many nodes only a few orders are tried."""
    quick_node, slow_node = Node(A100), Node(V100)
    assert len(node_orders((quick_node, slow_node, quick_node, slow_node))) == 6
    assert len(node_orders((quick_node,) * 5)) == 1
    few = node_orders((quick_node, slow_node) * 4)
    assert 3 <= len(few) <= 4
    assert all(sorted(order) == list(range(8)) for order in few)


def test_replicas_are_of_one_device_or_virtual_workers_of_several() -> None:
    """With dp outside a replica has its own node; with pp outside each replica spans both nodes."""
    nodes = mixed_cluster(2, 2)
    setting = Setting(Placement(), dp=2, pp=2)
    replica_speeds = [
        [machine.speed for machine in machines] for machines in replica_machines(setting, nodes)
    ]
    worker_speeds = [
        [machine.speed for machine in machines]
        for machines in replica_machines(replace(setting, axes=NODE_AXIS_ORDERS[1]), nodes)
    ]
    assert replica_speeds == [[A100.speed] * 2, [V100.speed] * 2]
    assert worker_speeds == [[A100.speed, V100.speed]] * 2


def test_what_takes_ranks_to_be_alike_refuses_others() -> None:
    """Prices of one machine and planners for equal ranks refuse unequal nodes."""
    setting = Setting(Placement(), pp=2)
    for function in (price, partial(split_as_planner, "pipedream")):
        with pytest.raises(
            TypeError, match="1 a100 of 80 GiB, 1 v100 of 32 GiB: this assumes equal"
        ):
            function(SMALL(setting.placement), setting, mixed_cluster(1, 1))


# -- the search ------------------------------------------------------------------------------------


def all_priced(
    filler: HeterogeneousEvaluator, job: Job, limits: Limits
) -> Iterator[EvaluatedSetting]:
    """Yield all settings with all orders of axes and nodes, cuts and rows, priced."""
    for group in iter_placements(job, limits):
        for rows in microbatch_rows(job, group, limits):
            candidates = list_candidates(job, SMALL(replace(group, rows=rows)), limits)
            for k in range(len(candidates) if candidates is not None else 0):
                assert candidates is not None
                setting = candidates.setting(k)
                count = setting.placement.rows * setting.dp
                for axes, order, cuts, dealt_ in product(
                    NODE_AXIS_ORDERS,
                    permutations(range(len(filler._nodes.nodes))),
                    compositions(candidates.chain.length, setting.pp),
                    compositions(count, setting.dp),
                ):
                    laid_ = replace(setting, axes=axes, nodes=order)
                    yield filler._priced(laid_, cuts, dealt_)


@st.composite
def random_jobs(draw: st.DrawFn) -> Job:
    """Random jobs of up to eight ranks on two or three nodes of unequal speed, links and memory."""
    sizes = draw(st.sampled_from([(1, 1), (2, 1), (1, 1, 2), (2, 2), (4, 2), (4, 4)]))
    nodes = [
        Node(
            replace(
                draw(st.sampled_from([A100, V100])),
                node=count,
                speed=draw(st.sampled_from([20e12, 125e12, 312e12])),
                network=draw(st.sampled_from([1e9, 25e9])),
                memory=int(draw(st.sampled_from([0.4, 1.0, 32.0])) * 2**30),
            )
        )
        for count in sizes
    ]
    nodes_drawn = cluster_of_nodes("mixed", nodes, over=draw(st.sampled_from([1.0, 4.0])))
    rows = nodes_drawn.ranks * draw(st.sampled_from([1, 2] if nodes_drawn.ranks < 6 else [1]))
    return Job(nodes_drawn.ranks, rows, nodes_drawn, Recipe(), 512, orders=("1F1B",))


def slowdown_to_best(job: Job, **pinned: tuple[str, ...]) -> float:
    """Return how much slower the search's plan is than the best of all settings."""
    limits = Limits(pinned={"zero": (0, 1), "cp": (1,), "sequence": (False,), **pinned})
    filler = evaluator_of(SMALL, job, limits)
    assert isinstance(filler, HeterogeneousEvaluator)
    fit = [
        evaluated.least
        for evaluated in all_priced(filler, job, limits)
        if evaluated.priced is not None
    ]
    *_, last = search(SMALL, job, limits)
    if last.best is None:
        return np.inf if fit else 1.0
    assert last.best.priced is not None and last.best.least >= min(fit) * (1 - 1e-9)
    return last.best.least / min(fit)


@pytest.mark.parametrize(("ranks", "memories"), [(1, (1.0, 32.0)), (2, (0.4, 32.0))])
def test_stages_are_cut_as_memory_has_room(ranks: int, memories: tuple[float, float]) -> None:
    """Where the quick device has little memory, stages of equal time do not fit, and others do."""
    kinds = zip((A100, V100), memories, strict=True)
    nodes = [Node(replace(device, node=ranks, memory=int(gib * 2**30))) for device, gib in kinds]
    both_nodes = cluster_of_nodes("mixed", nodes)
    assert (
        slowdown_to_best(
            Job(both_nodes.ranks, both_nodes.ranks, both_nodes, Recipe(), 512, orders=("1F1B",))
        )
        == 1
    )


@pytest.mark.parametrize("offload", ["optimizer", "both"])
def test_what_lies_on_hosts_is_searched_where_it_is_asked_for(offload: str) -> None:
    """A pin finds the best offloaded setting; without it nothing is offloaded, and none fits."""
    kinds = zip((A100, V100), (0.8, 0.6), strict=True)
    nodes = [Node(replace(device, node=1, memory=int(gib * 2**30))) for device, gib in kinds]
    job = Job(2, 2, cluster_of_nodes("mixed", nodes), Recipe(), 512, orders=("1F1B",))
    assert slowdown_to_best(job, offload=(offload,)) == 1
    *_, last = search(SMALL, job, Limits(pinned={"offload": (offload,)}))
    assert last.best is not None and last.best.setting.placement.offload == offload
    *_, without_pin = search(SMALL, job)
    assert without_pin.best is None


@given(job=random_jobs())
@settings(max_examples=3, deadline=None)
def test_what_is_found_is_nearly_the_best_of_all(job: Job) -> None:
    """The search is within 2 % of the best of all cuts, rows and orders."""
    assert slowdown_to_best(job) <= 1.02


@pytest.mark.deep
@given(job=random_jobs())
@settings(max_examples=100, deadline=None)
def test_what_is_found_is_nearly_the_best_of_many(job: Job) -> None:
    """The same for many clusters."""
    assert slowdown_to_best(job) <= 1.02
