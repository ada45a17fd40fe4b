"""Ring attention: the order of keys and values, their transfers, and their gradients' way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from schedlang.runtime.comm import world
from schedlang.runtime.comm.collectives import Group, all_gather, count, exchanged, reduce_scatter
from schedlang.runtime.context_parallel.local_attention import Backward, Forward, Rules, Tokens
from schedlang.runtime.context_parallel.masks import Reach, Tags, wanted
from schedlang.runtime.context_parallel.token_layout import Layout, Runs, place_at

# ---- Tensors of a place's tokens in one memory, sent to the next rank or to all; counted.
# Kinds that listeners hear: "send" (one message of one rank), "all-to-all" (what one rank gives),
# "all-gather" and "reduce-scatter" (the whole tensor).


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
    return Moving(arriving, packet, world.both_ways(sent, wanted, group.pg))


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


# ---- Keys, values, and what is known of their tokens, as one packet that travels.


def packed(k: Tensor, v: Tensor, tags: Tags) -> Packet:
    """What other ranks need of this one's tokens."""
    sides = [t for t in tags if t is not None]
    return Packet.of([k, v, *sides], [2, 2, *[1] * len(sides)])


def unpacked(packet: Packet, tags: Tags, runs: Runs) -> tuple[Tensor, Tensor, Tokens]:
    """The other way; `tags` are this rank's own, as all ranks have the same ones."""
    k, v, *sides = packet.tensors
    rest = iter(sides)
    return k, v, Tokens(runs, Tags(*(None if t is None else next(rest) for t in tags)))


# ---- In which order the keys and values of all ranks pass by, and how their gradients get home.
# Gathered  all at once (Llama 3, 2024); gradients come back in one reduce-scatter
# Ring      one block after the other around the ring, the next sent while one is computed (Liu
#           et al.: Ring Attention, 2023); with two groups a ring of rings, the inner one inside a
#           node, with one transfer between nodes for each inner round (Sun et al.: BurstAttention,
#           2024; Gu et al.: LoongTrain, 2024)
#
# Both keep nothing but a rank's own keys and values for the backward, which moves them again.


Contribute = Callable[[int, Packet], Packet]
Offsets = tuple[int, ...]


class Rounds(Protocol):
    """How packets of keys and values come to this rank."""

    @property
    def layout(self) -> Layout:
        """Which tokens each place has."""

    def forward(self, own: Packet) -> Iterator[tuple[int, Packet]]:
        """Every place that may be seen from somewhere, with its packet; this rank's own first."""

    def backward(self, own: Packet, contribute: Contribute) -> Packet:
        """The sum over ranks of `contribute(place, packet)` for this rank's own packet."""


@dataclass(frozen=True)
class Gathered:
    """All packets at once."""

    group: Group
    layout: Layout

    def forward(self, own: Packet) -> Iterator[tuple[int, Packet]]:
        """As `Rounds`."""
        yield from enumerate(gathered(own, self.layout.counts, self.group))

    def backward(self, own: Packet, contribute: Contribute) -> Packet:
        """As `Rounds`."""
        packets = gathered(own, self.layout.counts, self.group)
        grads = [contribute(place, packet) for place, packet in enumerate(packets)]
        return scattered(grads, self.layout.counts, self.group)


@dataclass(frozen=True)
class Ring:
    """Rings in rings, the outermost group first; none: one rank by itself."""

    groups: tuple[Group, ...]
    layout: Layout
    reach: Reach

    @property
    def here(self) -> tuple[int, ...]:
        """This rank's number in each group."""
        return tuple(group.rank for group in self.groups)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many ranks each group has."""
        return tuple(group.size for group in self.groups)

    def origin(self, offsets: Offsets) -> int:
        """Whose packet is here after so many steps of each ring."""
        steps = (*offsets, *[0] * (len(self.groups) - len(offsets)))
        return place_at([rank - step for rank, step in zip(self.here, steps)], self.sizes)

    def last(self, prefix: Offsets) -> int:
        """The last step of the next ring that anybody needs, after the steps of the outer ones."""
        depth = len(prefix)
        steps = wanted(self.reach, self.layout, self.sizes)
        return max((o[depth] for o in steps if o[:depth] == prefix), default=0)

    # -- forward -----------------------------------------------------------------------------------

    def forward(self, own: Packet) -> Iterator[tuple[int, Packet]]:
        """As `Rounds`."""
        return self._around((), own)

    def _around(self, prefix: Offsets, packet: Packet) -> Iterator[tuple[int, Packet]]:
        if len(prefix) == len(self.groups):
            yield self.origin(prefix), packet
            return
        last = self.last(prefix)
        for step in range(last + 1):
            coming = self._next((*prefix, step), packet) if step < last else None
            yield from self._around((*prefix, step), packet)
            packet = coming.wait() if coming is not None else packet

    def _next(self, steps: Offsets, packet: Packet) -> Moving:
        """The packet that follows on the innermost of these rings."""
        depth = len(steps) - 1
        tokens = self.layout.counts[self.origin((*steps[:depth], steps[depth] + 1))]
        return shift(packet, tokens, self.groups[depth])

    # -- backward ----------------------------------------------------------------------------------

    def backward(self, own: Packet, contribute: Contribute) -> Packet:
        """As `Rounds`: gradients follow their packet around, one step behind it."""
        return self._back((), own, contribute)

    def _back(self, prefix: Offsets, packet: Packet, contribute: Contribute) -> Packet:
        depth = len(prefix)
        if depth == len(self.groups):
            return contribute(self.origin(prefix), packet)
        group, last = self.groups[depth], self.last(prefix)
        home: Packet | None = None  # what this rank itself has for the packet it began with
        arriving: Moving | None = None
        for step in range(last + 1):
            coming = self._next((*prefix, step), packet) if step < last else None
            part = self._back((*prefix, step), packet, contribute)
            if step == 0:
                home = part
            else:
                total = part if arriving is None else added(arriving.wait(), part)
                # the last one to see a packet sends its gradient straight home
                by = 1 if step < last else group.size - last
                next_ = self.origin((*prefix, step + 1 if step < last else 0))
                arriving = shift(total, self.layout.counts[next_], group, by)
            packet = coming.wait() if coming is not None else packet
        assert home is not None
        return home if arriving is None else added(arriving.wait(), home)


def added(arrived: Packet, part: Packet) -> Packet:
    """The sum of two packets, in the memory of the first."""
    for into, more in zip(arrived.flats, part.flats):
        into.add_(more)
    return arrived


# ---- Attention of this rank's queries to keys and values that come by in rounds, and its
# gradients.


class Call:
    """What a call of attention holds beside the tensors that autograd saves."""

    def __init__(self, rules: Rules, rounds: Rounds, runs: Runs) -> None:
        self.rules, self.rounds, self.runs = rules, rounds, runs


class Attention(torch.autograd.Function):
    """The result and the log-sum-exp for this rank's queries."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        rows: Tensor | None,
        call: Call,
        *given: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Meet the keys of all places, one after the other."""
        tags = Tags(*given)
        with torch._C.DisableTorchFunction():
            rules = replace(call.rules, slopes=slopes, rows=rows)
            state = Forward(rules, q, Tokens(call.runs, tags), v.shape[-1])
            for place, packet in call.rounds.forward(packed(k, v, tags)):
                state.add(*unpacked(packet, tags, call.rounds.layout.runs[place]))
            out = state.out.to(q.dtype)
        ctx.call = call
        # in the order of torch's own operator: what is kept of each is told apart by its number
        ctx.save_for_backward(k, q, v, slopes, rows, state.lse, out, *given)
        ctx.set_materialize_grads(False)
        return out, state.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        """Gradients of q, k, v, slopes and rows."""
        k, q, v, slopes, rows, lse, out, *given = ctx.saved_tensors
        call, tags = ctx.call, Tags(*given)
        with torch._C.DisableTorchFunction():
            grad = torch.zeros_like(out) if grad is None else grad
            inner = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            inner, plain = (inner, out) if grad_lse is None else (inner - grad_lse, None)
            rules = replace(call.rules, slopes=slopes, rows=rows)
            mine = Tokens(call.runs, tags)
            state = Backward(rules, q, mine, lse, grad.to(lse.dtype), inner, plain)

            def contribute(place: int, packet: Packet) -> Packet:
                return Packet.of(
                    state.add(*unpacked(packet, tags, call.rounds.layout.runs[place])), (2, 2)
                )

            dk, dv = call.rounds.backward(packed(k, v, tags), contribute).tensors
            ds, drows = (
                None if made is None else made.to(of.dtype)
                for made, of in ((state.slopes, slopes), (state.rows, rows))
            )
        none = (None,) * (1 + len(given))
        return (state.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), ds, drows, *none)
