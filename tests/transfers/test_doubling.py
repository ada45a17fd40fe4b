"""Full tensors on all ranks in doubling rounds: exact, in the fewest bytes, with few messages."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from schedlang.ir.mesh import Mesh
from schedlang.ir.placement import Layout, Uneven
from schedlang.runtime.checkpointing import holdings
from schedlang.runtime.checkpointing.holdings import (
    Holding,
    rounds_of,
    shard_of,
    sharding_rounds,
    write_shard,
)
from schedlang.runtime.comm import world as comm
from schedlang.runtime.device import HOST
from schedlang.runtime.redistribution.execution import redistribute_by_route
from schedlang.runtime.redistribution.route import TensorLayout, find_route, group_by_layout
from schedlang.runtime.redistribution.sharding import replicate_on
from tests.engine import Threads
from tests.proofs import assert_near, assert_same, make_plan, train_on_ranks, train_sequential
from tests.transfers.test_route import SHAPES, Side, dtype_at, fewest_bytes, sides, values_of


def full_side(side: Side) -> Side:
    """Return the same ranks, each with all of every tensor."""
    full_holdings = tuple(
        Holding(holding.name, Layout.whole(holding.layout.shape)) for holding in side.holdings
    )
    return Side(side.mesh, 0, full_holdings)


def gather_full(side: Side, bucket: int) -> Any:
    """Gather all tensors on this rank from parts of known values: return whether they are right,
    and the bytes sent and received."""
    rank, tensors = comm.rank(), {}
    for k, item in enumerate(side.holdings):
        expected = values_of(k, item.layout.shape)
        tensors[item.name] = torch.zeros_like(expected)
        if item.is_held(side.mesh, rank):
            write_shard(
                shard_of(expected, item, side.mesh, rank), tensors[item.name], item, side.mesh, rank
            )
    source = {
        item.name: TensorLayout(item.sharding(side.mesh), dtype_at(k).itemsize)
        for k, item in enumerate(side.holdings)
    }
    sizes = tuple(side.mesh.sizes.values())
    lookup = tensors.__getitem__
    transfers = [
        redistribute_by_route(item, lookup, lookup, bucket, HOST)
        for item in rounds_of(source, sizes)
    ]
    is_equal = all(
        torch.equal(tensors[item.name], values_of(k, item.layout.shape))
        for k, item in enumerate(side.holdings)
    )
    return is_equal, sum(item.sent for item in transfers), sum(item.received for item in transfers)


@settings(max_examples=40, deadline=None)
@given(side=sides(tuple(SHAPES)))
def test_all_of_drawn_layouts(side: Side, threads: Threads) -> None:
    """Every rank gets every tensor, to the last bit, in the fewest bytes."""
    side = Side(side.mesh, 0, side.holdings)
    results = threads.run(gather_full, side.mesh.world, side, 48)
    assert all(is_equal for is_equal, *_ in results)
    bound = fewest_bytes(side, full_side(side))
    assert sum(sent for _, sent, _ in results) == sum(received for *_, received in results) == bound


def layout_of(
    mesh: Mesh, layout: Layout, sliced: tuple[str, ...], stages: int | None
) -> TensorLayout:
    """Return the layout of a model's tensor on a mesh."""
    stage_set = frozenset([stages]) if stages is not None else None
    return TensorLayout(
        Holding("t", layout, sliced, "pp" if stage_set else None, stage_set).sharding(mesh), 4
    )


LARGE_MESH = Mesh((("pp", 8), ("dp", 16), ("tp", 8)))
LAYOUTS = {
    "whole": (Layout.whole((4096,)), ()),
    "rows": (Layout.whole((4096, 512)).split("tp", 0), ()),
    "columns": (Layout.whole((512, 4096)).split("tp", 1), ()),
    "blocks": (Layout.whole((1536, 512)).split("tp", 0, (512,) * 3), ()),
    "slices": (Layout.whole((4096, 512)), ("dp",)),
    "rows in slices": (Layout.whole((4096, 512)).split("tp", 0), ("dp",)),
    "columns in slices": (Layout.whole((512, 4096)).split("tp", 1), ("dp",)),
    "slices of all": (Layout.whole((128256, 4)), ("pp", "dp", "tp")),
    "fewer rows than ranks": (Layout.whole((5, 4)), ("dp",)),
    "heads on several ranks": (
        Layout.whole((96, 4)).split("tp", 0, (), Uneven(Fraction(2), 2)),
        (),
    ),
}


@pytest.mark.parametrize("stage", [None, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_messages_of_many_ranks(name: str, stage: int | None) -> None:
    """Each of 1,024 ranks sends a few messages in each of ten rounds, and receives what it
    lacks."""
    layout, sliced = LAYOUTS[name]
    if stage is not None and "pp" in sliced:
        pytest.skip("slices over stages are of one stage each")
    layout_of_one, world = layout_of(LARGE_MESH, layout, sliced, stage), LARGE_MESH.world
    steps = sharding_rounds(layout_of_one.sharding, tuple(LARGE_MESH.sizes.values()), {})
    assert len(steps) == 12 and len({id(step) for step in steps}) <= 11
    replicated = replicate_on(layout.shape, range(world), world)
    direct = find_route(
        group_by_layout({"t": layout_of_one}, {"t": TensorLayout(replicated, 4)}), world
    )
    received, messages = np.zeros(world, np.int64), np.zeros(world, np.int64)
    for earlier, following in zip(steps, steps[1:]):
        if earlier is not following:
            route = find_route(
                group_by_layout({"t": TensorLayout(earlier, 4)}, {"t": TensorLayout(following, 4)}),
                world,
                True,
            )
            received += route.received
            messages += np.bincount(route.pairs[0], minlength=world)
    assert (received == direct.bound).all() and (direct.received == direct.bound).all()
    assert messages.max() <= 20


def mean_square(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss whose gradients are not zero."""
    return (output - 1).square().mean()


def test_programs_with_equal_holdings_are_planned_once(threads: Threads) -> None:
    """Ranks of one process, and its later programs, share the plans by which they gather; a program
    with other slices has its own. All of them give the tensors of the original."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 7)).double()
    batches = [{"input": torch.randn(4, 5, dtype=torch.float64)}]
    planned, results = [0], []
    holdings._recent_assembly.cache_clear()
    for stage in (3, 3, 0):
        plan = make_plan(copy.deepcopy(model), f"zero(stage={stage}, over=dp)", "dp=2")
        results.append(train_on_ranks(threads, plan, batches, loss=mean_square))
        planned.append(holdings._recent_assembly.cache_info().misses)
        assert_near(results[-1], train_sequential(model, batches, loss=mean_square))
    assert_same(results[0], results[1])
    assert 0 < planned[1] == planned[2] < planned[3], planned
    # two ranks twice: without this, each of them would make each plan itself
    assert holdings._recent_assembly.cache_info().hits >= 3 * planned[1]
