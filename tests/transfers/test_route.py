"""Routes between drawn layouts: all arrives, nothing twice, senders level, buckets bounded."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.ir.mesh import Mesh
from schedlang.ir.placement import Layout, Uneven
from schedlang.runtime.checkpointing.holdings import Holding, shard_of
from schedlang.runtime.comm import world as comm
from schedlang.runtime.device import HOST
from schedlang.runtime.redistribution.execution import MAX_IN_FLIGHT, execute_route
from schedlang.runtime.redistribution.route import (
    LayoutPair,
    TensorLayout,
    UncoveredElements,
    find_route,
    group_by_layout,
)
from schedlang.runtime.redistribution.sharding import (
    NOWHERE,
    SliceArray,
    box_slice,
    count_elements,
    full_slice,
    overlap_sizes,
    overlaps,
    replicate_on,
)
from tests.engine import Threads

MESHES = [
    *((("tp", n),) for n in (1, 2, 4)),
    *((("dp", n),) for n in (2, 3, 5)),
    (("pp", 2), ("tp", 2)),
    (("pp", 3), ("dp", 2)),
    (("dp", 2), ("tp", 2)),
    (("pp", 2), ("dp", 2), ("tp", 2)),
    (("ep", 4), ("dp", 2)),
]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.bool)


@dataclass(frozen=True)
class Side:
    """A mesh on some ranks of a job, and how tensors lie on it."""

    mesh: Mesh
    first: int
    holdings: tuple[Holding, ...]

    def ranks(self) -> range:
        """Those of the job."""
        return range(self.first, self.first + self.mesh.world)


SHAPES = [(12, 24), (24, 12), (7, 24), (24,), (5,), (), (4, 6, 5), (1, 24), (0, 3)]


@st.composite
def sides(draw: st.DrawFn, shapes: tuple[tuple[int, ...], ...]) -> Side:
    """Splits with blocks and padding, slices, stages."""
    mesh = Mesh(draw(st.sampled_from(MESHES)))
    names = mesh.sizes
    return Side(
        mesh,
        draw(st.integers(0, 3)),
        tuple(draw(holdings(f"t{k}", shape, mesh, names)) for k, shape in enumerate(shapes)),
    )


@st.composite
def holdings(draw: st.DrawFn, name: str, shape: tuple[int, ...], mesh: Mesh, names: Any) -> Holding:
    layout = Layout.whole(shape)
    for axis in (a for a in ("tp", "ep") if a in names and shape):
        dim, count = draw(st.integers(0, len(shape) - 1)), names[axis]
        size = shape[dim]
        cuts = [n for n in (1, 3) if size and size % (n * count) == 0]
        if cuts and draw(st.booleans()):
            n = draw(st.sampled_from(cuts))
            layout = layout.split(axis, dim, (size // n,) * n)
        elif size and draw(st.booleans()):
            layout = layout.split(axis, dim, (), Uneven(Fraction(-(-size // count) * count, size)))
    sliced = ("dp",) if "dp" in names and shape and draw(st.booleans()) else ()
    stages = None
    if "pp" in names:
        stages = frozenset(draw(st.sets(st.integers(0, names["pp"] - 1), min_size=1)))
    return Holding(name, layout, sliced, "pp" if stages else None, stages)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Side, Side]:
    shapes = tuple(draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5)))
    return draw(sides(shapes)), draw(sides(shapes))


@settings(max_examples=200, deadline=None)
@given(side=st.sampled_from(SHAPES).flatmap(lambda shape: sides((shape,))))
def test_where_parts_lie(side: Side) -> None:
    """Of all ranks at once what each finds for itself; each part once, and its boxes as boxes."""
    (one,) = side.holdings
    found = one.sharding(side.mesh)
    for rank in range(side.mesh.world):
        held = one.is_held(side.mesh, rank)
        assert (found.part_of_rank[rank] != NOWHERE) == held
        if held:
            assert found.parts[int(found.part_of_rank[rank])] == one.part(side.mesh, rank)
    parts = list(found.parts)
    assert len(set(parts)) == len(parts)
    assert list(SliceArray.from_slices(parts, len(one.layout.shape))) == parts
    assert found.sizes.tolist() == [count_elements(part) for part in parts]
    boxes = [box for part in parts for box in overlaps(part, full_slice(one.layout.shape))]
    if boxes and one.layout.shape:
        rows = np.array([[box.there, box.size] for box in boxes])
        made = SliceArray.from_boxes(rows[:, 0], rows[:, 1])
        assert list(made) == [box_slice(box.there, box.size) for box in boxes]
        common = overlap_sizes(made, found.parts)
        assert (common.sum(0) == found.sizes).all()
        assert common.sum(1).tolist() == [math.prod(box.size) for box in boxes]


def dtype_of(number: int) -> torch.dtype:
    """Kinds of elements, of one to eight bytes."""
    return DTYPES[number % len(DTYPES)]


def lying(side: Side, world: int) -> dict[str, TensorLayout]:
    """Where the tensors of a side lie."""
    return {
        one.name: TensorLayout(one.sharding(side.mesh, side.ranks(), world), dtype_of(k).itemsize)
        for k, one in enumerate(side.holdings)
    }


def value(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Values that differ everywhere."""
    count = math.prod(shape)
    return (torch.arange(1, count + 1) * (number + 1) % 251).to(dtype_of(number)).view(shape)


def carried(a: Side, b: Side, world: int, bucket: int) -> Any:
    """Parts of known values carried on this rank; whether they are what they should be."""
    rank = comm.rank()

    def parts(side: Side, blank: bool) -> dict[str, torch.Tensor]:
        if rank not in side.ranks():
            return {}
        place = rank - side.first
        found = {}
        for k, one in enumerate(side.holdings):
            if one.is_held(side.mesh, place):
                whole = value(k, one.layout.shape)
                part = shard_of(whole, one, side.mesh, place)
                found[one.name] = torch.zeros_like(part) if blank else part
        return found

    found = find_route(group_by_layout(lying(a, world), lying(b, world)), world)
    source, target = parts(a, False), parts(b, True)
    group = comm.current_world().make_group([tuple(range(world))], "transfer")
    done = execute_route(found, rank, source.get, target.get, bucket, group, HOST)  # type: ignore[arg-type]
    wanted = parts(b, False)
    right = all(torch.equal(target[name], wanted[name]) for name in wanted)
    return right, done, found.sent[rank], found.received[rank], int(found.bytes.sum())


def fill(whole: torch.Tensor, one: Holding, mesh: Mesh, rank: int, value: bool) -> None:
    """Set each element that a rank holds, index by index."""
    index = [
        [i for run in runs for i in range(run.start, run.start + run.length) if i < size]
        for runs, size in zip(one.segments(mesh, rank), whole.shape)
    ]
    whole.numpy()[np.ix_(*index) if index else ()] = value


def fewest(a: Side, b: Side) -> int:
    """The bound, element by element, apart from all that the route uses."""
    total = 0
    for k, (one, other) in enumerate(zip(a.holdings, b.holdings)):
        for rank in b.ranks():
            place, at = rank - b.first, rank - a.first
            if not other.is_held(b.mesh, place):
                continue
            wanted = torch.zeros(one.layout.shape, dtype=torch.bool)
            fill(wanted, other, b.mesh, place, True)
            if rank in a.ranks() and one.is_held(a.mesh, at):
                fill(wanted, one, a.mesh, at, False)
            total += int(wanted.sum()) * dtype_of(k).itemsize
    return total


@settings(max_examples=40, deadline=None)
@given(case=cases(), bucket=st.sampled_from([16, 48, 256, 1 << 16]))
def test_between_drawn_layouts(case: tuple[Side, Side], bucket: int, threads: Threads) -> None:
    """Everything arrives to the last bit, in the fewest bytes, a few buckets at a time."""
    a, b = case
    world = max(a.ranks().stop, b.ranks().stop)
    found = threads.run(carried, world, a, b, world, bucket)
    bound = fewest(a, b)
    for right, done, sent, received, total in found:
        assert right
        assert (done.sent, done.received) == (sent, received)
        assert done.most <= 2 * MAX_IN_FLIGHT * bucket
        assert total == bound
    assert sum(done.sent for _, done, *_ in found) == bound


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_copies_share_the_sending(case: tuple[Side, Side]) -> None:
    """Of a single tensor no copy sends an element more than another that could have sent it."""
    a, b = case
    world = max(a.ranks().stop, b.ranks().stop)
    source, target = lying(a, world), lying(b, world)
    for name, one in source.items():
        found = find_route(group_by_layout({name: one}, {name: target[name]}), world)
        for holders in one.sharding.holders:
            sent = found.sent[holders] // one.itemsize
            assert len(sent) == 0 or sent.max() - sent.min() <= 1


def test_nested_copies_are_level() -> None:
    """What fewer ranks hold is dealt first, and what all hold fills up the others."""
    world, shape = 12, (1 << 12,)
    target = replicate_on(shape, range(8, 12), world)
    kinds = [
        LayoutPair((f"t{k}",), replicate_on(shape, range(count), world), target, 4)
        for k, count in enumerate((8, 2, 1, 4))
    ]
    sent = find_route(kinds, world).sent[:8]
    one = math.prod(shape) * 4 * 4  # bytes of a tensor for all four
    assert sent.sum() == 4 * one
    assert (sent[:2] == one).all() or sent[:4].max() <= one
    assert sent.max() == one  # the one that only rank 0 holds is the least of the largest


def test_alike_tensors_are_one_kind() -> None:
    """Rows of a route do not grow with layers."""
    mesh, world = Mesh((("dp", 4), ("tp", 2))), 8

    def side(layers: int, sliced: tuple[str, ...]) -> dict[str, TensorLayout]:
        layout = Layout.whole((8, 8)).split("tp", 0)
        return {
            f"{k}": TensorLayout(Holding(f"{k}", layout, sliced).sharding(mesh), 4)
            for k in range(layers)
        }

    rows = [
        len(find_route(group_by_layout(side(n, ("dp",)), side(n, ())), world).kind)
        for n in (1, 10, 100)
    ]
    assert len(set(rows)) == 1


def test_parts_that_nobody_holds() -> None:
    """Half of a tensor on no rank is no layout; nor are parts that overlap."""
    mesh = Mesh((("tp", 2),))
    split = Holding("t", Layout.whole((8,)).split("tp", 0)).sharding(mesh)
    target = replicate_on((8,), [0, 1, 2], 3)
    for of, gone in ((np.array([0, -1, -1]), True), (np.array([0, 1, 2]), False)):
        parts = SliceArray.from_slices((*split.parts, (((0, 2, 4),),)), 1)
        sharding = type(split)((8,), parts, of)
        with pytest.raises(UncoveredElements) as caught:
            find_route([LayoutPair(("t",), sharding, target, 4)], 3)
        assert caught.value.missing == gone


def test_a_rank_alone_sends_nothing() -> None:
    """The same layout on the same ranks."""
    for mesh, sliced in itertools.product(map(Mesh, MESHES), ((), ("dp",))):
        if sliced and "dp" not in mesh.sizes:
            continue
        one = TensorLayout(Holding("t", Layout.whole((9, 4)), sliced).sharding(mesh), 8)
        assert find_route(group_by_layout({"t": one}, {"t": one}), mesh.world).bytes.sum() == 0
