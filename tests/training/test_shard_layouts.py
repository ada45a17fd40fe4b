"""Shards of random layouts: they are disjoint, cover the tensor, and join to it again."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.ir.mesh import Mesh
from schedlang.ir.placement import EVEN, Layout, Uneven
from schedlang.runtime.checkpointing.holdings import Holding, shard_of, write_shard

MESHES = [Mesh((("a", 2), ("b", 3))), Mesh((("a", 2), ("b", 2), ("c", 2))), Mesh((("b", 3),))]


@st.composite
def random_layouts(draw: st.DrawFn) -> tuple[Mesh, Layout]:
    """Draw a mesh and a layout of blocks, padded or repeated so that the axes divide them."""
    mesh = draw(st.sampled_from(MESHES))
    axes = draw(st.lists(st.sampled_from(list(mesh.sizes)), unique=True))
    dims = [draw(st.integers(0, 1)) for _ in axes]
    sizes, unevens = [], []
    for dim in range(2):
        ranks = [mesh.size(axis) for axis, split_dim in zip(axes, dims) if split_dim == dim]
        heads = draw(st.integers(1, 5))
        repeat = draw(st.sampled_from([1, *ranks[:1]]))
        parts = math.prod(ranks) // repeat
        padded_heads = -(-heads // parts) * parts
        heads = padded_heads if repeat > 1 else heads
        sizes.append([heads * width for width in draw(st.lists(st.integers(1, 3), min_size=1))])
        unevens.append(Uneven(Fraction(padded_heads * repeat, heads), repeat))
    layout = Layout.whole([sum(blocks) for blocks in sizes])
    for axis, dim in zip(axes, dims):
        is_first = all(split.dim != dim for split in layout.splits)
        layout = layout.split(axis, dim, sizes[dim], unevens[dim] if is_first else EVEN)
    return mesh, layout


@settings(deadline=None)
@given(random_layouts())
def test_parts_are_disjoint_and_cover(case: tuple[Mesh, Layout]) -> None:
    """Every element is on as many ranks as unused axes and repeats of its split give."""
    mesh, layout = case
    counts = torch.zeros(layout.padded, dtype=torch.int64)
    for rank in range(mesh.world):
        rows, columns = (
            torch.cat(
                [torch.arange(segment.start, segment.start + segment.length) for segment in runs]
            )
            for runs in layout.segments(mesh, mesh.coordinates(rank))
        )
        assert (len(rows), len(columns)) == layout.local_shape(mesh)
        assert len(set(rows.tolist())) == len(rows) and len(set(columns.tolist())) == len(columns)
        counts[rows[:, None], columns[None]] += 1
    repeats = math.prod(split.uneven.repeat for split in layout.splits)
    assert (counts == repeats * mesh.world // mesh.size(layout.axes)).all()


@settings(deadline=None)
@given(random_layouts(), st.data())
def test_what_is_taken_apart_comes_together(case: tuple[Mesh, Layout], data: st.DataObject) -> None:
    """The shards of all primary ranks join to the full tensor, sliced or not; padding is zero."""
    mesh, layout = case
    free = [axis for axis in mesh.sizes if axis not in layout.axes]
    sliced = tuple(data.draw(st.lists(st.sampled_from(free), unique=True)) if free else ())
    holding = Holding("w", layout, sliced)
    full = torch.arange(1, 1 + layout.shape[0] * layout.shape[1]).view(layout.shape).double()
    joined = torch.zeros_like(full)
    written = 0
    for rank in range(mesh.world):
        part = shard_of(full, holding, mesh, rank)
        assert tuple(part.shape) == holding.local_shape(mesh, rank)
        if holding.is_primary(mesh, rank):
            written += int((part != 0).sum())
            write_shard(part, joined, holding, mesh, rank)
    assert torch.equal(joined, full)
    assert written == full.numel(), "each element has one speaker"


@given(st.integers(1, 20), st.integers(1, 4))
def test_slices_are_those_of_torch_chunk(rows: int, count: int) -> None:
    """FSDP slices dim 0 as torch.chunk does: the last slices may be short, or empty; with fewer
    rows than ranks, which divide the columns, it slices dim 1."""
    mesh = Mesh((("dp", count),))
    full = torch.arange(rows * 2).view(rows, 2)
    chunks = list(full.chunk(count, 1 if rows < count == 2 else 0))
    chunks += [full[:0]] * (count - len(chunks))
    holding = Holding("w", Layout.whole(full.shape), ("dp",))
    for rank in range(count):
        assert torch.equal(shard_of(full, holding, mesh, rank), chunks[rank])
