"""Clusters of unlike nodes: their file, messages in closed form, and steps timed rank by rank."""

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
from tests.proofs import planned
from tests.tuning.test_played_time import ENDLESS, ROWS, WIDTH, Net, loss

SIZE = 1e9
# devices on which messages take their bytes alone
QUICK = Cluster("quick", 4e9, 100e9, 10e9, 2e9, 4, 8 * GIB)
SLOW = Cluster("slow", 1e9, 50e9, 5e9, 1e9, 4, 2 * GIB)


def mixed(*devices: Cluster, **network: object) -> Nodes:
    """One node of each."""
    return cluster_of_nodes("mixed", [Node(one) for one in devices], **network)


def ring(size: float, ranks: int, link: float) -> float:
    """Seconds of an all-reduce round a ring (Patarasuk and Yuan 2009)."""
    return 2 * (ranks - 1) / ranks * size / link


# -- messages in closed form -----------------------------------------------------------------------


def test_a_ring_goes_at_the_pace_of_its_slowest_link() -> None:
    """Within each node its own link; over both the ways out of the node that has least."""
    nodes = mixed(QUICK, SLOW)
    for ranks, link in ((range(4), 10e9), (range(4, 8), 5e9), (range(8), 4e9), ((3, 4), 1e9)):
        took = nodes.message_seconds(TrafficMessage("all_reduce", tuple(ranks), int(SIZE)))
        assert took == pytest.approx(ring(SIZE, len(ranks), link))
        assert nodes.ring_bandwidth(ranks) == pytest.approx(link)
    few = mixed(
        QUICK, replace(SLOW, node=1)
    )  # one way out of the second node: slower than its link
    assert few.collective_seconds("all_reduce", SIZE, 5, 1) == pytest.approx(ring(SIZE, 5, 1e9))
    assert nodes.collective_seconds("all_reduce", SIZE, 4, 1) == pytest.approx(ring(SIZE, 4, 5e9))
    assert nodes.for_ranks(range(4)).collective_seconds("all_reduce", SIZE, 4, 1) == pytest.approx(
        ring(SIZE, 4, 10e9)
    )
    assert nodes.message_seconds(
        TrafficMessage("send", (0, 4), int(SIZE), (0, 4))
    ) == pytest.approx(1.0)
    assert nodes.message_seconds(
        TrafficMessage("send", (0, 1), int(SIZE), (0, 1))
    ) == pytest.approx(0.1)
    assert nodes.message_seconds(TrafficMessage("all_reduce", (3,), 8)) == 0.0
    far = nodes.collective_seconds(
        "all_reduce", SIZE, 4, 4
    )  # of dp and cp together: over both nodes
    assert far == nodes.message_seconds(TrafficMessage("all_reduce", (0, 2, 4, 6), int(SIZE)))


def test_nodes_that_are_alike_are_a_plain_cluster() -> None:
    """Every collective takes what it takes on the machine itself, with NCCL's latencies too."""
    for one in (QUICK, CLUSTERS["a100"]):
        nodes = mixed(*[one] * 4)
        for op in ("all_reduce", "all_gather", "all_to_all", "broadcast", "send"):
            for ranks, stride in ((2, 1), (one.node, 1), (4 * one.node, 1), (4, one.node)):
                plain = one.collective_seconds(op, SIZE, ranks, stride)
                assert nodes.collective_seconds(op, SIZE, ranks, stride) == pytest.approx(plain)


@pytest.mark.parametrize("over", [1.0, 2.0, 8.0])
def test_what_is_oversubscribed_takes_as_much_longer(over: float) -> None:
    """Groups over all nodes: rings leave a leaf once for all of its nodes, so that `leaf` of the
    nodes' ways carry them; messages and all-to-all leave it each by themselves."""
    free, tight = (mixed(*[QUICK] * 4, leaf=2, over=x) for x in (1.0, over))
    for ranks, leaves in (((0, 4, 8, 12), 2), ((0, 4), 1), ((0, 8), 2), (range(16), 2)):
        message = TrafficMessage("all_reduce", tuple(ranks), int(SIZE))
        nodes = len({rank // 4 for rank in ranks}) // leaves
        slow = 1.0 if leaves == 1 else max(1.0, over / nodes)
        assert tight.message_seconds(message) == pytest.approx(free.message_seconds(message) * slow)
    for ends, slow in (((0, 4), 1.0), ((0, 8), over)):
        message = TrafficMessage("send", ends, int(SIZE), ends)
        assert tight.message_seconds(message) == pytest.approx(free.message_seconds(message) * slow)
    # of three other nodes one lies beneath the same leaf: 2/4 of all goes up, 3/4 leaves the node
    took = tight.message_seconds(TrafficMessage("all_to_all", (0, 4, 8, 12), int(SIZE)))
    assert took == pytest.approx(SIZE / 2e9 * max(3 / 4, over * 2 / 4))


def test_equal_local_ranks_stay_on_their_rail() -> None:
    """With rails a ring over equal local ranks meets no spine; over others it does, as does a
    message to another local rank."""
    rails, leaves = (mixed(*[QUICK] * 2, over=4.0, rails=x, leaf=1 + x) for x in (True, False))
    for ranks, rail in (((0, 4), True), ((1, 5), True), (range(8), True), ((0, 5), False)):
        message = TrafficMessage("all_reduce", tuple(ranks), int(SIZE))
        near = rails.message_seconds(message)
        assert leaves.message_seconds(message) == pytest.approx(near * (4 if rail else 1))
    for ends, slow in (((0, 4), 1), ((0, 5), 4)):
        took = rails.message_seconds(TrafficMessage("send", ends, int(SIZE), ends))
        assert took == pytest.approx(SIZE / 2e9 * slow)
    # all to all: of four ranks of the other node one lies on the same rail
    took = rails.message_seconds(TrafficMessage("all_to_all", tuple(range(8)), int(SIZE)))
    assert took == pytest.approx(SIZE * 3 / 8 / 2e9 * 4)


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_an_engine_takes_no_compute_and_reads_what_it_sums_once(ranks: int) -> None:
    """ACE: a device reads 1.5 bytes for each that a ring all-reduce sends (2 while it scatters, 1
    while it gathers), an engine those N that it begins with, and no processor of the device."""
    wide = replace(QUICK, node=ranks)
    group, sent = tuple(range(ranks)), 2 * (ranks - 1) / ranks * SIZE
    took = sent / wide.link
    shares = {
        who: 1 - mixed(wide, endpoint=who).hidden_share("all_reduce", SIZE, group)
        for who in (DEVICE, ENGINE)
    }
    assert shares[DEVICE] == pytest.approx(max(COLLECTIVE_SMS, 1.5 * sent / took / wide.stream))
    assert shares[ENGINE] == pytest.approx(SIZE / took / wide.stream)
    assert shares[DEVICE] / shares[ENGINE] == pytest.approx(1.5 * sent / SIZE)
    scattered, gathered = (
        1 - mixed(wide, endpoint=DEVICE).hidden_share(op, SIZE, group)
        for op in ("reduce_scatter", "all_gather")
    )
    assert scattered == pytest.approx(2 * gathered)
    idle = replace(wide, stream=ENDLESS)
    assert (
        mixed(idle, endpoint=DEVICE).hidden_share("all_gather", SIZE, group) == 1 - COLLECTIVE_SMS
    )
    assert mixed(idle, endpoint=ENGINE).hidden_share("all_gather", SIZE, group) == pytest.approx(1)
    assert mixed(wide).hidden_share("all_reduce", SIZE, group) == wide.overlap


def test_the_planner_sees_the_endpoint_of_many_ranks() -> None:
    """Its one share of overlap is that of a large all-reduce."""
    for who in (DEVICE, ENGINE):
        nodes = mixed(replace(QUICK, node=512), endpoint=who)
        told = nodes.hidden_share("all_reduce", SIZE, range(512))
        assert nodes.overlap == pytest.approx(told, rel=1e-2)


# -- ranks -----------------------------------------------------------------------------------------


def test_work_is_priced_on_the_device_of_its_rank() -> None:
    """Operators of ranks that wait for each other take what they take on the slowest."""
    nodes, work = mixed(QUICK, SLOW), SegmentWork(Counter({("product", 8e9, 1): 1}))
    assert [nodes.device_of(rank).name for rank in (0, 3, 4, 7)] == [
        "quick",
        "quick",
        "slow",
        "slow",
    ]
    assert nodes.for_ranks((0, 1)).computing_seconds(work) == 2.0
    assert (
        nodes.for_ranks((3, 4)).computing_seconds(work)
        == nodes.for_ranks((4, 5)).computing_seconds(work)
        == 8.0
    )
    assert nodes.for_ranks((3, 4)).memory == 2 * GIB and nodes.for_ranks((0, 1)).memory == 8 * GIB
    assert nodes.computing_seconds(work) == 2.0 and nodes.slowest == SLOW
    turned = nodes.in_order((1, 0))
    assert turned.device_of(0) == SLOW and nodes.in_order(()) == nodes
    assert nodes.first_nodes(4).ranks == 4 and nodes.first_nodes(5) == nodes
    priced = cluster_of_nodes("mine", [Node(QUICK, 36.0, 300.0), Node(SLOW, 3.6, 100.0)])
    assert priced.price_per_second(4) == pytest.approx(0.01) and priced.price_per_second(
        8
    ) == pytest.approx(0.011)
    assert priced.watts(5) == 1300.0


COMPUTES = replace(QUICK, speed=4e9, stream=ENDLESS, link=ENDLESS, network=ENDLESS)
LATE = replace(COMPUTES, name="late", speed=1e9)
SENDS = replace(COMPUTES, speed=ENDLESS, link=1e6, network=1e5)


def times(plan: Plan, cluster: Cluster) -> StepTime:
    """The step of a plan for the net."""
    batch = {"ids": torch.zeros(ROWS, dtype=torch.long)}
    prepared = prepare(plan, parts.largest_part(batch, plan.share_weights, plan.micro), loss)
    return time_step(
        plan, prepared, simulate_ranks(plan, batch, loss, prepared, works=True), cluster
    )


def alone(device: Cluster, count: int = 2) -> Nodes:
    """Nodes of one rank each."""
    return mixed(*[replace(device, node=1)] * count)


@pytest.mark.parametrize("rows", [(1, 1), (4, 1)])
def test_the_last_replica_sets_the_pace(rows: tuple[int, int]) -> None:
    """A rank four times as quick ends with the other where it has four times the rows."""
    plan = planned(Net(), f"zero(stage=0, over=dp, rows={list(rows)})", "dp=2")
    whole = times(planned(Net(), "zero(stage=0, over=dp)", "dp=1"), alone(COMPUTES)).seconds
    nodes = mixed(*(replace(one, node=1) for one in (COMPUTES, LATE)))
    quick, late = (part / sum(rows) for part in rows)
    found = times(plan, nodes)
    assert found.seconds == pytest.approx(whole * max(quick, 4 * late), rel=0.04)
    turned = times(plan, nodes.in_order((1, 0)))
    assert turned.seconds == pytest.approx(whole * max(4 * quick, late), rel=0.04)


def test_a_slow_stage_takes_its_devices_time() -> None:
    """Two stages, two microbatches: the pace is that of the stage on the slow device."""
    rows = 'blocks  pipeline_split(over=pp)\npipeline(order="GPipe", micro=2)'
    plan = planned(Net(), rows, "pp=2")
    nodes = mixed(*(replace(one, node=1) for one in (COMPUTES, LATE)))
    alike, first, last = (
        times(plan, one).seconds for one in (alone(COMPUTES), nodes.in_order((1, 0)), nodes)
    )
    # f: a forward; both stages alike 9 f: down, two of each, up; with one 4 f it is 27 f: 1 + 2 x 4
    # forwards, 2 x 8 backwards, and 2 more of the quick one; or 2 x 4, 1 and 2, 2 x 8
    assert first == pytest.approx(3 * alike) and last == pytest.approx(3 * alike)
    assert place_slowdowns(plan, nodes) == (1.0, 4.0) and place_slowdowns(
        plan, nodes.in_order((1, 0))
    ) == (4.0, 1.0)
    assert (
        place_slowdowns(plan, alone(COMPUTES)) == (1.0, 1.0)
        and place_slowdowns(plan, COMPUTES) == ()
    )


def test_messages_go_over_the_links_of_their_own_replica() -> None:
    """Rows of one replica lie in one node, those of the other on two: the second is waited for."""
    split = "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)\n"
    plan = planned(Net(), split + "zero(stage=0, over=dp)", "dp=2, tp=2")
    near = mixed(replace(SENDS, node=2), replace(SENDS, node=2))
    apart = mixed(replace(SENDS, node=2), replace(SENDS, node=1), replace(SENDS, node=1))
    activations = ROWS // 2 * WIDTH * 4
    slow = 4 * activations * (1 / SENDS.network - 1 / SENDS.link)
    assert times(plan, apart).seconds - times(plan, near).seconds == pytest.approx(slow, rel=0.01)


def test_each_rank_needs_the_memory_of_its_own_device() -> None:
    """A replica with few rows fits where one with many does not."""
    batch = {"ids": torch.zeros(ROWS, dtype=torch.long)}

    def lacks(plan: Plan, *memories: int) -> int:
        prepared = prepare(plan, parts.largest_part(batch, plan.share_weights, plan.micro), loss)
        found = memory_of_ranks(plan, prepared, simulate_ranks(plan, batch, loss, prepared))
        nodes = mixed(*(replace(QUICK, node=1, memory=size) for size in memories))
        return missing_memory(plan, prepared.staged, found, nodes)

    many, even = (
        planned(Net(), f"zero(stage=0, over=dp, rows={rows})", "dp=2") for rows in ([3, 1], [1, 1])
    )
    most, half = lacks(many, 0, 2**40), lacks(even, 0, 0)
    few = lacks(many, 2**40, 0)
    assert most > half > few > 0
    assert lacks(many, most, few) == 0 and lacks(many, few, most) == most - few


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


def read(folder: Path, text: str) -> Nodes:
    """The cluster of a file."""
    path = folder / "cluster.toml"
    path.write_text(text)
    found, ranks = cluster_named(str(path))
    assert isinstance(found, Nodes) and ranks == found.ranks
    return found


def test_a_file_of_nodes_is_read(tmp_path: Path) -> None:
    """Devices by name or of the same file; numbers of nodes, in the order of their ranks."""
    found = read(tmp_path, FILE)
    assert (found.name, found.leaf, found.over, found.rails) == ("cluster", 2, 1.5, False)
    assert found.endpoint == ENGINE and found.ranks == 18
    assert [one.device.name for one in found.nodes] == ["mine", "a100", "a100"]
    assert [one.price for one in found.nodes] == [None, 32.8, 32.8]
    assert found.numbers == (3, 1, 2) and found.in_order((2, 0)).numbers == (2, 3)
    free, held, least = found.nodes[1].with_power_limits
    assert free == found.nodes[1] and (held.power, least.power) == (300.0, 200.0)
    assert least.device == replace(free.device, speed=free.device.speed * 0.6)
    mine = found.nodes[0].device
    assert (mine.node, mine.network, mine.routed, mine.memory) == (2, 1e9, 1.0, 2 * GIB)
    assert found.nodes[1].device == CLUSTERS["a100"]
    assert found.text() == "2 mine of 2 GiB, 2 x 8 a100 of 80 GiB"
    few = read(tmp_path, FILE.replace("[3, 1, 2]", "[2]"))
    assert few.ranks == 8 and few.numbers == (2,)
    rails = read(tmp_path, "rails = true\n" + FILE.replace("leaf = 2\n", ""))
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
    """S936 says which line, why, and what would be legal."""
    assert FILE.count(old) == 1
    with pytest.raises(Refusal) as caught:
        read(tmp_path, FILE.replace(old, new))
    (told,) = caught.value.diagnostics
    assert told.code == "S936" and why in told.notes[0]
    assert told.notes[0].startswith(f"line {line}:")
    assert any("[[node]]" in one for one in told.helps)
