"""Simulated step time: each part against a figure counted by hand."""

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
from schedlang.pipeline.timeline.table import Kind
from schedlang.runtime import batch as parts
from schedlang.runtime import dry_run, step_batch
from schedlang.runtime.offload.offloaded_activations import offload_all_sizes
from schedlang.runtime.storage.footprint import Footprint, SegmentWork, TrafficMessage
from tests.proofs import make_plan

WIDTH, ROWS, LAYERS = 32, 48, 4
ENDLESS = 1e30
# machines on which only one thing takes time
COMPUTES = Cluster("computes", 1e9, ENDLESS, ENDLESS, ENDLESS, 8, 2**40)
SENDS = Cluster("sends", ENDLESS, ENDLESS, 1e6, 1e6, 8, 2**40)
FLOAT, TENSOR_CORES = 4, 2  # bytes, and the slowdown of a 32-bit product over a 16-bit one
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
    """Return the mean square of the output."""
    return output.pow(2).mean()


BATCH = {"ids": torch.zeros(ROWS, dtype=torch.long)}


def plan_time(plan: Plan, cluster: Cluster, rows: int = ROWS) -> StepTime:
    """Return the simulated step time of a plan for the net above."""
    batch = {"ids": torch.zeros(rows, dtype=torch.long)}
    prepared = prepare(plan, parts.largest_part(batch, plan.shares, plan.micro), loss)
    return time_step(
        plan, prepared, simulate_ranks(plan, batch, loss, prepared, works=True), cluster
    )


def test_an_operator_is_counted_once_and_a_view_is_not() -> None:
    """A product of m x k by k x n: 2 mkn operations, three matrices moved; its transpose: none."""
    a, b = torch.randn(3, 5), torch.randn(7, 5)
    with Footprint("cpu", works=True) as footprint:
        a @ b.t()
    moved_bytes = FLOAT * (3 * 5 + 5 * 7 + 3 * 7)
    counted = footprint.stretches[-1].work.operators
    assert counted == Counter({("product", 2.0 * 3 * 5 * 7 * TENSOR_CORES, moved_bytes): 1})


def attention_flops(footprint: Footprint) -> float:
    """Return the FLOPs of fused attention."""
    operators = footprint.stretches[-1].work.operators
    return sum(flops * n for (kind, flops, _), n in operators.items() if kind == "attention")


def test_attention_counts_both_its_products() -> None:
    """Fused attention: 4 heads x 6 x 6 x 8, twice; its backward counts 2.5 times as much."""
    q, k, v = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3))
    with Footprint("cpu", works=True) as footprint:
        output = nn.functional.scaled_dot_product_attention(q, k, v)
        forward = attention_flops(footprint)
        output.backward(torch.ones_like(output))
    total = attention_flops(footprint)
    product_flops = 2 * (2 * 4 * 6 * 6 * 8) * TENSOR_CORES
    assert (forward, total - forward) == (2 * product_flops, 5 * product_flops)


def test_operators_take_operations_or_bytes_whatever_is_longer() -> None:
    """The roofline: 100 operations a second, 10 bytes a second."""
    machine = with_figures(COMPUTES, speed=100.0, stream=10.0)
    assert machine.computing_seconds(SegmentWork(Counter({("product", 200.0, 5): 3}))) == 6.0
    assert machine.computing_seconds(SegmentWork(Counter({("product", 200.0, 50): 3}))) == 15.0


def test_a_step_computes_three_forwards() -> None:
    """Each layer has a forward, an input gradient and a weight gradient."""
    step_time = plan_time(make_plan(Net(), "zero(stage=0, over=dp)", "dp=1"), COMPUTES)
    assert step_time.seconds == pytest.approx(3 * LAYERS * FORWARD / COMPUTES.speed)
    assert step_time.computing == pytest.approx(step_time.seconds)


def test_what_is_recomputed_counts_again() -> None:
    """Checkpointed blocks rerun their forward, up to the last tensor that backward needs."""
    plan = make_plan(Net(), "blocks.*  checkpoint()\nzero(stage=0, over=dp)", "dp=1")
    recomputed = (
        LAYERS // 2
    )  # of each block the first layer: what the second gives, nobody asks for
    assert plan_time(plan, COMPUTES).seconds == pytest.approx(
        (3 * LAYERS + recomputed) * FORWARD / COMPUTES.speed
    )


def test_ranks_share_what_is_split() -> None:
    """Tensor and data parallelism over four ranks leave a quarter of the work to each."""
    rows = "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)\n"
    plan = make_plan(Net(), rows + "zero(stage=0, over=dp)", "dp=2, tp=2")
    assert plan_time(plan, COMPUTES).computing == pytest.approx(
        3 * LAYERS * FORWARD / 4 / COMPUTES.speed
    )


def test_sums_of_a_split_block_are_waited_for() -> None:
    """All messages are exposed: 2 (n-1)/n of the bytes of each all-reduce in the account."""
    rows = "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)\n"
    plan = make_plan(Net(), rows, "tp=4")
    sent = [collective.total for collective in account(plan, BATCH, loss).collectives or ()]
    assert {collective.kind for collective in account(plan, BATCH, loss).collectives or ()} == {
        "all-reduce"
    }
    assert plan_time(plan, SENDS).sending == pytest.approx(2 * 3 / 4 * sum(sent) / SENDS.link)


def test_sums_of_gradients_hide_where_a_row_lets_them() -> None:
    """With two stages per rank, gradient sums of one overlap with the backward of the other."""
    machine = with_figures(SENDS, speed=1e9, link=1e8)
    cut = "blocks  pipeline_split(over=pp)\nzero(stage=0, over=dp)\n"
    rows = cut + 'pipeline(order="Interleaved1F1B", micro=2, chunks=2)'
    late = plan_time(make_plan(Net(8), rows, "dp=2, pp=2"), machine)
    early = plan_time(make_plan(Net(8), f"{rows}\noverlap(gradients)", "dp=2, pp=2"), machine)
    assert early.computing == pytest.approx(late.computing)
    assert early.sending < late.sending
    assert early.seconds < late.seconds


def test_a_cluster_hides_a_share_of_what_runs_beside() -> None:
    """Parameter gathers overlap with computing: fully, not at all, or by half."""
    plan = make_plan(Net(), "zero(stage=3, over=dp)", "dp=2")
    machine = with_figures(SENDS, speed=1e9, link=1e8)
    full_overlap, half_overlap, no_overlap = (
        plan_time(plan, replace(machine, overlap=k)).sending for k in (1.0, 0.5, 0.0)
    )
    assert full_overlap < no_overlap
    assert half_overlap == pytest.approx((full_overlap + no_overlap) / 2)


def test_operators_of_passes_have_starts_and_those_of_the_update_none() -> None:
    """Each operator of forward and backward adds its start time of one second."""
    plan = make_plan(Net(), "zero(stage=0, over=dp)", "dp=1")
    prepared = prepare(plan, parts.largest_part(BATCH, plan.shares, plan.micro), loss)
    simulated = simulate_ranks(plan, BATCH, loss, prepared, works=True)
    (rank_class,) = simulated.by_class.values()
    count = sum(
        computation.work.operators.total()
        for runs in rank_class.ops.values()
        for computation in runs
    )
    assert any(computation.work.operators for computation in rank_class.rest)
    begun = time_step(plan, prepared, simulated, replace(COMPUTES, start=1.0))
    assert begun.seconds == pytest.approx(
        count + time_step(plan, prepared, simulated, COMPUTES).seconds
    )


def test_kinds_of_ranks_share_how_a_batch_is_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is split once for all rank classes; results equal separate simulations."""
    split_up = "blocks  pipeline_split(over=pp)\nzero(stage=1, over=dp)\n"
    plan = make_plan(Net(), split_up + 'pipeline(order="GPipe", micro=2)', "dp=2, pp=2")
    prepared = prepare(plan, parts.largest_part(BATCH, plan.shares, plan.micro), loss)
    split, play = Mock(wraps=parts.split_batch), dry_run.dry_run
    monkeypatch.setattr(step_batch, "split_batch", split)
    shared = simulate_ranks(plan, BATCH, loss, prepared, works=True)
    assert split.call_count == 1
    monkeypatch.setattr(dry_run, "dry_run", lambda *given: play(*given[:4]))
    by_itself = simulate_ranks(plan, BATCH, loss, prepared, works=True)
    assert repr(by_itself) == repr(shared)  # bytes by class are arrays
    assert split.call_count == 1 + 2 * 2


def test_units_of_other_stages_start_no_operators() -> None:
    """Placeholders of what other stages compute are no kernels: each stage starts its own."""
    rows = 'blocks  pipeline_split(over=pp)\npipeline(order="GPipe", micro=2)'
    plan = make_plan(Net(8), rows, "pp=4")
    prepared = prepare(plan, parts.largest_part(BATCH, plan.shares, plan.micro), loss)
    simulated = simulate_ranks(plan, BATCH, loss, prepared, works=True)
    forwards = [
        sum(run.work.operators.total() for run in runs)
        for rank in simulated.by_class.values()
        for key, runs in rank.ops.items()
        if key[0] is Kind.F
    ]
    embedding, loss_operators, products = 1, 2, 2
    assert forwards == [2 * (products + more) for more in (embedding, 0, 0, loss_operators)]


@pytest.mark.parametrize("micro", [2, 4, 8])
def test_a_pipeline_waits_as_its_closed_form_says(micro: int) -> None:
    """GPipe on two equal stages takes (m + 1) forwards and backwards of one microbatch."""
    rows = f'blocks  pipeline_split(over=pp)\npipeline(order="GPipe", micro={micro})'
    step_time = plan_time(make_plan(Net(), rows, "pp=2"), COMPUTES)
    computing_time = 3 * LAYERS / 2 * FORWARD / COMPUTES.speed
    assert step_time.computing == pytest.approx(computing_time)
    assert step_time.seconds == pytest.approx(computing_time * (micro + 1) / micro)
    assert step_time.idle == pytest.approx(computing_time / micro)


def test_transfers_between_stages_take_their_bytes() -> None:
    """One microbatch on two stages: an activation is sent, and its gradient comes back."""
    rows = 'blocks  pipeline_split(over=pp)\npipeline(order="GPipe", micro=1)'
    step_time = plan_time(make_plan(Net(), rows, "pp=2"), SENDS)
    transfer_time = 2 * ROWS * WIDTH * FLOAT / SENDS.link
    assert step_time.seconds - step_time.sending == pytest.approx(transfer_time)


@pytest.mark.parametrize("rows", [16, 32, 36, 64])
def test_model_and_data_parallelism_cross_where_they_send_alike(rows: int) -> None:
    """Data parallelism sends every parameter once, tensor parallelism four activations per row and
    two blocks: tensor parallelism is better up to the number of rows where both are equal."""
    split = "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)\n"
    tensors = plan_time(make_plan(Net(), split, "tp=4"), SENDS, rows).sending
    data = plan_time(make_plan(Net(), "zero(stage=0, over=dp)", "dp=4"), SENDS, rows).sending
    parameters = 7 * WIDTH + LAYERS * WIDTH * WIDTH
    assert (tensors < data) == (rows < parameters / (2 * LAYERS // 2 * WIDTH))


def test_rings_leave_a_node_by_all_its_ways() -> None:
    """Inside a node the link counts; across nodes, one adapter for each rank of the ring there."""
    machine = Cluster("c", 1.0, 1.0, 100.0, 10.0, 4, 1)
    for ranks, bandwidth in ((range(4), 100), (range(8), 40), ((0, 4), 10), ((0, 1, 4), 10)):
        count = len(ranks)
        seconds = machine.message_seconds(TrafficMessage("all_reduce", tuple(ranks), 800))
        assert seconds == 2 * (count - 1) / count * 800 / bandwidth
    assert machine.message_seconds(TrafficMessage("all_gather", (0, 4), 800)) == 800 / 2 / 10
    assert machine.message_seconds(TrafficMessage("send", (0, 4), 800, (0, 4))) == 80
    assert machine.message_seconds(TrafficMessage("all_reduce", (3,), 800)) == 0


def test_clusters_are_known_by_name() -> None:
    """`a100x64` is 64 ranks of a known machine; for unknown names only the number is read."""
    assert cluster_named("a100x64") == (CLUSTERS["a100"], 64)
    assert cluster_named("h100") == (CLUSTERS["h100"], None)
    assert cluster_named("tpux8") == (None, 8)
    assert cluster_named(None) == (None, None)


# a machine on which only the link to the host takes time, without overlap
COPIES = Cluster("copies", ENDLESS, ENDLESS, ENDLESS, ENDLESS, 8, 2**40, host=1e6)


def test_activations_go_to_the_host_and_back() -> None:
    """Each layer's saved input is copied twice; with overlap only the longer part counts."""
    plan = make_plan(Net(), "blocks.*  offload(activations)")
    copied = 2 * LAYERS * ROWS * WIDTH * FLOAT
    with_compute = replace(COPIES, speed=COMPUTES.speed)

    def took(machine: Cluster) -> float:
        with offload_all_sizes():
            return plan_time(plan, machine).seconds

    assert took(COPIES) == pytest.approx(copied / 1e6)
    assert plan_time(make_plan(Net(), "zero(stage=0, over=dp)", "dp=1"), COPIES).seconds < 1e-9
    compute_time = took(replace(with_compute, host=ENDLESS))
    assert took(replace(with_compute, host=copied / compute_time * 20)) < compute_time * 1.06
    assert took(replace(with_compute, overlap=0.0)) == pytest.approx(compute_time + copied / 1e6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_on_the_host_is_passed_at_the_pace_of_its_link(ranks: int) -> None:
    """Moments, gradients and values cross the host link: nine numbers per parameter of the rank's
    own slice."""
    net = Net()
    plan = make_plan(net, "zero(stage=1, over=dp)\noffload(optimizer)", f"dp={ranks}")
    numel = sum(p.numel() for p in net.parameters()) / ranks
    seconds = plan_time(plan, COPIES).seconds
    assert seconds == pytest.approx(numel * 9 * FLOAT / 1e6, rel=0.02)
