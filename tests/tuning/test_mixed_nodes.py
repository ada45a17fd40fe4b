"""Clusters of unequal nodes: their files, message times in closed form, and step times."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.simulate.machine import CLUSTERS, GIB, Cluster, cluster_named
from schedlang.passes.simulate.node_cluster import (
    COLLECTIVE_SMS,
    DEVICE,
    ENGINE,
    Node,
    Nodes,
    cluster_of_nodes,
)
from schedlang.passes.simulate.simulated_ranks import memory_of_ranks, simulate_ranks
from schedlang.passes.simulate.step_time import StepTime, missing_memory, place_slowdowns, time_step
from schedlang.runtime import batch as parts
from schedlang.runtime.storage.footprint import SegmentWork, TrafficMessage
from tests.proofs import make_plan
from tests.tuning.test_simulated_time import ENDLESS, ROWS, WIDTH, Net, loss

SIZE = 1e9
# devices without latencies: messages take the time of their bytes
QUICK = Cluster("quick", 4e9, 100e9, 10e9, 2e9, 4, 8 * GIB)
SLOW = Cluster("slow", 1e9, 50e9, 5e9, 1e9, 4, 2 * GIB)


def one_each(*devices: Cluster, **network: object) -> Nodes:
    """Return a cluster with one node of each device."""
    return cluster_of_nodes("mixed", [Node(device) for device in devices], **network)


def ring_seconds(size: float, ranks: int, link: float) -> float:
    """Return the seconds of a ring all-reduce (Patarasuk and Yuan 2009)."""
    return 2 * (ranks - 1) / ranks * size / link


# -- messages in closed form -----------------------------------------------------------------------


def test_a_ring_goes_at_the_pace_of_its_slowest_link() -> None:
    """Inside a node its own link counts; over both nodes the lower network bandwidth."""
    nodes = one_each(QUICK, SLOW)
    for ranks, link in ((range(4), 10e9), (range(4, 8), 5e9), (range(8), 4e9), ((3, 4), 1e9)):
        seconds = nodes.message_seconds(TrafficMessage("all_reduce", tuple(ranks), int(SIZE)))
        assert seconds == pytest.approx(ring_seconds(SIZE, len(ranks), link))
    few = one_each(
        QUICK, replace(SLOW, node=1)
    )  # one adapter of the second node: slower than its link
    assert few.collective_seconds("all_reduce", SIZE, 5, 1) == pytest.approx(
        ring_seconds(SIZE, 5, 1e9)
    )
    assert nodes.collective_seconds("all_reduce", SIZE, 4, 1) == pytest.approx(
        ring_seconds(SIZE, 4, 5e9)
    )
    assert nodes.for_ranks(range(4)).collective_seconds("all_reduce", SIZE, 4, 1) == pytest.approx(
        ring_seconds(SIZE, 4, 10e9)
    )
    assert nodes.message_seconds(
        TrafficMessage("send", (0, 4), int(SIZE), (0, 4))
    ) == pytest.approx(1.0)
    assert nodes.message_seconds(
        TrafficMessage("send", (0, 1), int(SIZE), (0, 1))
    ) == pytest.approx(0.1)
    assert nodes.message_seconds(TrafficMessage("all_reduce", (3,), 8)) == 0.0
    strided_time = nodes.collective_seconds(
        "all_reduce", SIZE, 4, 4
    )  # dp and cp together: over both nodes
    assert strided_time == nodes.message_seconds(
        TrafficMessage("all_reduce", (0, 2, 4, 6), int(SIZE))
    )


def test_nodes_that_are_alike_are_a_plain_cluster() -> None:
    """On equal nodes every collective takes as long as on the plain cluster, with latencies."""
    for machine in (QUICK, CLUSTERS["a100"]):
        nodes = one_each(*[machine] * 4)
        for op in ("all_reduce", "all_gather", "all_to_all", "broadcast", "send"):
            for ranks, stride in (
                (2, 1),
                (machine.node, 1),
                (4 * machine.node, 1),
                (4, machine.node),
            ):
                expected = machine.collective_seconds(op, SIZE, ranks, stride)
                assert nodes.collective_seconds(op, SIZE, ranks, stride) == pytest.approx(expected)


@pytest.mark.parametrize("over", [1.0, 2.0, 8.0])
def test_what_is_oversubscribed_takes_as_much_longer(over: float) -> None:
    """Rings cross a leaf's uplink once for all of its nodes; single messages and all-to-all are
    slowed by the oversubscription."""
    free, tight = (one_each(*[QUICK] * 4, leaf=2, over=x) for x in (1.0, over))
    for ranks, leaves in (((0, 4, 8, 12), 2), ((0, 4), 1), ((0, 8), 2), (range(16), 2)):
        message = TrafficMessage("all_reduce", tuple(ranks), int(SIZE))
        nodes = len({rank // 4 for rank in ranks}) // leaves
        slow = 1.0 if leaves == 1 else max(1.0, over / nodes)
        assert tight.message_seconds(message) == pytest.approx(free.message_seconds(message) * slow)
    for ends, slow in (((0, 4), 1.0), ((0, 8), over)):
        message = TrafficMessage("send", ends, int(SIZE), ends)
        assert tight.message_seconds(message) == pytest.approx(free.message_seconds(message) * slow)
    # one of three other nodes is under the same leaf: 2/4 goes up, 3/4 leaves the node
    seconds = tight.message_seconds(TrafficMessage("all_to_all", (0, 4, 8, 12), int(SIZE)))
    assert seconds == pytest.approx(SIZE / 2e9 * max(3 / 4, over * 2 / 4))


def test_equal_local_ranks_stay_on_their_rail() -> None:
    """With rails a ring over equal local ranks does not cross the spine; other rings and messages
    to other local ranks do."""
    rails, leaves = (one_each(*[QUICK] * 2, over=4.0, rails=x, leaf=1 + x) for x in (True, False))
    for ranks, rail in (((0, 4), True), ((1, 5), True), (range(8), True), ((0, 5), False)):
        message = TrafficMessage("all_reduce", tuple(ranks), int(SIZE))
        rail_time = rails.message_seconds(message)
        assert leaves.message_seconds(message) == pytest.approx(rail_time * (4 if rail else 1))
    for ends, slow in (((0, 4), 1), ((0, 5), 4)):
        seconds = rails.message_seconds(TrafficMessage("send", ends, int(SIZE), ends))
        assert seconds == pytest.approx(SIZE / 2e9 * slow)
    # all-to-all: one of four ranks of the other node is on the same rail
    seconds = rails.message_seconds(TrafficMessage("all_to_all", tuple(range(8)), int(SIZE)))
    assert seconds == pytest.approx(SIZE * 3 / 8 / 2e9 * 4)


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_an_engine_takes_no_compute_and_reads_what_it_sums_once(ranks: int) -> None:
    """ACE: a device reads 1.5 bytes per byte sent by a ring all-reduce (2 in reduce-scatter, 1 in
    all-gather); an engine reads only its N input bytes, and uses no SM of the device."""
    one_node = replace(QUICK, node=ranks)
    group, sent = tuple(range(ranks)), 2 * (ranks - 1) / ranks * SIZE
    seconds = sent / one_node.link
    shares = {
        endpoint_kind: 1
        - one_each(one_node, endpoint=endpoint_kind).hidden_share("all_reduce", SIZE, group)
        for endpoint_kind in (DEVICE, ENGINE)
    }
    assert shares[DEVICE] == pytest.approx(
        max(COLLECTIVE_SMS, 1.5 * sent / seconds / one_node.stream)
    )
    assert shares[ENGINE] == pytest.approx(SIZE / seconds / one_node.stream)
    assert shares[DEVICE] / shares[ENGINE] == pytest.approx(1.5 * sent / SIZE)
    scattered, gathered = (
        1 - one_each(one_node, endpoint=DEVICE).hidden_share(op, SIZE, group)
        for op in ("reduce_scatter", "all_gather")
    )
    assert scattered == pytest.approx(2 * gathered)
    idle = replace(one_node, stream=ENDLESS)
    assert (
        one_each(idle, endpoint=DEVICE).hidden_share("all_gather", SIZE, group)
        == 1 - COLLECTIVE_SMS
    )
    assert one_each(idle, endpoint=ENGINE).hidden_share("all_gather", SIZE, group) == pytest.approx(
        1
    )
    assert one_each(one_node).hidden_share("all_reduce", SIZE, group) == one_node.overlap


def test_the_planner_sees_the_endpoint_of_many_ranks() -> None:
    """The planner's single overlap share is that of a large all-reduce."""
    for endpoint_kind in (DEVICE, ENGINE):
        nodes = one_each(replace(QUICK, node=512), endpoint=endpoint_kind)
        large_share = nodes.hidden_share("all_reduce", SIZE, range(512))
        assert nodes.overlap == pytest.approx(large_share, rel=1e-2)


# -- ranks -----------------------------------------------------------------------------------------


def test_work_is_priced_on_the_device_of_its_rank() -> None:
    """Operators of ranks that wait for each other take the time of the slowest device."""
    nodes, segment = one_each(QUICK, SLOW), SegmentWork(Counter({("product", 8e9, 1): 1}))
    assert [nodes.device_of(rank).name for rank in (0, 3, 4, 7)] == [
        "quick",
        "quick",
        "slow",
        "slow",
    ]
    assert nodes.for_ranks((0, 1)).computing_seconds(segment) == 2.0
    assert (
        nodes.for_ranks((3, 4)).computing_seconds(segment)
        == nodes.for_ranks((4, 5)).computing_seconds(segment)
        == 8.0
    )
    assert nodes.for_ranks((3, 4)).memory == 2 * GIB and nodes.for_ranks((0, 1)).memory == 8 * GIB
    assert nodes.computing_seconds(segment) == 2.0 and nodes.slowest == SLOW
    reversed_nodes = nodes.in_order((1, 0))
    assert reversed_nodes.device_of(0) == SLOW and nodes.in_order(()) == nodes
    assert nodes.first_nodes(4).ranks == 4 and nodes.first_nodes(5) == nodes
    priced = cluster_of_nodes("mine", [Node(QUICK, 36.0, 300.0), Node(SLOW, 3.6, 100.0)])
    assert priced.price_per_second(4) == pytest.approx(0.01) and priced.price_per_second(
        8
    ) == pytest.approx(0.011)
    assert priced.watts(5) == 1300.0


COMPUTES = replace(QUICK, speed=4e9, stream=ENDLESS, link=ENDLESS, network=ENDLESS)
SLOWER = replace(COMPUTES, name="late", speed=1e9)
SENDS = replace(COMPUTES, speed=ENDLESS, link=1e6, network=1e5)


def plan_time(plan: Plan, cluster: Cluster) -> StepTime:
    """Return the simulated step time of a plan for the net."""
    batch = {"ids": torch.zeros(ROWS, dtype=torch.long)}
    prepared = prepare(plan, parts.largest_part(batch, plan.share_weights, plan.micro), loss)
    return time_step(
        plan, prepared, simulate_ranks(plan, batch, loss, prepared, works=True), cluster
    )


def one_rank_nodes(device: Cluster, count: int = 2) -> Nodes:
    """Return nodes of one rank each."""
    return one_each(*[replace(device, node=1)] * count)


@pytest.mark.parametrize("rows", [(1, 1), (4, 1)])
def test_the_last_replica_sets_the_pace(rows: tuple[int, int]) -> None:
    """A rank that is four times as quick ends at the same time with four times the rows."""
    plan = make_plan(Net(), f"zero(stage=0, over=dp, rows={list(rows)})", "dp=2")
    one_rank_time = plan_time(
        make_plan(Net(), "zero(stage=0, over=dp)", "dp=1"), one_rank_nodes(COMPUTES)
    ).seconds
    nodes = one_each(*(replace(device, node=1) for device in (COMPUTES, SLOWER)))
    quick, late = (part / sum(rows) for part in rows)
    step_time = plan_time(plan, nodes)
    assert step_time.seconds == pytest.approx(one_rank_time * max(quick, 4 * late), rel=0.04)
    reversed_time = plan_time(plan, nodes.in_order((1, 0)))
    assert reversed_time.seconds == pytest.approx(one_rank_time * max(4 * quick, late), rel=0.04)


def test_a_slow_stage_takes_its_devices_time() -> None:
    """Two stages, two microbatches: the stage on the slow device sets the pace."""
    rows = 'blocks  pipeline_split(over=pp)\npipeline(order="GPipe", micro=2)'
    plan = make_plan(Net(), rows, "pp=2")
    nodes = one_each(*(replace(variant, node=1) for variant in (COMPUTES, SLOWER)))
    alike, slow_first, slow_last = (
        plan_time(plan, variant).seconds
        for variant in (one_rank_nodes(COMPUTES), nodes.in_order((1, 0)), nodes)
    )
    # f: a forward; both stages alike 9 f: down, two of each, up; with one 4 f it is 27 f: 1 + 2 x 4
    # forwards, 2 x 8 backwards, and 2 more of the quick one; or 2 x 4, 1 and 2, 2 x 8
    assert slow_first == pytest.approx(3 * alike) and slow_last == pytest.approx(3 * alike)
    assert place_slowdowns(plan, nodes) == (1.0, 4.0) and place_slowdowns(
        plan, nodes.in_order((1, 0))
    ) == (4.0, 1.0)
    assert (
        place_slowdowns(plan, one_rank_nodes(COMPUTES)) == (1.0, 1.0)
        and place_slowdowns(plan, COMPUTES) == ()
    )


def test_messages_go_over_the_links_of_their_own_replica() -> None:
    """One replica is in one node, the other spans two nodes and is slower."""
    split = "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)\n"
    plan = make_plan(Net(), split + "zero(stage=0, over=dp)", "dp=2, tp=2")
    same_nodes = one_each(replace(SENDS, node=2), replace(SENDS, node=2))
    split_nodes = one_each(replace(SENDS, node=2), replace(SENDS, node=1), replace(SENDS, node=1))
    activations = ROWS // 2 * WIDTH * 4
    slow = 4 * activations * (1 / SENDS.network - 1 / SENDS.link)
    assert plan_time(plan, split_nodes).seconds - plan_time(
        plan, same_nodes
    ).seconds == pytest.approx(slow, rel=0.01)


def test_each_rank_needs_the_memory_of_its_own_device() -> None:
    """A replica with few rows fits into memory where one with many does not."""
    batch = {"ids": torch.zeros(ROWS, dtype=torch.long)}

    def lacks(plan: Plan, *memories: int) -> int:
        prepared = prepare(plan, parts.largest_part(batch, plan.share_weights, plan.micro), loss)
        memories_of_ranks = memory_of_ranks(
            plan, prepared, simulate_ranks(plan, batch, loss, prepared)
        )
        nodes = one_each(*(replace(QUICK, node=1, memory=size) for size in memories))
        return missing_memory(plan, prepared.staged, memories_of_ranks, nodes)

    many, even = (
        make_plan(Net(), f"zero(stage=0, over=dp, rows={rows})", "dp=2")
        for rows in ([3, 1], [1, 1])
    )
    many_lack, even_lack = lacks(many, 0, 2**40), lacks(even, 0, 0)
    few_lack = lacks(many, 2**40, 0)
    assert many_lack > even_lack > few_lack > 0
    assert (
        lacks(many, many_lack, few_lack) == 0
        and lacks(many, few_lack, many_lack) == many_lack - few_lack
    )


# -- a file ----------------------------------------------------------------------------------------


FILE = """\
leaf = 2
oversubscription = 1.5  # above it
endpoint = "engine"
order = [3, 1, 2]

[[node]]
device = "A100"
count = 2
price = 32.8
power = 400
limits = [[300, 0.9], [200, 0.6]]

[[node]]
device = "mine"
ranks = 2
network = 1e9

[mine]
speed = 1e12
stream = 1e11
link = 1e10
network = 2e9
node = 4
memory = "2 GiB"
"""


def read_cluster(folder: Path, text: str) -> Nodes:
    """Write a cluster file, and return the cluster that is read."""
    path = folder / "cluster.toml"
    path.write_text(text)
    nodes_read, ranks = cluster_named(str(path))
    assert isinstance(nodes_read, Nodes) and ranks == nodes_read.ranks
    return nodes_read


def test_a_file_of_nodes_is_read(tmp_path: Path) -> None:
    """Devices are named or defined in the file; nodes are numbered in the order of ranks."""
    nodes_read = read_cluster(tmp_path, FILE)
    assert (nodes_read.name, nodes_read.leaf, nodes_read.over, nodes_read.rails) == (
        "cluster",
        2,
        1.5,
        False,
    )
    assert nodes_read.endpoint == ENGINE and nodes_read.ranks == 18
    assert [node.device.name for node in nodes_read.nodes] == ["mine", "a100", "a100"]
    assert [node.price for node in nodes_read.nodes] == [None, 32.8, 32.8]
    assert nodes_read.numbers == (3, 1, 2) and nodes_read.in_order((2, 0)).numbers == (2, 3)
    free, limited, lowest = nodes_read.nodes[1].with_power_limits
    assert free == nodes_read.nodes[1] and (limited.power, lowest.power) == (300.0, 200.0)
    assert lowest.device == replace(free.device, speed=free.device.speed * 0.6)
    own_device = nodes_read.nodes[0].device
    assert (own_device.node, own_device.network, own_device.routed, own_device.memory) == (
        2,
        1e9,
        1.0,
        2 * GIB,
    )
    assert nodes_read.nodes[1].device == CLUSTERS["a100"]
    assert nodes_read.text() == "2 mine of 2 GiB, 2 x 8 a100 of 80 GiB"
    few = read_cluster(tmp_path, FILE.replace("[3, 1, 2]", "[2]"))
    assert few.ranks == 8 and few.numbers == (2,)
    rails = read_cluster(tmp_path, "rails = true\n" + FILE.replace("leaf = 2\n", ""))
    assert rails.rails and rails.leaf == 3


@pytest.mark.parametrize(
    ("old", "new", "line", "why"),
    [
        ("leaf = 2", "leaf = 0", 1, "a whole number of nodes"),
        ("leaf = 2", "leef = 2", 1, "no field `leef`"),
        ("= 1.5", "= 0.5", 2, "not below 1"),
        ('"engine"', '"motor"', 3, '"engine" or "device"'),
        ("[3, 1, 2]", "[3, 1, 1]", 4, "some of the 3 nodes"),
        ("[3, 1, 2]", "3", 4, "some of the 3 nodes"),
        ("[3, 1, 2]", "[4]", 4, "some of the 3 nodes"),
        ("[3, 1, 2]", "[]", 4, "some of the 3 nodes"),
        ("[200, 0.6]", "[400, 0.6]", 11, "pairs of watts, below `power`"),
        ("[200, 0.6]", "[200, 1.1]", 11, "and a share of the speed"),
        ("[200, 0.6]", "200", 11, "[[250, 0.8]]"),
        ("power = 400", "power = -1", 10, "a number above 0"),
        ('"A100"', '"A10"', 7, "unknown device `A10`"),
        ("count = 2", "count = true", 8, "a whole number above 0"),
        ("price = 32.8", "prise = 32.8", 9, "no field `prise`"),
        ("price = 32.8", "price = -1", 9, "a number above 0"),
        ("ranks = 2", "ranks = 0", 15, "a whole number above 0"),
        ("network = 1e9\n\n", "network = 0\n\n", 16, "a number above 0"),
        ('device = "mine"\n', "", 13, "needs a `device`"),
    ],
)
def test_a_file_that_is_no_cluster_is_refused(
    tmp_path: Path, old: str, new: str, line: int, why: str
) -> None:
    """S936 names the line, the reason, and valid values."""
    assert FILE.count(old) == 1
    with pytest.raises(Refusal) as caught:
        read_cluster(tmp_path, FILE.replace(old, new))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "S936" and why in diagnostic.notes[0]
    assert diagnostic.notes[0].startswith(f"line {line}:")
    assert any("[[node]]" in help_text for help_text in diagnostic.helps)
