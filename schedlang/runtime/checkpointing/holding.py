"""Parts of tensors on this rank, and the way in which parts become whole tensors again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schedlang.ir.mesh import Mesh
from schedlang.ir.placement import Layout, Segment
from schedlang.runtime.comm import world
from schedlang.runtime.comm.ranks import Ranks
from schedlang.runtime.grad_reduction.gradient import buckets
from schedlang.runtime.redistribution.spread import NOWHERE, Array, Cell, Part, Spread


@dataclass(frozen=True)
class Holding:
    """The places of the parts of one parameter.

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
        """Return whether a rank holds a part."""
        if self.stages is None or self.axis is None:
            return True
        return mesh.index(rank, self.axis) in self.stages

    def segments(self, mesh: Mesh, rank: int) -> tuple[tuple[Segment, ...], ...]:
        """Return the runs of the (padded) whole, dim by dim, that this rank holds, in its own
        order."""
        return _segments(self.layout, self.sliced, mesh, rank)

    def primary(self, mesh: Mesh, rank: int) -> bool:
        """Return whether a rank speaks for its part, among those that hold the same."""
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

    def spread(self, mesh: Mesh, ranks: Sequence[int] = (), world: int = 0) -> Spread:
        """Return where parts lie in a job; `ranks`: which of its `world` ranks are the mesh's."""
        parts, of = _spread(self.layout, self.sliced, mesh)
        if self.stages is not None and self.axis is not None:
            place = mesh.index_at(_all_coordinates(mesh), self.axis)
            of = np.where(np.isin(place, list(self.stages)), of, NOWHERE)
        if len(ranks):
            everyone = np.full(world, NOWHERE, of.dtype)
            everyone[list(ranks)] = of
            of = everyone
        return Spread(self.layout.shape, parts, of)

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
    return (tuple(window(runs[0], first, last)), *runs[1:])


@lru_cache(maxsize=1 << 8)
def _spread(layout: Layout, sliced: tuple[str, ...], mesh: Mesh) -> tuple[tuple[Part, ...], Array]:
    """The distinct parts, and which of them each rank of the mesh holds: found by axes."""
    over = [*(split.axis for split in layout.splits), *((sliced,) if sliced else ())]
    coordinates = _all_coordinates(mesh)
    places: list[Any] = [np.zeros(mesh.world, np.int64)]
    places += [mesh.index_at(coordinates, one) for one in over]
    _, first, code = np.unique(np.stack(places), axis=1, return_index=True, return_inverse=True)
    numbers: dict[Part, int] = {}
    found = []
    for rank in first.tolist():
        segments = _segments(layout, sliced, mesh, rank)
        part = tuple(tuple(cells(runs, n)) for runs, n in zip(segments, layout.shape))
        found.append(numbers.setdefault(part, len(numbers)))
    return tuple(numbers), np.array(found, np.int32)[code.reshape(-1)]


def _all_coordinates(mesh: Mesh) -> dict[str, Any]:
    """Return where all ranks lie on each axis, as arrays."""
    sizes = tuple(mesh.sizes.values())
    found = np.unravel_index(np.arange(mesh.world), sizes) if sizes else ()
    return dict(zip(mesh.sizes, found))


def window(runs: tuple[Segment, ...], first: int, last: int) -> Iterator[Segment]:
    """Cut out the part of a chain of runs between two local positions."""
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


def cells(runs: tuple[Segment, ...], size: int) -> Iterator[Cell]:
    """The runs of one dim that are within its true size: in the part, in the whole, how long."""
    at = 0
    for run in runs:
        length = max(0, min(run.start + run.length, size) - run.start)
        if length:
            yield at, run.start, length
        at += run.length


def blocks(segments: tuple[tuple[Segment, ...], ...], shape: tuple[int, ...]) -> Iterator[Block]:
    """The boxes of a part; what lies beyond the true shape (padding) is left out."""
    rows = [list(cells(runs, size)) for runs, size in zip(segments, shape)]
    return box_blocks(rows)


def box_blocks(part: Sequence[Sequence[Cell]]) -> Iterator[Block]:
    """The boxes that the cells of each dim make up."""
    for cell in itertools.product(*part):
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
    holdings: Mapping[str, Holding], local: Callable[[str], Tensor | None], ranks: Ranks
) -> dict[str, Tensor]:
    """Whole tensors, on the CPU of every rank, from the parts that each rank has.

    A tensor of which no part exists anywhere is left out.  Some tensors at a time are laid out
    whole, with zeros for what other ranks speak for, and their bits are added up over the world:
    as many messages as the tensors need, however many ranks there are.
    """
    mesh, rank = ranks.mesh, ranks.rank
    if mesh.world == 1:
        return {n: _alone(h, t, mesh) for n, h in holdings.items() if (t := local(n)) is not None}
    speaks = [name for name, holding in holdings.items() if holding.primary(mesh, rank)]
    own = {name: part.detach() for name in speaks if (part := local(name)) is not None}
    told: dict[str, torch.dtype] = {}
    for one in world.distinct({name: part.dtype for name, part in own.items()}):
        told.update(one)
    names = [name for name in holdings if name in told]
    sizes = [(math.prod(holdings[n].layout.shape) * told[n].itemsize, None) for n in names]
    whole: dict[str, Tensor] = {}
    with torch._C.DisableTorchFunction():  # what is passed on is no part of any arithmetic
        for bucket in buckets(sizes):
            some = {names[k]: sizes[k][0] for k in bucket}
            flat = torch.zeros(sum(map(_words, some.values())), dtype=torch.int64)
            views = dict(zip(some, torch.split(flat, [_words(size) for size in some.values()])))
            made = {
                n: views[n].view(torch.uint8)[:size].view(told[n]).view(holdings[n].layout.shape)
                for n, size in some.items()
            }
            for name in some.keys() & own.keys():
                put(own[name].cpu(), made[name], holdings[name], mesh, rank)
            flat.copy_(_added(flat, ranks))
            whole.update(made if len(made) == 1 else {n: one.clone() for n, one in made.items()})
    return {name: whole[name] for name in names}


def _words(size: int) -> int:
    """Return the number of words of eight bytes that hold so many bytes."""
    return -(-size // 8)


def _added(flat: Tensor, ranks: Ranks) -> Tensor:
    """The sum over all ranks, of which one at most has bits that are not zero: those bits."""
    sent = flat.to(ranks.device)
    if sent.numel():
        world.all_reduce(sent, ranks.world.group)
    return sent.cpu()


def _alone(holding: Holding, part: Tensor, mesh: Mesh) -> Tensor:
    whole = torch.zeros(holding.layout.shape, dtype=part.dtype)
    put(part.detach().cpu(), whole, holding, mesh, 0)
    return whole
