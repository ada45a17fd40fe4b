"""Planners by name: what searches find, and settings cut as each of them would."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, permutations, product

import pytest

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.limits import Limits
from schedlang.passes.planner.heterogeneous import (
    NODE_AXIS_ORDERS,
    node_orders,
    order_nodes,
    price_on_nodes,
    replica_machines,
)
from schedlang.passes.planner.limits import satisfies_limits
from schedlang.passes.planner.paper_planners import (
    PLANNERS,
    SEARCH_PLANNERS,
    layers_of,
    plan_with,
    split_as_planner,
)
from schedlang.passes.planner.price import price, unit_seconds
from schedlang.passes.planner.search import search
from schedlang.passes.planner.search_space import Job
from schedlang.passes.planner.stage_options import Layer
from schedlang.passes.planner.stage_planners import STAGE_PLANNERS
from schedlang.passes.planner.values import Placement, Price, Recipe, Setting
from schedlang.passes.simulate.machine import CLUSTERS
from schedlang.passes.simulate.node_cluster import Node, Nodes, cluster_of_nodes
from tests.planner.decoders import decoder

A100 = CLUSTERS["a100"]
SMALL = decoder(12, 2048, 16, 8192, 32000, 1024)
LARGE = decoder(40, 5120, 40, 13824, 128000, 2048, gated=True)
WAY = Setting(Placement(1, 2), dp=4, pp=8, micro=32)


def test_each_planner_says_whose_it_is_and_what_it_leaves_out() -> None:
    """All names, each with its paper and its limits."""
    assert {"alpa", "piper", "amp", "whale", "dapple", "pipedream", "kwai", "flexflow"} < {
        *PLANNERS
    }
    assert {"mpress", "swapadvisor", "adapipe", "ptd-p", "layouts", "pytorch"} < {*PLANNERS}
    for planner in PLANNERS.values():
        assert planner.paper and planner.omits


def test_kwai_is_within_three_percent_of_all_and_fits() -> None:
    """A search over fewer orders is near the optimum over all, within memory."""
    job = Job(16, 64, replace(A100, memory=24 << 30), length=1024)
    found = SEARCH_PLANNERS["kwai"].plan(SMALL, job)
    *_, every = search(SMALL, job)
    assert found is not None and found.priced is not None
    assert every.best is not None and every.best.priced is not None
    assert found.priced.seconds <= 1.03 * every.best.priced.seconds
    assert found.priced.peak <= job.cluster.memory


@pytest.mark.parametrize("seed", [0, 1])
def test_flexflow_comes_to_the_optimum_of_a_small_space(seed: int) -> None:
    """A walk from data parallelism ends at the search's optimum."""
    job = Job(8, 32, replace(A100, memory=16 << 30), orders=("1F1B", "GPipe"))
    found = SEARCH_PLANNERS["flexflow"].plan(SMALL, job, seed)
    *_, every = search(SMALL, job)
    assert found is not None and found.priced is not None and every.best is not None
    assert every.best.priced is not None
    assert found.priced.seconds == pytest.approx(every.best.priced.seconds, rel=0.01)
    begun = replace(SEARCH_PLANNERS["flexflow"], steps=1).plan(SMALL, job, seed)
    assert begun is not None and begun.priced is not None
    assert begun.priced.seconds > 1.05 * found.priced.seconds
    starved = SEARCH_PLANNERS["flexflow"].plan(SMALL, replace(job, cluster=replace(A100, memory=1)))
    assert starved is None


def test_stages_cut_by_dapple_run_quickest_and_by_mcap_hold_least() -> None:
    """Stages of one setting by three objectives, judged by our own price."""
    chain = LARGE(WAY.placement)
    even = price(chain, WAY, A100)
    cut = {
        name: split_as_planner(name, chain, WAY, A100) for name in ("dapple", "mcap", "pipedream")
    }
    took = {name: price(chain, way, A100) for name, way in cut.items() if way is not None}
    assert len(took) == 3
    assert _pipeline(took["dapple"]) < min(_pipeline(even), _pipeline(took["pipedream"]))
    assert took["mcap"].peak < min(even.peak, took["dapple"].peak)
    assert cut["dapple"] is not None and sum(cut["dapple"].cuts) == chain.length


def _pipeline(priced: Price) -> float:
    """Seconds without what comes after the pipeline, which DAPPLE takes to run beside it."""
    return priced.seconds - priced.parts["gradients"] - priced.parts["optimizer"]


def test_adapipe_recomputes_what_memory_asks_and_no_more() -> None:
    """A setting that does not fit does so with less recomputation than all."""
    chain = LARGE(WAY.placement)
    tight = replace(A100, memory=int(9.5 * 2**30))
    assert price(chain, WAY, tight).peak > tight.memory
    way = split_as_planner("adapipe", chain, WAY, tight)
    assert way is not None and any(way.again)
    made = price(chain, way, tight)
    assert made.peak <= tight.memory
    every = replace(WAY, cuts=way.cuts, again=way.cuts)
    assert made.seconds < price(chain, every, tight).seconds
    assert split_as_planner("adapipe", chain, WAY, replace(A100, memory=1 << 30)) is None
    # swaps cannot be said by a setting: what is cut without them must fit as well
    for name in ("mpress", "swapadvisor", "piper"):
        other = split_as_planner(name, chain, WAY, tight)
        assert other is None or price(chain, other, tight).peak <= tight.memory


@pytest.mark.parametrize("memory", [2, 6])
def test_a_planner_that_is_asked_keeps_limits_and_fits(memory: int) -> None:
    """Of each kind one: its best keeps pins, fits, and is not quicker than the best of all."""
    orders = ("1F1B", "Interleaved1F1B")
    job = Job(8, 32, replace(A100, memory=memory << 30), length=1024, orders=orders)
    limits = Limits(pinned={"zero": (1,), "rows": (1,)})
    *_, every = search(SMALL, job, limits)
    assert every.best is not None
    for name in ("pipedream", "alpa", "adapipe", "mcap", "layouts", "ptd-p", "kwai", "flexflow"):
        found = plan_with(name, SMALL, job, every, limits)
        assert PLANNERS[name].paper in found.attribution[0]
        if found.best is None:
            assert found.rejected[0].reason == "nothing fits" or "needs" in found.rejected[0].reason
            continue
        assert found.best.needs <= job.cluster.memory and satisfies_limits(
            limits, found.best.setting
        )
        assert found.best.least >= every.best.least * (1 - 1e-9), name
        assert found.attribution[1].startswith("By its model: ")


def test_planners_whose_papers_take_ranks_to_be_alike_are_refused() -> None:
    """On unlike nodes, where nothing is offloaded."""
    two = cluster_of_nodes(
        "two", [Node(replace(A100, node=1)), Node(replace(CLUSTERS["h100"], node=1))]
    )
    job = Job(2, 8, two, orders=("1F1B",))
    *_, found = search(SMALL, job)
    assert found.best is not None and found.best.setting.placement.offload == "none"
    with pytest.raises(Refusal, match="assumes equal ranks"):
        plan_with("alpa", SMALL, job, found)


def test_cuts_of_several_stages_on_a_rank_are_refused() -> None:
    """Interleaved stages, and more stages than units, are refused."""
    chain = LARGE(WAY.placement)
    with pytest.raises(ValueError, match="several"):
        split_as_planner("alpa", chain, replace(WAY, order="Interleaved1F1B", chunks=2), A100)
    with pytest.raises(ValueError, match="do not make"):
        split_as_planner("alpa", chain, replace(WAY, pp=64), A100)


def test_layers_have_the_seconds_and_bytes_of_their_units() -> None:
    """Layers of a chain hold what its units hold, as ZeRO splits it."""
    chain = LARGE(WAY.placement)
    layers = layers_of(chain, WAY, A100, Recipe())
    assert len(layers) == chain.length == 42
    unit = chain.runs[1].unit
    forward, backward, _ = unit_seconds(unit, WAY, A100)
    # weights and gradients in 16 bits, and a quarter of 12 bytes for the optimizer
    state = unit.numel * (2 + 2 + 12 / 4)
    assert layers[1] == Layer(
        forward, backward, unit.numel * 2, state, unit.kept, unit.input, unit.output
    )
    whole = layers_of(chain, replace(WAY, zero=0), A100, Recipe())
    assert whole[1].state == unit.numel * 16
    most = layers_of(chain, replace(WAY, rows=(2, 1, 1, 1)), A100, Recipe())[1]
    twice = {name: 2 * getattr(unit, name) for name in ("kept", "input", "output")}
    assert most == replace(layers[1], **twice)  # who has the most rows, keeps the most


def test_no_planner_beats_the_search() -> None:
    """Each says a legal setting for all ranks and rows; of those that fit none is quicker."""
    job = Job(16, 64, replace(A100, memory=4 << 30), orders=("1F1B",))
    *_, last = search(SMALL, job)
    *_, deep = search(SMALL, job, Limits(pinned={"pp": (4,)}))
    assert last.best is not None and deep.best is not None
    base = deep.best.setting
    chain = SMALL(base.placement)
    said = {
        name: split_as_planner(name, chain, base, job.cluster, job.recipe)
        for name in STAGE_PLANNERS
    }
    for name in {*PLANNERS} - {*STAGE_PLANNERS, "tessel"}:  # which searches orders for long
        found = plan_with(name, SMALL, job, last).best
        said[name] = found and found.setting
    assert {"piper", "pytorch", "kwai", "flexflow"} <= {name for name in said if said[name]}
    for name, way in said.items():
        if way is not None:
            assert way.ranks == job.ranks and way.dp * way.micro * way.placement.rows == job.rows
            made = price(SMALL(way.placement), way, job.cluster, job.recipe)
            if made.peak <= job.cluster.memory:
                assert made.seconds >= last.best.least * (1 - 1e-9), name


@pytest.mark.parametrize(("chunks", "hand"), [(1, "1F1B"), (1, "ZB-H1"), (2, "ZB-V")])
def test_tessel_is_no_slower_than_the_best_order_by_hand(chunks: int, hand: str) -> None:
    """Its order, searched, against the order of the catalogue on the same stages and ranks."""
    (order,) = SEARCH_PLANNERS["tessel"].limits.pinned["order"]
    way = Setting(Placement(1), dp=2, pp=4, micro=8, order=str(order), chunks=chunks)
    chain = SMALL(way.placement)
    took = price(chain, way, A100).seconds
    assert took <= price(chain, replace(way, order=hand), A100).seconds * (1 + 1e-9)


# -- unlike nodes ----------------------------------------------------------------------------------


def unlike(*kinds: str) -> Nodes:
    """Nodes of one rank each, of these devices."""
    return cluster_of_nodes("mixed", [Node(replace(CLUSTERS[one], node=1)) for one in kinds])


def slowest(setting: Setting, nodes: Nodes) -> float:
    """Seconds of a microbatch in the slowest stage, unit by unit on the machine of its rank."""
    chain = SMALL(setting.placement)
    units = [run.unit for run in chain.runs for _ in range(run.count)]
    ends = [0, *accumulate(setting.cuts)]
    machines = replica_machines(setting, order_nodes(nodes, setting.nodes))
    rows = setting.rows or (setting.placement.rows,) * setting.dp
    return max(
        sum(sum(unit_seconds(unit, setting, machine)[:2]) for unit in units[first:last])
        * (some_rows / setting.placement.rows)
        for some, some_rows in zip(machines, rows)
        for machine, first, last in zip(some, ends, ends[1:])
    )


def test_hetpipe_arranges_unlike_devices_as_all_orders_and_cuts_tell() -> None:
    """One virtual worker of three unlike devices: no order and no cut has a quicker slowest
    stage."""
    nodes = unlike("v100", "a100", "h100")  # as they stand 3 % slower than in the best order
    job = Job(3, 6, nodes, orders=("1F1B",))
    limits = Limits(pinned={"pp": (3,), "rows": (1,), "zero": (0,)})
    *_, every = search(SMALL, job, limits)
    found = plan_with("hetpipe", SMALL, job, every, limits)
    assert found.best is not None and every.best is not None
    setting = found.best.setting
    count = SMALL(setting.placement).length
    ways = [
        replace(setting, cuts=(a, b - a, count - b), nodes=order)
        for a, b in combinations(range(1, count), 2)
        for order in permutations(range(3))
    ]
    best = min(slowest(way, nodes) for way in ways)
    assert slowest(setting, nodes) <= 1.01 * best  # it knows one speed of each device
    assert max(slowest(way, nodes) for way in ways) > 1.5 * best
    assert found.best.least >= every.best.least * (1 - 1e-9)


@pytest.mark.parametrize(
    ("kinds", "gain"), [("v100 v100 v100 a100", 1.3), ("v100 v100 v100 h100", 2.3)]
)
def test_hetpipe_deals_rows_to_unlike_virtual_workers_as_all_deals_tell(
    kinds: str, gain: float
) -> None:
    """Two of them, of two devices each: no order, cut and deal has a quicker slowest stage; even
    rows are slower."""
    nodes = unlike(*kinds.split())
    job = Job(4, 32, nodes, orders=("1F1B",))
    limits = Limits(pinned={"pp": (2,), "dp": (2,), "rows": (4,), "zero": (0,)})
    *_, every = search(SMALL, job, limits)
    found = plan_with("hetpipe", SMALL, job, every, limits)
    assert found.best is not None
    setting = found.best.setting
    count = SMALL(setting.placement).length
    ways = [
        replace(setting, axes=axes, cuts=(cut, count - cut), nodes=order, rows=(rows, 8 - rows))
        for axes, cut, rows in product(NODE_AXIS_ORDERS, range(1, count), range(1, 8))
        for order in node_orders(nodes.nodes)
    ]
    took = {way: slowest(way, nodes) for way in ways}
    best, even = min(took.values()), min(one for way, one in took.items() if way.rows == (4, 4))
    assert slowest(setting, nodes) <= 1.01 * best < 1.01 * even / gain


def test_whale_gives_the_quicker_replica_more_rows_and_amp_stages_by_speed() -> None:
    """Whale balances rows in a stage by the speed of devices; AMP's stages are cut likewise."""
    nodes = unlike("a100", "v100")
    job = Job(2, 16, nodes, orders=("1F1B",))
    *_, every = search(SMALL, job)
    rows = Limits(pinned={"pp": (1,)})
    found = plan_with("whale", SMALL, job, every, rows).best
    assert found is not None and found.setting.rows
    assert found.setting.rows[0] > found.setting.rows[1]
    stages = Limits(pinned={"pp": (2,), "rows": (1,)})
    cut = plan_with("amp", SMALL, job, every, stages).best
    assert cut is not None
    quick = cut.setting.nodes.index(0) if cut.setting.nodes else 0
    assert cut.setting.cuts[quick] > cut.setting.cuts[1 - quick]


def test_a_stage_fits_the_memory_of_its_own_device() -> None:
    """A small device gets the stage that it holds, however slow the other one is."""
    small = replace(CLUSTERS["a100"], node=1, memory=3 << 30)
    nodes = cluster_of_nodes("tight", [Node(small), Node(replace(CLUSTERS["v100"], node=1))])
    way = Setting(Placement(), pp=2, micro=4, order="1F1B")
    free = split_as_planner("whale", SMALL(way.placement), way, unlike("a100", "v100"))
    held = split_as_planner("whale", SMALL(way.placement), way, nodes)
    assert free is not None and held is not None and held.cuts[0] < free.cuts[0]
    one = price_on_nodes(SMALL, Job(2, 4, nodes, orders=("1F1B",)), held)
    assert one.priced is not None
    assert price_on_nodes(SMALL, Job(2, 4, nodes, orders=("1F1B",)), free).priced is None
