"""Transfer routes between random layouts: complete, without repetition, balanced, in bounded
buckets."""

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
    """A mesh on some ranks of a job, and the layouts of tensors on it."""

    mesh: Mesh
    first: int
    holdings: tuple[Holding, ...]

    def ranks(self) -> range:
        """Return its ranks in the job."""
        return range(self.first, self.first + self.mesh.world)


SHAPES = [(12, 24), (24, 12), (7, 24), (24,), (5,), (), (4, 6, 5), (1, 24), (0, 3)]


@st.composite
def sides(draw: st.DrawFn, shapes: tuple[tuple[int, ...], ...]) -> Side:
    """Draw splits with blocks and padding, slices, stages."""
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
    """The sharding of all ranks equals what each rank computes; each part is listed once, with its
    boxes."""
    (holding,) = side.holdings
    sharding = holding.sharding(side.mesh)
    for rank in range(side.mesh.world):
        is_held = holding.is_held(side.mesh, rank)
        assert (sharding.part_of_rank[rank] != NOWHERE) == is_held
        if is_held:
            assert sharding.parts[int(sharding.part_of_rank[rank])] == holding.part(side.mesh, rank)
    parts = list(sharding.parts)
    assert len(set(parts)) == len(parts)
    assert list(SliceArray.from_slices(parts, len(holding.layout.shape))) == parts
    assert sharding.sizes.tolist() == [count_elements(part) for part in parts]
    boxes = [box for part in parts for box in overlaps(part, full_slice(holding.layout.shape))]
    if boxes and holding.layout.shape:
        rows = np.array([[box.there, box.size] for box in boxes])
        slices = SliceArray.from_boxes(rows[:, 0], rows[:, 1])
        assert list(slices) == [box_slice(box.there, box.size) for box in boxes]
        overlap = overlap_sizes(slices, sharding.parts)
        assert (overlap.sum(0) == sharding.sizes).all()
        assert overlap.sum(1).tolist() == [math.prod(box.size) for box in boxes]


def dtype_at(number: int) -> torch.dtype:
    """Return a dtype, of one to eight bytes."""
    return DTYPES[number % len(DTYPES)]


def layouts_of(side: Side, world: int) -> dict[str, TensorLayout]:
    """Return the layouts of a side's tensors."""
    return {
        holding.name: TensorLayout(
            holding.sharding(side.mesh, side.ranks(), world), dtype_at(k).itemsize
        )
        for k, holding in enumerate(side.holdings)
    }


def values_of(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return values that are all different."""
    count = math.prod(shape)
    return (torch.arange(1, count + 1) * (number + 1) % 251).to(dtype_at(number)).view(shape)


def carry_parts(a: Side, b: Side, world: int, bucket: int) -> Any:
    """Transfer parts of known values on this rank: return whether they are right, and
    statistics."""
    rank = comm.rank()

    def parts(side: Side, blank: bool) -> dict[str, torch.Tensor]:
        if rank not in side.ranks():
            return {}
        side_rank = rank - side.first
        tensors = {}
        for k, holding in enumerate(side.holdings):
            if holding.is_held(side.mesh, side_rank):
                full = values_of(k, holding.layout.shape)
                part = shard_of(full, holding, side.mesh, side_rank)
                tensors[holding.name] = torch.zeros_like(part) if blank else part
        return tensors

    route = find_route(group_by_layout(layouts_of(a, world), layouts_of(b, world)), world)
    source, target = parts(a, False), parts(b, True)
    group = comm.current_world().make_group([tuple(range(world))], "transfer")
    stats = execute_route(route, rank, source.get, target.get, bucket, group, HOST)  # type: ignore[arg-type]
    expected = parts(b, False)
    is_equal = all(torch.equal(target[name], expected[name]) for name in expected)
    return is_equal, stats, route.sent[rank], route.received[rank], int(route.bytes.sum())


def fill_held(full: torch.Tensor, holding: Holding, mesh: Mesh, rank: int, value: bool) -> None:
    """Set each element that a rank has, index by index."""
    index = [
        [
            i
            for segment in runs
            for i in range(segment.start, segment.start + segment.length)
            if i < size
        ]
        for runs, size in zip(holding.segments(mesh, rank), full.shape)
    ]
    full.numpy()[np.ix_(*index) if index else ()] = value


def fewest_bytes(a: Side, b: Side) -> int:
    """Return the bound, element by element, independent of the route's code."""
    total = 0
    for k, (source, target) in enumerate(zip(a.holdings, b.holdings)):
        for rank in b.ranks():
            target_rank, source_rank = rank - b.first, rank - a.first
            if not target.is_held(b.mesh, target_rank):
                continue
            lacking = torch.zeros(source.layout.shape, dtype=torch.bool)
            fill_held(lacking, target, b.mesh, target_rank, True)
            if rank in a.ranks() and source.is_held(a.mesh, source_rank):
                fill_held(lacking, source, a.mesh, source_rank, False)
            total += int(lacking.sum()) * dtype_at(k).itemsize
    return total


@settings(max_examples=40, deadline=None)
@given(case=cases(), bucket=st.sampled_from([16, 48, 256, 1 << 16]))
def test_between_drawn_layouts(case: tuple[Side, Side], bucket: int, threads: Threads) -> None:
    """Everything arrives to the last bit, in the fewest bytes, a few buckets at a time."""
    a, b = case
    world = max(a.ranks().stop, b.ranks().stop)
    results = threads.run(carry_parts, world, a, b, world, bucket)
    bound = fewest_bytes(a, b)
    for is_equal, stats, sent, received, total in results:
        assert is_equal
        assert (stats.sent, stats.received) == (sent, received)
        assert stats.most <= 2 * MAX_IN_FLIGHT * bucket
        assert total == bound
    assert sum(stats.sent for _, stats, *_ in results) == bound


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_copies_share_the_sending(case: tuple[Side, Side]) -> None:
    """No copy of a tensor sends more elements than another that could send them."""
    a, b = case
    world = max(a.ranks().stop, b.ranks().stop)
    source, target = layouts_of(a, world), layouts_of(b, world)
    for name, layout in source.items():
        route = find_route(group_by_layout({name: layout}, {name: target[name]}), world)
        for holders in layout.sharding.holders:
            sent = route.sent[holders] // layout.itemsize
            assert len(sent) == 0 or sent.max() - sent.min() <= 1


def test_nested_copies_are_level() -> None:
    """Parts with few holders are assigned first, and those with many balance the load."""
    world, shape = 12, (1 << 12,)
    target = replicate_on(shape, range(8, 12), world)
    kinds = [
        LayoutPair((f"t{k}",), replicate_on(shape, range(count), world), target, 4)
        for k, count in enumerate((8, 2, 1, 4))
    ]
    sent = find_route(kinds, world).sent[:8]
    tensor_bytes = math.prod(shape) * 4 * 4  # bytes of a tensor for all four
    assert sent.sum() == 4 * tensor_bytes
    assert (sent[:2] == tensor_bytes).all() or sent[:4].max() <= tensor_bytes
    assert sent.max() == tensor_bytes  # rank 0 alone has one tensor: a lower bound of the largest


def test_alike_tensors_are_one_kind() -> None:
    """Rows of a route do not grow with the number of layers."""
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
    for part_of_rank, is_missing in ((np.array([0, -1, -1]), True), (np.array([0, 1, 2]), False)):
        parts = SliceArray.from_slices((*split.parts, (((0, 2, 4),),)), 1)
        sharding = type(split)((8,), parts, part_of_rank)
        with pytest.raises(UncoveredElements) as caught:
            find_route([LayoutPair(("t",), sharding, target, 4)], 3)
        assert caught.value.missing == is_missing


def test_a_rank_alone_sends_nothing() -> None:
    """The same layout on the same ranks."""
    for mesh, sliced in itertools.product(map(Mesh, MESHES), ((), ("dp",))):
        if sliced and "dp" not in mesh.sizes:
            continue
        layout = TensorLayout(Holding("t", Layout.whole((9, 4)), sliced).sharding(mesh), 8)
        assert (
            find_route(group_by_layout({"t": layout}, {"t": layout}), mesh.world).bytes.sum() == 0
        )
