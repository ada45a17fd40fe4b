"""Tensors of a place's tokens in one memory, sent to the next rank or to all; counted.

Kinds that listeners hear: "send" (one message of one rank), "all-to-all" (what one rank gives),
"all-gather" and "reduce-scatter" (the whole tensor).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.collectives import comm
from schedlang.runtime.collectives.collective import Group, all_gather, count, reduce_scatter
from schedlang.runtime.collectives.moving import exchanged

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Packet:
    """Tensors of some tokens, flat and side by side, one memory for each dtype.

    `shapes` are theirs, `dims` the dim of each that runs along the tokens, `lies` which of `flats`
    each is in; tensors of one dtype follow each other there, booleans as bytes.
    """

    flats: tuple[Tensor, ...]
    dtypes: tuple[torch.dtype, ...]  # of `flats`
    shapes: tuple[Shape, ...]
    dims: tuple[int, ...]
    lies: tuple[int, ...]

    @staticmethod
    def of(tensors: Sequence[Tensor], dims: Sequence[int]) -> Packet:
        """Copy tensors together."""
        kinds = list(dict.fromkeys(t.dtype for t in tensors))
        joined = [torch.cat([t.reshape(-1) for t in tensors if t.dtype == k]) for k in kinds]
        flats = tuple(f.view(torch.uint8) if f.dtype == torch.bool else f for f in joined)
        shapes, lies = (tuple(t.shape) for t in tensors), (kinds.index(t.dtype) for t in tensors)
        return Packet(flats, tuple(kinds), tuple(shapes), tuple(dims), tuple(lies))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Views of the tensors."""
        used = [0] * len(self.flats)
        found = []
        for shape, lies in zip(self.shapes, self.lies):
            size = _size(shape)
            part = self.flats[lies][used[lies] : used[lies] + size]
            found.append(part.view(self.dtypes[lies]).view(shape))
            used[lies] += size
        return tuple(found)

    def empty(self, tokens: int) -> Packet:
        """Memory for the same tensors of so many tokens."""
        shapes = tuple((*s[:d], tokens, *s[d + 1 :]) for s, d in zip(self.shapes, self.dims))
        sizes = [0] * len(self.flats)
        for shape, lies in zip(shapes, self.lies):
            sizes[lies] += _size(shape)
        flats = tuple(flat.new_empty(size) for flat, size in zip(self.flats, sizes))
        return replace(self, flats=flats, shapes=shapes)

    def padded(self, tokens: int) -> Packet:
        """The same tensors with zeros after their tokens, up to so many."""
        if all(s[d] == tokens for s, d in zip(self.shapes, self.dims)):
            return self
        return Packet.of(
            [_padded(t, d, tokens) for t, d in zip(self.tensors, self.dims)], self.dims
        )

    def first(self, tokens: int) -> Packet:
        """The same tensors without what comes after so many tokens."""
        if all(s[d] == tokens for s, d in zip(self.shapes, self.dims)):
            return self
        cut = [t.narrow(d, 0, tokens) for t, d in zip(self.tensors, self.dims)]
        return Packet.of(cut, self.dims)


def _size(shape: Shape) -> int:
    return int(torch.Size(shape).numel())


def _padded(tensor: Tensor, dim: int, tokens: int) -> Tensor:
    missing = (*tensor.shape[:dim], tokens - tensor.shape[dim], *tensor.shape[dim + 1 :])
    return torch.cat([tensor, tensor.new_zeros(missing)], dim)


@dataclass(frozen=True)
class Moving:
    """A packet on its way in, and the one on its way out, which is kept until it has left."""

    packet: Packet
    sent: Packet
    works: tuple[Any, ...]

    def wait(self) -> Packet:
        """What has arrived."""
        for work in self.works:
            work.wait()
        return self.packet


def shift(packet: Packet, tokens: int, group: Group, by: int = 1) -> Moving:
    """Send to the rank `by` places on, and receive so many tokens from the one `by` places before.

    Nothing is waited for, so what is computed next runs beside it.
    """
    arriving = packet.empty(tokens)
    to = group.ranks[(group.rank + by) % group.size]
    source = group.ranks[(group.rank - by) % group.size]
    for flat in packet.flats:
        count("send", group, flat)
    if group.pg is None:
        return Moving(arriving, packet, ())
    sent = [(flat, to) for flat in packet.flats]
    wanted = [(flat, source) for flat in arriving.flats]
    return Moving(arriving, packet, comm.both_ways(sent, wanted, group.pg))


def gathered(packet: Packet, counts: Sequence[int], group: Group) -> list[Packet]:
    """The packets of all ranks, which hold `counts` tokens."""
    if group.size == 1:
        return [packet]
    whole = packet.padded(max(counts))
    everyone = [all_gather(flat, 0, group).chunk(group.size) for flat in whole.flats]
    parts = [replace(whole, flats=tuple(flats)) for flats in zip(*everyone)]
    return [part.first(tokens) for part, tokens in zip(parts, counts)]


def scattered(packets: Sequence[Packet], counts: Sequence[int], group: Group) -> Packet:
    """This rank's packet of the sum over ranks of what each has for everybody."""
    if group.size == 1:
        return packets[0]
    padded = [packet.padded(max(counts)) for packet in packets]
    everyone = [torch.cat(flats) for flats in zip(*(p.flats for p in padded))]
    own = replace(padded[0], flats=tuple(reduce_scatter(f, 0, group) for f in everyone))
    return own.first(counts[group.rank])


def exchange(given: Sequence[Tensor], shapes: Sequence[Shape], group: Group) -> list[Tensor]:
    """All-to-all: `given[i]` goes to rank i, what comes from rank i has `shapes[i]`."""
    if group.size == 1:
        return list(given)
    flat = torch.cat([t.reshape(-1) for t in given])
    sizes = [_size(shape) for shape in shapes]
    arrived = torch.split(exchanged(flat, group, [t.numel() for t in given], sizes), sizes)
    return [part.view(shape) for part, shape in zip(arrived, shapes)]
