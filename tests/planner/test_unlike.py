"""Searches on unlike nodes: stages, rows and orders of nodes, each against all that there are."""

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


def cluster(*ranks: int, **network: object) -> Nodes:
    """Nodes of so many ranks, of an A100 and of a V100 in turn."""
    kinds = (A100, V100)
    nodes = [Node(replace(kinds[at % 2], node=count)) for at, count in enumerate(ranks)]
    return cluster_of_nodes("mixed", nodes, **network)


def parts(count: int, into: int) -> Iterator[Shape]:
    """All ways to cut so many into parts of one at least."""
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
    """No other cut has a quicker slowest stage, of any replicas on devices of any speeds."""
    every = [[*one, *[3] * more] for one in [*speeds, [1, 1]]]
    totals = [[np.array([0.0, *accumulate(times)]) / v for v in one] for one in every]
    found = split_for_slowest(totals)
    stages = len(every[0])
    if len(times) < stages:
        assert found is None
        return

    def slowest(cuts: Shape) -> float:
        ends = [0, *accumulate(cuts)]
        return max(
            float(stage[ends[at + 1]] - stage[ends[at]])
            for one in totals
            for at, stage in enumerate(one)
        )

    assert found is not None and sum(found) == len(times) and min(found) >= 1
    assert slowest(found) == pytest.approx(min(map(slowest, parts(len(times), stages))))


@given(
    rows=st.integers(0, 9),
    speeds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=3),
    room=st.none() | st.lists(st.integers(1, 5), min_size=3, max_size=3),
)
@settings(max_examples=80)
def test_rows_are_dealt_so_that_the_last_ends_earliest(
    rows: int, speeds: list[tuple[int, int]], room: list[int] | None
) -> None:
    """Equal to all ways to deal them, with a start that takes long and with little room."""
    count = rows + len(speeds)

    def took(at: int, k: int) -> float:
        speed, start = speeds[at]
        return np.inf if room and k > room[at] else start + k / speed

    found = split_rows(count, [partial(took, at) for at in range(len(speeds))])
    assert sum(found) == count and min(found) >= 1

    def end(way: Shape) -> float:
        return max(took(at, k) for at, k in enumerate(way))

    assert end(found) == pytest.approx(min(map(end, parts(count, len(speeds)))))


# -- where ranks lie -------------------------------------------------------------------------------


def test_orders_of_nodes_differ_and_all_are_there() -> None:
    """Nodes alike change places with nothing; of many nodes a few orders are left."""
    one, two = Node(A100), Node(V100)
    assert len(node_orders((one, two, one, two))) == 6
    assert len(node_orders((one,) * 5)) == 1
    few = node_orders((one, two) * 4)
    assert 3 <= len(few) <= 4
    assert all(sorted(order) == list(range(8)) for order in few)


def test_replicas_are_of_one_device_or_virtual_workers_of_several() -> None:
    """dp outside: a replica has a node of its own; pp outside: each has stages on both."""
    nodes = cluster(2, 2)
    setting = Setting(Placement(), dp=2, pp=2)
    own = [[one.speed for one in some] for some in replica_machines(setting, nodes)]
    worker = [
        [one.speed for one in some]
        for some in replica_machines(replace(setting, axes=NODE_AXIS_ORDERS[1]), nodes)
    ]
    assert own == [[A100.speed] * 2, [V100.speed] * 2]
    assert worker == [[A100.speed, V100.speed]] * 2


def test_what_takes_ranks_to_be_alike_refuses_others() -> None:
    """Prices of one machine, and planners by name: they would ignore what is unlike."""
    setting = Setting(Placement(), pp=2)
    for ask in (price, partial(split_as_planner, "pipedream")):
        with pytest.raises(
            TypeError, match="1 a100 of 80 GiB, 1 v100 of 32 GiB: this assumes equal"
        ):
            ask(SMALL(setting.placement), setting, cluster(1, 1))


# -- the search ------------------------------------------------------------------------------------


def every(filler: HeterogeneousEvaluator, job: Job, limits: Limits) -> Iterator[EvaluatedSetting]:
    """All ways, orders of axes and nodes, cuts, and rows of replicas, priced."""
    for group in iter_placements(job, limits):
        for rows in microbatch_rows(job, group, limits):
            found = list_candidates(job, SMALL(replace(group, rows=rows)), limits)
            for at in range(len(found) if found is not None else 0):
                assert found is not None
                way = found.setting(at)
                count = way.placement.rows * way.dp
                for axes, order, cuts, dealt_ in product(
                    NODE_AXIS_ORDERS,
                    permutations(range(len(filler._nodes.nodes))),
                    parts(found.chain.length, way.pp),
                    parts(count, way.dp),
                ):
                    laid_ = replace(way, axes=axes, nodes=order)
                    yield filler._priced(laid_, cuts, dealt_)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Up to eight ranks on two or three nodes, whose speeds, links and memory are unlike."""
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
    found = cluster_of_nodes("mixed", nodes, over=draw(st.sampled_from([1.0, 4.0])))
    rows = found.ranks * draw(st.sampled_from([1, 2] if found.ranks < 6 else [1]))
    return Job(found.ranks, rows, found, Recipe(), 512, orders=("1F1B",))


def against_all(job: Job, **pinned: tuple[str, ...]) -> float:
    """Hold a search to all that there is; how much slower it is than the best of these."""
    limits = Limits(pinned={"zero": (0, 1), "cp": (1,), "sequence": (False,), **pinned})
    filler = evaluator_of(SMALL, job, limits)
    assert isinstance(filler, HeterogeneousEvaluator)
    fit = [one.least for one in every(filler, job, limits) if one.priced is not None]
    *_, last = search(SMALL, job, limits)
    if last.best is None:
        return np.inf if fit else 1.0
    assert last.best.priced is not None and last.best.least >= min(fit) * (1 - 1e-9)
    return last.best.least / min(fit)


@pytest.mark.parametrize(("ranks", "memories"), [(1, (1.0, 32.0)), (2, (0.4, 32.0))])
def test_stages_are_cut_as_memory_has_room(ranks: int, memories: tuple[float, float]) -> None:
    """Where the quick device is the small one, stages of as long each do not fit, and others do."""
    kinds = zip((A100, V100), memories, strict=True)
    nodes = [Node(replace(one, node=ranks, memory=int(gib * 2**30))) for one, gib in kinds]
    whole = cluster_of_nodes("mixed", nodes)
    assert against_all(Job(whole.ranks, whole.ranks, whole, Recipe(), 512, orders=("1F1B",))) == 1


@pytest.mark.parametrize("offload", ["optimizer", "both"])
def test_what_lies_on_hosts_is_searched_where_it_is_asked_for(offload: str) -> None:
    """Equal to all that there is; unasked nothing is offloaded, and nothing fits."""
    kinds = zip((A100, V100), (0.8, 0.6), strict=True)
    nodes = [Node(replace(one, node=1, memory=int(gib * 2**30))) for one, gib in kinds]
    job = Job(2, 2, cluster_of_nodes("mixed", nodes), Recipe(), 512, orders=("1F1B",))
    assert against_all(job, offload=(offload,)) == 1
    *_, last = search(SMALL, job, Limits(pinned={"offload": (offload,)}))
    assert last.best is not None and last.best.setting.placement.offload == offload
    *_, plain = search(SMALL, job)
    assert plain.best is None


@given(job=jobs())
@settings(max_examples=3, deadline=None)
def test_what_is_found_is_nearly_the_best_of_all(job: Job) -> None:
    """Within 2 % of all cuts and rows in all orders of nodes and axes."""
    assert against_all(job) <= 1.02


@pytest.mark.deep
@given(job=jobs())
@settings(max_examples=100, deadline=None)
def test_what_is_found_is_nearly_the_best_of_many(job: Job) -> None:
    """The same, of many clusters."""
    assert against_all(job) <= 1.02
