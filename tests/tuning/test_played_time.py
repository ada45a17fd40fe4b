"""The time of a step that was played: each part of it against a figure counted by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.simulate.account import account
from schedlang.passes.simulate.machine import CLUSTERS, Cluster, cluster_named, with_figures
from schedlang.passes.simulate.simulated_ranks import simulate_ranks
from schedlang.passes.simulate.step_time import StepTime, time_step
from schedlang.runtime import batch as parts
from schedlang.runtime import dry_run, step_batch
from schedlang.runtime.offload.offloaded_activations import offload_all_sizes
from schedlang.runtime.storage.footprint import Footprint, SegmentWork, TrafficMessage
from tests.proofs import planned

WIDTH, ROWS, LAYERS = 32, 48, 4
ENDLESS = 1e30
# a machine on which one thing alone takes time
COMPUTES = Cluster("computes", 1e9, ENDLESS, ENDLESS, ENDLESS, 8, 2**40)
SENDS = Cluster("sends", ENDLESS, ENDLESS, 1e6, 1e6, 8, 2**40)
FLOAT, TENSOR_CORES = 4, 2  # bytes, and how much longer a product of 32 bits takes than one of 16
FORWARD = 2 * ROWS * WIDTH * WIDTH * TENSOR_CORES  # operations of one layer


class Block(nn.Module):
    """Two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        """x[rows, width] -> [rows, width]"""
        return self.down(self.up(x))


class Net(nn.Module):
    """Blocks one after the other."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.first = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers // 2))

    def forward(self, ids: Any) -> Any:
        """ids[rows] -> [rows, width]"""
        x = self.first(ids)
        for block in self.blocks:
            x = block(x)
        return x


def loss(output: Any, batch: Any) -> Any:
    """The mean of all there is."""
    return output.pow(2).mean()


BATCH = {"ids": torch.zeros(ROWS, dtype=torch.long)}


def times(plan: Plan, cluster: Cluster, rows: int = ROWS) -> StepTime:
    """The step of a plan for the net above."""
    batch = {"ids": torch.zeros(rows, dtype=torch.long)}
    prepared = prepare(plan, parts.largest_part(batch, plan.shares, plan.micro), loss)
    return time_step(
        plan, prepared, simulate_ranks(plan, batch, loss, prepared, works=True), cluster
    )


def test_an_operator_is_counted_once_and_a_view_is_not() -> None:
    """A product of m x k by k x n: 2 mkn operations, three matrices moved; its transpose: none."""
    a, b = torch.randn(3, 5), torch.randn(7, 5)
    with Footprint("cpu", works=True) as seen:
        a @ b.t()
    moved = FLOAT * (3 * 5 + 5 * 7 + 3 * 7)
    counted = seen.stretches[-1].work.operators
    assert counted == Counter({("product", 2.0 * 3 * 5 * 7 * TENSOR_CORES, moved): 1})


def attention(seen: Footprint) -> float:
    """The operations of fused attention."""
    found = seen.stretches[-1].work.operators
    return sum(flops * n for (kind, flops, _), n in found.items() if kind == "attention")


def test_attention_counts_both_its_products() -> None:
    """Fused attention: 4 heads x 6 x 6 x 8, twice; its backward two and a half times as many."""
    q, k, v = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3))
    with Footprint("cpu", works=True) as seen:
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        forward = attention(seen)
        out.backward(torch.ones_like(out))
    both = attention(seen)
    one = 2 * (2 * 4 * 6 * 6 * 8) * TENSOR_CORES
    assert (forward, both - forward) == (2 * one, 5 * one)


def test_operators_take_operations_or_bytes_whatever_is_longer() -> None:
    """The roofline: 100 operations a second, 10 bytes a second."""
    machine = with_figures(COMPUTES, speed=100.0, stream=10.0)
    assert machine.computing_seconds(SegmentWork(Counter({("product", 200.0, 5): 3}))) == 6.0
    assert machine.computing_seconds(SegmentWork(Counter({("product", 200.0, 50): 3}))) == 15.0


def test_a_step_computes_three_forwards() -> None:
    """Every layer has a forward, a gradient of its input and one of its weight."""
    got = times(planned(Net(), "zero(stage=0, over=dp)", "dp=1"), COMPUTES)
    assert got.seconds == pytest.approx(3 * LAYERS * FORWARD / COMPUTES.speed)
    assert got.computing == pytest.approx(got.seconds)


def test_what_is_recomputed_counts_again() -> None:
    """Checkpointed blocks run their forward again, up to the last that a backward asks for."""
    plan = planned(Net(), "blocks.*  checkpoint()\nzero(stage=0, over=dp)", "dp=1")
    again = LAYERS // 2  # of each block the first layer: what the second gives, nobody asks for
    assert times(plan, COMPUTES).seconds == pytest.approx(
        (3 * LAYERS + again) * FORWARD / COMPUTES.speed
    )


def test_ranks_share_what_is_split() -> None:
    """Tensor and data parallelism over four ranks leave each a quarter."""
    rows = "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)\n"
    plan = planned(Net(), rows + "zero(stage=0, over=dp)", "dp=2, tp=2")
    assert times(plan, COMPUTES).computing == pytest.approx(
        3 * LAYERS * FORWARD / 4 / COMPUTES.speed
    )


def test_sums_of_a_split_block_are_waited_for() -> None:
    """All that is sent waits, as the plan's account counts it: twice (n-1)/n of every sum."""
    rows = "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)\n"
    plan = planned(Net(), rows, "tp=4")
    sent = [one.total for one in account(plan, BATCH, loss).collectives or ()]
    assert {one.kind for one in account(plan, BATCH, loss).collectives or ()} == {"all-reduce"}
    assert times(plan, SENDS).sending == pytest.approx(2 * 3 / 4 * sum(sent) / SENDS.link)


def test_sums_of_gradients_hide_where_a_row_lets_them() -> None:
    """Two stages on each rank: the sums of one run beside the backwards of the other."""
    machine = with_figures(SENDS, speed=1e9, link=1e8)
    cut = "blocks  pipeline_split(over=pp)\nzero(stage=0, over=dp)\n"
    rows = cut + 'pipeline(order="Interleaved1F1B", micro=2, chunks=2)'
    late = times(planned(Net(8), rows, "dp=2, pp=2"), machine)
    early = times(planned(Net(8), f"{rows}\noverlap(gradients)", "dp=2, pp=2"), machine)
    assert early.computing == pytest.approx(late.computing)
    assert early.sending < late.sending
    assert early.seconds < late.seconds


def test_a_cluster_hides_a_share_of_what_runs_beside() -> None:
    """Parameters are gathered beside the computing: wholly, not at all, or by half."""
    plan = planned(Net(), "zero(stage=3, over=dp)", "dp=2")
    machine = with_figures(SENDS, speed=1e9, link=1e8)
    whole, half, none = (times(plan, replace(machine, overlap=k)).sending for k in (1.0, 0.5, 0.0))
    assert whole < none
    assert half == pytest.approx((whole + none) / 2)


def test_operators_of_passes_have_starts_and_those_of_the_update_none() -> None:
    """One second each, of what runs in forwards and backwards."""
    plan = planned(Net(), "zero(stage=0, over=dp)", "dp=1")
    prepared = prepare(plan, parts.largest_part(BATCH, plan.shares, plan.micro), loss)
    played = simulate_ranks(plan, BATCH, loss, prepared, works=True)
    (one,) = played.by_class.values()
    count = sum(run.work.operators.total() for runs in one.ops.values() for run in runs)
    assert any(run.work.operators for run in one.rest)
    begun = time_step(plan, prepared, played, replace(COMPUTES, start=1.0))
    assert begun.seconds == pytest.approx(
        count + time_step(plan, prepared, played, COMPUTES).seconds
    )


def test_kinds_of_ranks_share_how_a_batch_is_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of two replicas deal it once; what is counted is what each counts by itself."""
    split_up = "blocks  pipeline_split(over=pp)\nzero(stage=1, over=dp)\n"
    plan = planned(Net(), split_up + 'pipeline(order="GPipe", micro=2)', "dp=2, pp=2")
    prepared = prepare(plan, parts.largest_part(BATCH, plan.shares, plan.micro), loss)
    split, play = Mock(wraps=parts.split_batch), dry_run.dry_run
    monkeypatch.setattr(step_batch, "split_batch", split)
    shared = simulate_ranks(plan, BATCH, loss, prepared, works=True)
    assert split.call_count == 1
    monkeypatch.setattr(dry_run, "dry_run", lambda *given: play(*given[:4]))
    by_itself = simulate_ranks(plan, BATCH, loss, prepared, works=True)
    assert repr(by_itself) == repr(shared)  # bytes by class are arrays
    assert split.call_count == 1 + 2 * 2


@pytest.mark.parametrize("micro", [2, 4, 8])
def test_a_pipeline_waits_as_its_closed_form_says(micro: int) -> None:
    """GPipe on two equal stages: (m + 1) forwards and (m + 1) backwards, each of one microbatch."""
    rows = f'blocks  pipeline_split(over=pp)\npipeline(order="GPipe", micro={micro})'
    got = times(planned(Net(), rows, "pp=2"), COMPUTES)
    whole = 3 * LAYERS / 2 * FORWARD / COMPUTES.speed
    assert got.computing == pytest.approx(whole)
    assert got.seconds == pytest.approx(whole * (micro + 1) / micro)
    assert got.idle == pytest.approx(whole / micro)


def test_transfers_between_stages_take_their_bytes() -> None:
    """One microbatch on two stages: an activation goes on, its gradient comes back."""
    rows = 'blocks  pipeline_split(over=pp)\npipeline(order="GPipe", micro=1)'
    got = times(planned(Net(), rows, "pp=2"), SENDS)
    both = 2 * ROWS * WIDTH * FLOAT / SENDS.link
    assert got.seconds - got.sending == pytest.approx(both)


@pytest.mark.parametrize("rows", [16, 32, 36, 64])
def test_model_and_data_parallelism_cross_where_they_send_alike(rows: int) -> None:
    """Data parallelism sends every parameter once, tensor parallelism four activations a row for
    two blocks: the second is better up to as many rows as parameters are in those."""
    split = "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)\n"
    tensors = times(planned(Net(), split, "tp=4"), SENDS, rows).sending
    data = times(planned(Net(), "zero(stage=0, over=dp)", "dp=4"), SENDS, rows).sending
    parameters = 7 * WIDTH + LAYERS * WIDTH * WIDTH
    assert (tensors < data) == (rows < parameters / (2 * LAYERS // 2 * WIDTH))


def test_rings_leave_a_node_by_all_its_ways() -> None:
    """Within a node the link; across, a way out for each rank that the fullest ring has there."""
    machine = Cluster("c", 1.0, 1.0, 100.0, 10.0, 4, 1)
    assert machine.ring_bandwidth(range(4)) == 100
    assert machine.ring_bandwidth(range(8)) == 40
    assert machine.ring_bandwidth((0, 4)) == 10
    assert machine.ring_bandwidth((0, 1, 4)) == 10
    assert (
        machine.message_seconds(TrafficMessage("all_reduce", tuple(range(8)), 800))
        == 2 * 7 / 8 * 800 / 40
    )
    assert machine.message_seconds(TrafficMessage("all_gather", (0, 4), 800)) == 800 / 2 / 10
    assert machine.message_seconds(TrafficMessage("send", (0, 4), 800, (0, 4))) == 80
    assert machine.message_seconds(TrafficMessage("all_reduce", (3,), 800)) == 0


def test_clusters_are_known_by_name() -> None:
    """`a100x64` is 64 ranks of a machine that is known; of others only the number is."""
    assert cluster_named("a100x64") == (CLUSTERS["a100"], 64)
    assert cluster_named("h100") == (CLUSTERS["h100"], None)
    assert cluster_named("tpux8") == (None, 8)
    assert cluster_named(None) == (None, None)


# a machine on which the link to the host alone takes time, and none of it beside computing
COPIES = Cluster("copies", ENDLESS, ENDLESS, ENDLESS, ENDLESS, 8, 2**40, host=1e6)


def test_activations_go_to_the_host_and_back() -> None:
    """What each layer saves, its input, twice; beside computing only what takes longer counts."""
    plan = planned(Net(), "blocks.*  offload(activations)")
    copied = 2 * LAYERS * ROWS * WIDTH * FLOAT
    both = replace(COPIES, speed=COMPUTES.speed)

    def took(machine: Cluster) -> float:
        with offload_all_sizes():
            return times(plan, machine).seconds

    assert took(COPIES) == pytest.approx(copied / 1e6)
    assert times(planned(Net(), "zero(stage=0, over=dp)", "dp=1"), COPIES).seconds < 1e-9
    alone = took(replace(both, host=ENDLESS))
    assert took(replace(both, host=copied / alone * 20)) < alone * 1.06
    assert took(replace(both, overlap=0.0)) == pytest.approx(alone + copied / 1e6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_on_the_host_is_passed_at_the_pace_of_its_link(ranks: int) -> None:
    """Moments are read and written there, gradients read, values written; gradients come, values
    come and go: nine numbers of each, of the rank's own slice."""
    net = Net()
    plan = planned(net, "zero(stage=1, over=dp)\noffload(optimizer)", f"dp={ranks}")
    numbers = sum(p.numel() for p in net.parameters()) / ranks
    took = times(plan, COPIES).seconds
    assert took == pytest.approx(numbers * 9 * FLOAT / 1e6, rel=0.02)
