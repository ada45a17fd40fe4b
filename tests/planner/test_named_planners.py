"""Planners by name: what the searching ones find, and stages cut as each paper does."""

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
SETTING = Setting(Placement(1, 2), dp=4, pp=8, micro=32)


def test_each_planner_says_whose_it_is_and_what_it_leaves_out() -> None:
    """Each planner names its paper and what it omits."""
    assert {"alpa", "piper", "amp", "whale", "dapple", "pipedream", "kwai", "flexflow"} < {
        *PLANNERS
    }
    assert {"mpress", "swapadvisor", "adapipe", "ptd-p", "layouts", "pytorch"} < {*PLANNERS}
    for planner in PLANNERS.values():
        assert planner.paper and planner.omits


def test_kwai_is_within_three_percent_of_all_and_fits() -> None:
    """Kwai's search over fewer orders is near the full optimum, within memory."""
    job = Job(16, 64, replace(A100, memory=24 << 30), length=1024)
    planned = SEARCH_PLANNERS["kwai"].plan(SMALL, job)
    *_, full_search = search(SMALL, job)
    assert planned is not None and planned.priced is not None
    assert full_search.best is not None and full_search.best.priced is not None
    assert planned.priced.seconds <= 1.03 * full_search.best.priced.seconds
    assert planned.priced.peak <= job.cluster.memory


@pytest.mark.parametrize("seed", [0, 1])
def test_flexflow_comes_to_the_optimum_of_a_small_space(seed: int) -> None:
    """A random walk from data parallelism ends at the full search's optimum."""
    job = Job(8, 32, replace(A100, memory=16 << 30), orders=("1F1B", "GPipe"))
    planned = SEARCH_PLANNERS["flexflow"].plan(SMALL, job, seed)
    *_, full_search = search(SMALL, job)
    assert planned is not None and planned.priced is not None and full_search.best is not None
    assert full_search.best.priced is not None
    assert planned.priced.seconds == pytest.approx(full_search.best.priced.seconds, rel=0.01)
    one_step = replace(SEARCH_PLANNERS["flexflow"], steps=1).plan(SMALL, job, seed)
    assert one_step is not None and one_step.priced is not None
    assert one_step.priced.seconds > 1.05 * planned.priced.seconds
    starved = SEARCH_PLANNERS["flexflow"].plan(SMALL, replace(job, cluster=replace(A100, memory=1)))
    assert starved is None


def test_stages_cut_by_dapple_run_quickest_and_by_mcap_hold_least() -> None:
    """Stages of one setting by three objectives, compared by this planner's price."""
    chain = LARGE(SETTING.placement)
    even = price(chain, SETTING, A100)
    cut = {
        name: split_as_planner(name, chain, SETTING, A100)
        for name in ("dapple", "mcap", "pipedream")
    }
    prices = {
        name: price(chain, setting, A100) for name, setting in cut.items() if setting is not None
    }
    assert len(prices) == 3
    assert _pipeline_seconds(prices["dapple"]) < min(
        _pipeline_seconds(even), _pipeline_seconds(prices["pipedream"])
    )
    assert prices["mcap"].peak < min(even.peak, prices["dapple"].peak)
    assert cut["dapple"] is not None and sum(cut["dapple"].cuts) == chain.length


def _pipeline_seconds(priced: Price) -> float:
    """Return the seconds of the pipeline alone; DAPPLE assumes that the rest overlaps."""
    return priced.seconds - priced.parts["gradients"] - priced.parts["optimizer"]


def test_adapipe_recomputes_what_memory_asks_and_no_more() -> None:
    """A setting that is too large fits with partial recomputation."""
    chain = LARGE(SETTING.placement)
    tight = replace(A100, memory=int(9.5 * 2**30))
    assert price(chain, SETTING, tight).peak > tight.memory
    setting = split_as_planner("adapipe", chain, SETTING, tight)
    assert setting is not None and any(setting.again)
    priced = price(chain, setting, tight)
    assert priced.peak <= tight.memory
    full = replace(SETTING, cuts=setting.cuts, again=setting.cuts)
    assert priced.seconds < price(chain, full, tight).seconds
    assert split_as_planner("adapipe", chain, SETTING, replace(A100, memory=1 << 30)) is None
    # a setting cannot express swaps: stages cut without them must fit as well
    for name in ("mpress", "swapadvisor", "piper"):
        without_swaps = split_as_planner(name, chain, SETTING, tight)
        assert without_swaps is None or price(chain, without_swaps, tight).peak <= tight.memory


@pytest.mark.parametrize("memory", [2, 6])
def test_a_planner_that_is_asked_keeps_limits_and_fits(memory: int) -> None:
    """The best of each planner satisfies pins, fits, and is not quicker than the full search's."""
    orders = ("1F1B", "Interleaved1F1B")
    job = Job(8, 32, replace(A100, memory=memory << 30), length=1024, orders=orders)
    limits = Limits(pinned={"zero": (1,), "rows": (1,)})
    *_, full_search = search(SMALL, job, limits)
    assert full_search.best is not None
    for name in ("pipedream", "alpa", "adapipe", "mcap", "layouts", "ptd-p", "kwai", "flexflow"):
        result = plan_with(name, SMALL, job, full_search, limits)
        assert PLANNERS[name].paper in result.attribution[0]
        if result.best is None:
            assert (
                result.rejected[0].reason == "nothing fits" or "needs" in result.rejected[0].reason
            )
            continue
        assert result.best.needs <= job.cluster.memory and satisfies_limits(
            limits, result.best.setting
        )
        assert result.best.least >= full_search.best.least * (1 - 1e-9), name
        assert result.attribution[1].startswith("By its model: ")


def test_planners_whose_papers_take_ranks_to_be_alike_are_refused() -> None:
    """Planners for equal ranks refuse unequal nodes."""
    two_nodes = cluster_of_nodes(
        "two", [Node(replace(A100, node=1)), Node(replace(CLUSTERS["h100"], node=1))]
    )
    job = Job(2, 8, two_nodes, orders=("1F1B",))
    *_, result = search(SMALL, job)
    assert result.best is not None and result.best.setting.placement.offload == "none"
    with pytest.raises(Refusal, match="assumes equal ranks"):
        plan_with("alpa", SMALL, job, result)


def test_cuts_of_several_stages_on_a_rank_are_refused() -> None:
    """Interleaved stages, and more stages than units, raise ValueError."""
    chain = LARGE(SETTING.placement)
    with pytest.raises(ValueError, match="several"):
        split_as_planner("alpa", chain, replace(SETTING, order="Interleaved1F1B", chunks=2), A100)
    with pytest.raises(ValueError, match="do not make"):
        split_as_planner("alpa", chain, replace(SETTING, pp=64), A100)


def test_layers_have_the_seconds_and_bytes_of_their_units() -> None:
    """Layers of a chain hold what its units hold, as ZeRO splits it."""
    chain = LARGE(SETTING.placement)
    layers = layers_of(chain, SETTING, A100, Recipe())
    assert len(layers) == chain.length == 42
    unit = chain.runs[1].unit
    forward, backward, _ = unit_seconds(unit, SETTING, A100)
    # weights and gradients in 16 bits, and a quarter of 12 bytes for the optimizer
    state = unit.numel * (2 + 2 + 12 / 4)
    assert layers[1] == Layer(
        forward, backward, unit.numel * 2, state, unit.kept, unit.input, unit.output
    )
    unsharded = layers_of(chain, replace(SETTING, zero=0), A100, Recipe())
    assert unsharded[1].state == unit.numel * 16
    with_rows = layers_of(chain, replace(SETTING, rows=(2, 1, 1, 1)), A100, Recipe())[1]
    doubled = {name: 2 * getattr(unit, name) for name in ("kept", "input", "output")}
    assert with_rows == replace(
        layers[1], **doubled
    )  # the replica with the most rows keeps the most


def test_no_planner_beats_the_search() -> None:
    """Each planner gives a valid setting for all ranks and rows; none that fits is quicker."""
    job = Job(16, 64, replace(A100, memory=4 << 30), orders=("1F1B",))
    *_, last = search(SMALL, job)
    *_, deep = search(SMALL, job, Limits(pinned={"pp": (4,)}))
    assert last.best is not None and deep.best is not None
    base = deep.best.setting
    chain = SMALL(base.placement)
    settings = {
        name: split_as_planner(name, chain, base, job.cluster, job.recipe)
        for name in STAGE_PLANNERS
    }
    for name in {*PLANNERS} - {*STAGE_PLANNERS, "tessel"}:  # which searches orders for a long time
        best = plan_with(name, SMALL, job, last).best
        settings[name] = best and best.setting
    assert {"piper", "pytorch", "kwai", "flexflow"} <= {name for name in settings if settings[name]}
    for name, setting in settings.items():
        if setting is not None:
            assert (
                setting.ranks == job.ranks
                and setting.dp * setting.micro * setting.placement.rows == job.rows
            )
            priced = price(SMALL(setting.placement), setting, job.cluster, job.recipe)
            if priced.peak <= job.cluster.memory:
                assert priced.seconds >= last.best.least * (1 - 1e-9), name


@pytest.mark.parametrize(("chunks", "hand"), [(1, "1F1B"), (1, "ZB-H1"), (2, "ZB-V")])
def test_tessel_is_no_slower_than_the_best_order_by_hand(chunks: int, hand: str) -> None:
    """Tessel's searched order against the catalogue's order on the same stages and ranks."""
    (order,) = SEARCH_PLANNERS["tessel"].limits.pinned["order"]
    setting = Setting(Placement(1), dp=2, pp=4, micro=8, order=str(order), chunks=chunks)
    chain = SMALL(setting.placement)
    seconds = price(chain, setting, A100).seconds
    assert seconds <= price(chain, replace(setting, order=hand), A100).seconds * (1 + 1e-9)


# -- unlike nodes ----------------------------------------------------------------------------------


def build_nodes(*kinds: str) -> Nodes:
    """Return nodes of one rank each, of the named devices."""
    return cluster_of_nodes("mixed", [Node(replace(CLUSTERS[name], node=1)) for name in kinds])


def slowest_stage(setting: Setting, nodes: Nodes) -> float:
    """Return the seconds of a microbatch in the slowest stage, on the machine of each rank."""
    chain = SMALL(setting.placement)
    units = [run.unit for run in chain.runs for _ in range(run.count)]
    ends = [0, *accumulate(setting.cuts)]
    machines = replica_machines(setting, order_nodes(nodes, setting.nodes))
    rows = setting.rows or (setting.placement.rows,) * setting.dp
    return max(
        sum(sum(unit_seconds(unit, setting, machine)[:2]) for unit in units[begin:end])
        * (some_rows / setting.placement.rows)
        for stage_machines, some_rows in zip(machines, rows)
        for machine, begin, end in zip(stage_machines, ends, ends[1:])
    )


def test_hetpipe_arranges_unlike_devices_as_all_orders_and_cuts_tell() -> None:
    """One virtual worker of three unequal devices: no order or cut has a quicker slowest stage."""
    nodes = build_nodes("v100", "a100", "h100")  # in this order 3 % slower than in the best one
    job = Job(3, 6, nodes, orders=("1F1B",))
    limits = Limits(pinned={"pp": (3,), "rows": (1,), "zero": (0,)})
    *_, full_search = search(SMALL, job, limits)
    result = plan_with("hetpipe", SMALL, job, full_search, limits)
    assert result.best is not None and full_search.best is not None
    setting = result.best.setting
    count = SMALL(setting.placement).length
    candidates = [
        replace(setting, cuts=(a, b - a, count - b), nodes=order)
        for a, b in combinations(range(1, count), 2)
        for order in permutations(range(3))
    ]
    best = min(slowest_stage(candidate, nodes) for candidate in candidates)
    assert slowest_stage(setting, nodes) <= 1.01 * best  # it knows one speed of each device
    assert max(slowest_stage(candidate, nodes) for candidate in candidates) > 1.5 * best
    assert result.best.least >= full_search.best.least * (1 - 1e-9)


@pytest.mark.parametrize(
    ("kinds", "gain"), [("v100 v100 v100 a100", 1.3), ("v100 v100 v100 h100", 2.3)]
)
def test_hetpipe_deals_rows_to_unlike_virtual_workers_as_all_deals_tell(
    kinds: str, gain: float
) -> None:
    """Two virtual workers of two devices each: no order, cut or split of rows has a quicker slowest
    stage; even rows are slower."""
    nodes = build_nodes(*kinds.split())
    job = Job(4, 32, nodes, orders=("1F1B",))
    limits = Limits(pinned={"pp": (2,), "dp": (2,), "rows": (4,), "zero": (0,)})
    *_, full_search = search(SMALL, job, limits)
    result = plan_with("hetpipe", SMALL, job, full_search, limits)
    assert result.best is not None
    setting = result.best.setting
    count = SMALL(setting.placement).length
    candidates = [
        replace(setting, axes=axes, cuts=(cut, count - cut), nodes=order, rows=(rows, 8 - rows))
        for axes, cut, rows in product(NODE_AXIS_ORDERS, range(1, count), range(1, 8))
        for order in node_orders(nodes.nodes)
    ]
    slowest_of = {candidate: slowest_stage(candidate, nodes) for candidate in candidates}
    best, even = (
        min(slowest_of.values()),
        min(seconds for candidate, seconds in slowest_of.items() if candidate.rows == (4, 4)),
    )
    assert slowest_stage(setting, nodes) <= 1.01 * best < 1.01 * even / gain


def test_whale_gives_the_quicker_replica_more_rows_and_amp_stages_by_speed() -> None:
    """Whale splits rows of a stage by the speed of devices; AMP cuts stages by speed."""
    nodes = build_nodes("a100", "v100")
    job = Job(2, 16, nodes, orders=("1F1B",))
    *_, full_search = search(SMALL, job)
    rows = Limits(pinned={"pp": (1,)})
    whale_best = plan_with("whale", SMALL, job, full_search, rows).best
    assert whale_best is not None and whale_best.setting.rows
    assert whale_best.setting.rows[0] > whale_best.setting.rows[1]
    stages = Limits(pinned={"pp": (2,), "rows": (1,)})
    cut = plan_with("amp", SMALL, job, full_search, stages).best
    assert cut is not None
    quick = cut.setting.nodes.index(0) if cut.setting.nodes else 0
    assert cut.setting.cuts[quick] > cut.setting.cuts[1 - quick]


def test_a_stage_fits_the_memory_of_its_own_device() -> None:
    """A device with little memory gets a stage that fits, however slow the other device is."""
    small = replace(CLUSTERS["a100"], node=1, memory=3 << 30)
    nodes = cluster_of_nodes("tight", [Node(small), Node(replace(CLUSTERS["v100"], node=1))])
    setting = Setting(Placement(), pp=2, micro=4, order="1F1B")
    free = split_as_planner("whale", SMALL(setting.placement), setting, build_nodes("a100", "v100"))
    limited = split_as_planner("whale", SMALL(setting.placement), setting, nodes)
    assert free is not None and limited is not None and limited.cuts[0] < free.cuts[0]
    priced_limited = price_on_nodes(SMALL, Job(2, 4, nodes, orders=("1F1B",)), limited)
    assert priced_limited.priced is not None
    assert price_on_nodes(SMALL, Job(2, 4, nodes, orders=("1F1B",)), free).priced is None
