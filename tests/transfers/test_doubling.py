"""Whole tensors for all ranks in rounds: to the last bit, in the fewest bytes, few messages."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from schedlang.ir.mesh import Mesh
from schedlang.ir.placement import Layout, Uneven
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
from tests.transfers.test_route import SHAPES, Side, dtype_of, fewest, sides, value


def whole_side(side: Side) -> Side:
    """The same ranks, each with all of every tensor."""
    alone = tuple(Holding(one.name, Layout.whole(one.layout.shape)) for one in side.holdings)
    return Side(side.mesh, 0, alone)


def gathered(side: Side, bucket: int) -> Any:
    """All tensors on this rank, from its parts of known values; what it sent and received."""
    rank, made = comm.rank(), {}
    for k, one in enumerate(side.holdings):
        known = value(k, one.layout.shape)
        made[one.name] = torch.zeros_like(known)
        if one.is_held(side.mesh, rank):
            write_shard(shard_of(known, one, side.mesh, rank), made[one.name], one, side.mesh, rank)
    source = {
        one.name: TensorLayout(one.sharding(side.mesh), dtype_of(k).itemsize)
        for k, one in enumerate(side.holdings)
    }
    sizes = tuple(side.mesh.sizes.values())
    whole = made.__getitem__
    done = [
        redistribute_by_route(one, whole, whole, bucket, HOST) for one in rounds_of(source, sizes)
    ]
    right = all(
        torch.equal(made[one.name], value(k, one.layout.shape))
        for k, one in enumerate(side.holdings)
    )
    return right, sum(one.sent for one in done), sum(one.received for one in done)


@settings(max_examples=40, deadline=None)
@given(side=sides(tuple(SHAPES)))
def test_all_of_drawn_layouts(side: Side, threads: Threads) -> None:
    """Every rank has every tensor, to the last bit, in the fewest bytes."""
    side = Side(side.mesh, 0, side.holdings)
    found = threads.run(gathered, side.mesh.world, side, 48)
    assert all(right for right, *_ in found)
    bound = fewest(side, whole_side(side))
    assert sum(sent for _, sent, _ in found) == sum(got for *_, got in found) == bound


def lying(mesh: Mesh, layout: Layout, sliced: tuple[str, ...], stages: int | None) -> TensorLayout:
    """A tensor of a model on a mesh."""
    some = frozenset([stages]) if stages is not None else None
    return TensorLayout(
        Holding("t", layout, sliced, "pp" if some else None, some).sharding(mesh), 4
    )


MANY = Mesh((("pp", 8), ("dp", 16), ("tp", 8)))
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
    """Of 1,024 ranks each sends a few messages in each of ten rounds, and gets what it lacks."""
    layout, sliced = LAYOUTS[name]
    if stage is not None and "pp" in sliced:
        pytest.skip("slices over stages are of one stage each")
    one, world = lying(MANY, layout, sliced, stage), MANY.world
    steps = sharding_rounds(one.sharding, tuple(MANY.sizes.values()), {})
    assert len(steps) == 12 and len({id(step) for step in steps}) <= 11
    every = replicate_on(layout.shape, range(world), world)
    direct = find_route(group_by_layout({"t": one}, {"t": TensorLayout(every, 4)}), world)
    received, messages = np.zeros(world, np.int64), np.zeros(world, np.int64)
    for before, after in zip(steps, steps[1:]):
        if before is not after:
            found = find_route(
                group_by_layout({"t": TensorLayout(before, 4)}, {"t": TensorLayout(after, 4)}),
                world,
                True,
            )
            received += found.received
            messages += np.bincount(found.pairs[0], minlength=world)
    assert (received == direct.bound).all() and (direct.received == direct.bound).all()
    assert messages.max() <= 20
