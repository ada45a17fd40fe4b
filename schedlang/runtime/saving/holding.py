"""Which part of each tensor this rank holds, and how parts become whole tensors again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.mesh import Mesh
from schedlang.placement import Layout, Segment
from schedlang.runtime.storage.folder import gathered
from schedlang.runtime.summing.gradient import buckets


@dataclass(frozen=True)
class Holding:
    """Where the parts of one parameter lie.

    layout   its splits by `shard` and `pad`
    sliced   axes over which dim 0 of what `layout` leaves is cut once more (ZeRO)
    stages   places along `axis` (the pipeline's) that hold it; None: all
    """

    name: str
    layout: Layout
    sliced: tuple[str, ...] = ()
    axis: str | None = None
    stages: frozenset[int] | None = None

    def held(self, mesh: Mesh, rank: int) -> bool:
        """Does this rank hold a part?"""
        if self.stages is None or self.axis is None:
            return True
        return mesh.index(rank, self.axis) in self.stages

    def segments(self, mesh: Mesh, rank: int) -> tuple[tuple[Segment, ...], ...]:
        """For each dim the runs of the (padded) whole that this rank holds, in its own order."""
        return _segments(self.layout, self.sliced, mesh, rank)

    def primary(self, mesh: Mesh, rank: int) -> bool:
        """Is this the rank that speaks for its part, among those that hold the same?"""
        if not self.held(mesh, rank):
            return False
        here = mesh.coordinates(rank)
        splitting = {a for axis in (*self.layout.axes, *self.sliced) for a in mesh.fold(axis)}
        if self.axis is not None and self.stages is not None:
            if mesh.index(rank, self.axis) != min(self.stages):
                return False
            splitting |= set(mesh.fold(self.axis))
        if any(mesh.index_at(here, s.axis) % s.uneven.repeat for s in self.layout.splits):
            return False
        return all(place == 0 for axis, place in here.items() if axis not in splitting)

    def local_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The shape of this rank's part."""
        runs = self.segments(mesh, rank)
        return tuple(sum(run.length for run in dim) for dim in runs)


# all that the runs hang on are its arguments, values that never change; each step of a proof asks
# for those of every rank again.  Bounded: a mesh of thousands of ranks has as many parts
@lru_cache(maxsize=1 << 13)
def _segments(
    layout: Layout, sliced: tuple[str, ...], mesh: Mesh, rank: int
) -> tuple[tuple[Segment, ...], ...]:
    runs = layout.segments(mesh, mesh.coordinates(rank))
    if not sliced:
        return runs
    count, place = mesh.size(sliced), mesh.index(rank, sliced)
    length = sum(run.length for run in runs[0])
    chunk = -(-length // count)  # as torch.chunk, which fully_shard follows
    first, last = min(place * chunk, length), min((place + 1) * chunk, length)
    return (tuple(_window(runs[0], first, last)), *runs[1:])


def _window(runs: tuple[Segment, ...], first: int, last: int) -> Iterator[Segment]:
    """The part of a chain of runs between two local positions."""
    at = 0
    for run in runs:
        low, high = max(first, at), min(last, at + run.length)
        if low < high:
            yield Segment(run.start + low - at, high - low)
        at += run.length


@dataclass(frozen=True)
class Block:
    """One box of a part: where it lies in the local tensor and in the whole, and its size."""

    local: tuple[int, ...]
    whole: tuple[int, ...]
    size: tuple[int, ...]

    def of_local(self, tensor: Tensor) -> Tensor:
        """The view of this box in the local tensor."""
        return tensor[tuple(slice(o, o + n) for o, n in zip(self.local, self.size))]

    def of_whole(self, tensor: Tensor) -> Tensor:
        """The view of this box in the whole tensor."""
        return tensor[tuple(slice(o, o + n) for o, n in zip(self.whole, self.size))]


def blocks(segments: tuple[tuple[Segment, ...], ...], shape: tuple[int, ...]) -> Iterator[Block]:
    """The boxes of a part; what lies beyond the true shape (padding) is left out."""
    rows = []
    for runs, size in zip(segments, shape):
        at, cells = 0, []
        for run in runs:
            length = max(0, min(run.start + run.length, size) - run.start)
            if length:
                cells.append((at, run.start, length))
            at += run.length
        rows.append(cells)
    for cell in itertools.product(*rows):
        yield Block(*(tuple(c[k] for c in cell) for k in range(3)))


def take(whole: Tensor, holding: Holding, mesh: Mesh, rank: int) -> Tensor:
    """This rank's part of a whole tensor, a new tensor; padding is zero."""
    segments = holding.segments(mesh, rank)
    part = whole.new_zeros([sum(run.length for run in runs) for runs in segments])
    for block in blocks(segments, tuple(whole.shape)):
        block.of_local(part).copy_(block.of_whole(whole))
    return part


def put(part: Tensor, whole: Tensor, holding: Holding, mesh: Mesh, rank: int) -> None:
    """Write a rank's part into the whole."""
    for block in blocks(holding.segments(mesh, rank), tuple(whole.shape)):
        block.of_whole(whole).copy_(block.of_local(part))


def cleaned(part: Tensor, holding: Holding, mesh: Mesh, rank: int) -> Tensor:
    """A rank's part with zeros wherever it is padded."""
    if holding.layout.padded == holding.layout.shape:
        return part
    made = torch.zeros_like(part)
    for block in blocks(holding.segments(mesh, rank), holding.layout.shape):
        block.of_local(made).copy_(block.of_local(part))
    return made


def assemble(
    holdings: Mapping[str, Holding], local: Callable[[str], Tensor | None], mesh: Mesh, rank: int
) -> dict[str, Tensor]:
    """Whole tensors, on the CPU of every rank, from the parts that each rank has.

    A tensor of which no part exists anywhere is left out.  Every rank that speaks for parts sends
    them as flat buffers; the others know their order and shapes from the holdings.
    """
    if mesh.world == 1:
        return {n: _alone(h, t, mesh) for n, h in holdings.items() if (t := local(n)) is not None}
    speaks = [name for name, holding in holdings.items() if holding.primary(mesh, rank)]
    own = {name: part.detach() for name in speaks if (part := local(name)) is not None}
    whole: dict[str, Tensor] = {}
    told = gathered([(name, part.dtype) for name, part in own.items()], mesh.world)
    with torch._C.DisableTorchFunction():  # what is passed on is no part of any arithmetic
        for source, parts in enumerate(told):
            shapes = [holdings[name].local_shape(mesh, source) for name, _ in parts]
            sizes = [(math.prod(s) * kind.itemsize, kind) for s, (_, kind) in zip(shapes, parts)]
            for bucket in buckets(sizes):
                names = [parts[k][0] for k in bucket]
                sent = [own[name].reshape(-1).cpu() for name in names] if source == rank else None
                values = _sent(sent, [shapes[k] for k in bucket], parts[bucket[0]][1], source)
                for name, value in zip(names, values):
                    if name not in whole:
                        whole[name] = value.new_zeros(holdings[name].layout.shape)
                    put(value, whole[name], holdings[name], mesh, source)
    return {name: whole[name] for name in holdings if name in whole}


def _sent(
    parts: list[Tensor] | None, shapes: list[tuple[int, ...]], dtype: torch.dtype, source: int
) -> list[Tensor]:
    """What one rank sends in one message, on all ranks."""
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.cat(parts) if parts is not None else torch.empty(sum(sizes), dtype=dtype)
    assert flat.numel() == sum(sizes), "a part is not of the shape that its holding says"
    if flat.numel():
        dist.broadcast(flat, src=source)
    return [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes)]


def _alone(holding: Holding, part: Tensor, mesh: Mesh) -> Tensor:
    whole = torch.zeros(holding.layout.shape, dtype=part.dtype)
    put(part.detach().cpu(), whole, holding, mesh, 0)
    return whole
