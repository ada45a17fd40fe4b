"""Attention over keys and values of all ranks: the transfers, their order, and the gradients.

`RingAttention` is the autograd function; `GatheredKeys`, `NestedRing` and `TeamRing` are the
orders of transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from schedlang.runtime.comm import world
from schedlang.runtime.comm.collectives import (
    Group,
    all_gather,
    all_to_all_rows,
    count,
    reduce_scatter,
)
from schedlang.runtime.context_parallel.local_attention import (
    BlockRules,
    BlockwiseBackward,
    BlockwiseForward,
    PlacedTokens,
    accumulation_dtype,
)
from schedlang.runtime.context_parallel.token_layout import (
    PositionMask,
    Runs,
    SequenceLayout,
    TokenTags,
    needed_steps,
    place_at,
)

# -- packets of tensors, and their transfers ------------------------------------------------------
# Counted as "send" (one message of one rank), "all-to-all" (what one rank sends), "all-gather" and
# "reduce-scatter" (the full tensor).


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Packet:
    """Tensors of some tokens, flattened and concatenated into one tensor for each dtype.

    flats           one flat tensor for each dtype; booleans as bytes
    dtypes          the dtypes of `flats`
    shapes          the shapes of the tensors
    dims            the dim of tokens of each tensor
    flat_of_tensor  the index in `flats` of each tensor
    """

    flats: tuple[Tensor, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[Shape, ...]
    dims: tuple[int, ...]
    flat_of_tensor: tuple[int, ...]

    @staticmethod
    def pack(tensors: Sequence[Tensor], dims: Sequence[int]) -> Packet:
        """Pack copies of tensors; `dims` are their dims of tokens."""
        dtypes = list(dict.fromkeys(t.dtype for t in tensors))
        joined = [torch.cat([t.reshape(-1) for t in tensors if t.dtype == k]) for k in dtypes]
        flats = tuple(f.view(torch.uint8) if f.dtype == torch.bool else f for f in joined)
        shapes = (tuple(t.shape) for t in tensors)
        indices = (dtypes.index(t.dtype) for t in tensors)
        return Packet(flats, tuple(dtypes), tuple(shapes), tuple(dims), tuple(indices))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Views of the packed tensors."""
        used = [0] * len(self.flats)
        tensors = []
        for shape, index in zip(self.shapes, self.flat_of_tensor):
            size = _size(shape)
            part = self.flats[index][used[index] : used[index] + size]
            tensors.append(part.view(self.dtypes[index]).view(shape))
            used[index] += size
        return tuple(tensors)

    def empty(self, tokens: int) -> Packet:
        """Allocate a packet of the same tensors for `tokens` tokens."""
        shapes = tuple((*s[:d], tokens, *s[d + 1 :]) for s, d in zip(self.shapes, self.dims))
        sizes = [0] * len(self.flats)
        for shape, index in zip(shapes, self.flat_of_tensor):
            sizes[index] += _size(shape)
        flats = tuple(flat.new_empty(size) for flat, size in zip(self.flats, sizes))
        return replace(self, flats=flats, shapes=shapes)

    def padded(self, tokens: int) -> Packet:
        """Return the packet with its tensors padded with zeros to `tokens` tokens."""
        if all(s[d] == tokens for s, d in zip(self.shapes, self.dims)):
            return self
        return Packet.pack(
            [_pad_tokens(t, d, tokens) for t, d in zip(self.tensors, self.dims)], self.dims
        )

    def truncated(self, tokens: int) -> Packet:
        """Return the packet of the first `tokens` tokens."""
        if all(s[d] == tokens for s, d in zip(self.shapes, self.dims)):
            return self
        kept = [t.narrow(d, 0, tokens) for t, d in zip(self.tensors, self.dims)]
        return Packet.pack(kept, self.dims)


def _size(shape: Shape) -> int:
    return int(torch.Size(shape).numel())


def _pad_tokens(tensor: Tensor, dim: int, tokens: int) -> Tensor:
    missing = (*tensor.shape[:dim], tokens - tensor.shape[dim], *tensor.shape[dim + 1 :])
    return torch.cat([tensor, tensor.new_zeros(missing)], dim)


@dataclass(frozen=True)
class PendingPacket:
    """A packet that is being received, and the packet that is being sent, which must stay alive."""

    packet: Packet
    sent: Packet
    works: tuple[Any, ...]

    def wait(self) -> Packet:
        """Wait for the packet, and return it."""
        for request in self.works:
            request.wait()
        return self.packet


def start_shift(packet: Packet, tokens: int, group: Group, distance: int = 1) -> PendingPacket:
    """Send to the rank `distance` places after, and receive `tokens` tokens from the rank
    `distance` before.

    Does not wait, so that the transfer overlaps with later computation.
    """
    arriving = packet.empty(tokens)
    target = group.ranks[(group.rank + distance) % group.size]
    source = group.ranks[(group.rank - distance) % group.size]
    for flat in packet.flats:
        count("send", group, flat)
    if group.pg is None:
        return PendingPacket(arriving, packet, ())
    sent = [(flat, target) for flat in packet.flats]
    received = [(flat, source) for flat in arriving.flats]
    return PendingPacket(arriving, packet, world.batch_isend_irecv(sent, received, group.pg))


def all_gather_packets(packet: Packet, counts: Sequence[int], group: Group) -> list[Packet]:
    """All-gather the packets of all ranks; `counts` are their numbers of tokens."""
    if group.size == 1:
        return [packet]
    padded = packet.padded(max(counts))
    gathered = [all_gather(flat, 0, group).chunk(group.size) for flat in padded.flats]
    parts = [replace(padded, flats=tuple(flats)) for flats in zip(*gathered)]
    return [part.truncated(tokens) for part, tokens in zip(parts, counts)]


def reduce_scatter_packets(
    packets: Sequence[Packet], counts: Sequence[int], group: Group
) -> Packet:
    """Reduce-scatter packets: return the sum over the ranks of their packets for this rank.

    `packets[i]` is for rank i, and has `counts[i]` tokens.
    """
    if group.size == 1:
        return packets[0]
    padded = [packet.padded(max(counts)) for packet in packets]
    joined = [torch.cat(flats) for flats in zip(*(p.flats for p in padded))]
    reduced = replace(padded[0], flats=tuple(reduce_scatter(f, 0, group) for f in joined))
    return reduced.truncated(counts[group.rank])


def exchange_tensors(
    tensors: Sequence[Tensor], shapes: Sequence[Shape], group: Group
) -> list[Tensor]:
    """Run an all-to-all: `given[i]` goes to rank i; the tensor from rank i has `shapes[i]`."""
    if group.size == 1:
        return list(tensors)
    flat = torch.cat([t.reshape(-1) for t in tensors])
    sizes = [_size(shape) for shape in shapes]
    arrived = torch.split(all_to_all_rows(flat, group, [t.numel() for t in tensors], sizes), sizes)
    return [part.view(shape) for part, shape in zip(arrived, shapes)]


# -- keys, values and tags as one packet ----------------------------------------------------------


def pack_keys(k: Tensor, v: Tensor, tags: TokenTags) -> Packet:
    """Pack the keys, values and tags of this rank's tokens for other ranks."""
    sides = [t for t in tags if t is not None]
    return Packet.pack([k, v, *sides], [2, 2, *[1] * len(sides)])


def unpack_keys(packet: Packet, tags: TokenTags, runs: Runs) -> tuple[Tensor, Tensor, PlacedTokens]:
    """Unpack keys, values and tags; `tags` shows which tags exist, equally on all ranks."""
    k, v, *sides = packet.tensors
    taken = iter(sides)
    return k, v, PlacedTokens(runs, TokenTags(*(None if t is None else next(taken) for t in tags)))


# -- orders in which keys and values reach a rank, and the return of their gradients --------------
# Gathered  all at once (Llama 3, 2024); gradients return in one reduce-scatter
# Ring      one block after the other around the ring; the next is sent while one is computed (Liu
#           et al.: Ring Attention, 2023); with two groups a ring of rings, the inner one inside a
#           node, with one transfer between nodes for each inner round (Sun et al.: BurstAttention,
#           2024; Gu et al.: LoongTrain, 2024)
# Bodies    teams of ranks share their queries, and the steps of a ring of teams
#
# Only a rank's own tokens are saved for backward, which transfers them again.


Contribute = Callable[[int, Packet], Packet]
Offsets = tuple[int, ...]


@dataclass(frozen=True)
class Team:
    """Ranks that share their queries and their keys; `counts` are their numbers of tokens."""

    group: Group
    counts: tuple[int, ...]

    def all_gather(self, local: Packet) -> Packet:
        """All-gather the team's tokens into one packet."""
        parts = all_gather_packets(local, self.counts, self.group)
        columns = zip(*(part.tensors for part in parts))
        return Packet.pack([torch.cat(c, d) for c, d in zip(columns, local.dims)], local.dims)

    def reduce_scatter(self, full: Packet) -> Packet:
        """Reduce-scatter a packet of the team's tokens: return this rank's tokens of the sum."""
        pieces = [torch.split(t, list(self.counts), d) for t, d in zip(full.tensors, full.dims)]
        parts = [Packet.pack(tensors, full.dims) for tensors in zip(*pieces)]
        return reduce_scatter_packets(parts, self.counts, self.group)

    def combine_results(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Combine the ranks' results for their shares of the keys; return this rank's tokens.

        `out` and `lse` are this rank's results for all queries of the team.
        """
        size = self.group.size
        packets = all_gather_packets(Packet.pack([lse], [2]), [lse.shape[2]] * size, self.group)
        lse_of_ranks = torch.stack([packet.tensors[0] for packet in packets])
        full_lse = lse_of_ranks.logsumexp(0)
        weighted = out * softmax_shares(lse_of_ranks)[self.group.rank][..., None]
        (reduced,) = self.reduce_scatter(Packet.pack([weighted], [2])).tensors
        start = sum(self.counts[: self.group.rank])
        return reduced, full_lse[:, :, start : start + reduced.shape[2]].contiguous()


def softmax_shares(lse: Tensor) -> Tensor:
    """Return each rank's share of the softmax from its log-sum-exp (dim 0: ranks).

    The shares are 0 for a query that sees no key on any rank.  They add up to 1 for scores of any
    size; exp(lse - logsumexp) would be rounded relative to the size of lse.
    """
    return lse.softmax(0).nan_to_num(0.0)


class KeyTransfers(Protocol):
    """The order in which packets of keys and values reach this rank."""

    @property
    def layout(self) -> SequenceLayout:
        """The layout of tokens over packets, by each packet's place of origin."""

    @property
    def team(self) -> Team | None:
        """The ranks that share queries, and whose keys are one packet; None: only this rank."""

    def forward(self, local: Packet) -> Iterator[tuple[int, Packet]]:
        """Yield each place that a rank may see, with its packet; this rank's own place first."""

    def backward(self, local: Packet, contribute: Contribute) -> Packet:
        """Return the sum over the ranks of `contribute(place, packet)` for this rank's packet."""


@dataclass(frozen=True)
class GatheredKeys:
    """All packets at once, by an all-gather."""

    group: Group
    layout: SequenceLayout
    team = None

    def forward(self, local: Packet) -> Iterator[tuple[int, Packet]]:
        """Yield packets as `KeyTransfers` does."""
        yield from enumerate(all_gather_packets(local, self.layout.counts, self.group))

    def backward(self, local: Packet, contribute: Contribute) -> Packet:
        """Sum contributions as `KeyTransfers` does."""
        packets = all_gather_packets(local, self.layout.counts, self.group)
        grads = [contribute(rank, packet) for rank, packet in enumerate(packets)]
        return reduce_scatter_packets(grads, self.layout.counts, self.group)


@dataclass(frozen=True)
class NestedRing:
    """Nested rings, the outermost group first; without groups a single rank."""

    groups: tuple[Group, ...]
    layout: SequenceLayout
    reach: PositionMask
    team = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """This rank's number in each group."""
        return tuple(group.rank for group in self.groups)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of ranks of each group."""
        return tuple(group.size for group in self.groups)

    def origin(self, offsets: Offsets) -> int:
        """Return the place whose packet this rank has after `offsets` steps of the rings."""
        steps = (*offsets, *[0] * (len(self.groups) - len(offsets)))
        return place_at([rank - step for rank, step in zip(self.ranks, steps)], self.sizes)

    def last_step(self, prefix: Offsets) -> int:
        """Return the last needed step of the next ring, after `prefix` steps of the outer rings."""
        depth = len(prefix)
        steps = needed_steps(self.reach, self.layout, self.sizes)
        return max((o[depth] for o in steps if o[:depth] == prefix), default=0)

    # -- forward -----------------------------------------------------------------------------------

    def forward(self, local: Packet) -> Iterator[tuple[int, Packet]]:
        """Yield packets as `KeyTransfers` does."""
        return self._around((), local)

    def _around(self, prefix: Offsets, packet: Packet) -> Iterator[tuple[int, Packet]]:
        if len(prefix) == len(self.groups):
            yield self.origin(prefix), packet
            return
        last = self.last_step(prefix)
        for step in range(last + 1):
            coming = self._next((*prefix, step), packet) if step < last else None
            yield from self._around((*prefix, step), packet)
            packet = coming.wait() if coming is not None else packet

    def _next(self, steps: Offsets, packet: Packet) -> PendingPacket:
        """Start the transfer of the next packet on the innermost ring of `steps`."""
        depth = len(steps) - 1
        tokens = self.layout.counts[self.origin((*steps[:depth], steps[depth] + 1))]
        return start_shift(packet, tokens, self.groups[depth])

    # -- backward ----------------------------------------------------------------------------------

    def backward(self, local: Packet, contribute: Contribute) -> Packet:
        """Sum contributions as `KeyTransfers` does: they follow their packet, one step behind
        it."""
        return self._back((), local, contribute)

    def _back(self, prefix: Offsets, packet: Packet, contribute: Contribute) -> Packet:
        depth = len(prefix)
        if depth == len(self.groups):
            return contribute(self.origin(prefix), packet)
        group, last = self.groups[depth], self.last_step(prefix)
        own_part: Packet | None = None  # this rank's contribution to its own packet
        arriving: PendingPacket | None = None
        for step in range(last + 1):
            pending = self._next((*prefix, step), packet) if step < last else None
            part = self._back((*prefix, step), packet, contribute)
            if step == 0:
                own_part = part
            else:
                total = part if arriving is None else add_packet(arriving.wait(), part)
                # the last rank that has a packet sends its gradient directly to the origin
                distance = 1 if step < last else group.size - last
                next_ = self.origin((*prefix, step + 1 if step < last else 0))
                arriving = start_shift(total, self.layout.counts[next_], group, distance)
            packet = pending.wait() if pending is not None else packet
        assert own_part is not None
        return own_part if arriving is None else add_packet(arriving.wait(), own_part)


def add_packet(arrived: Packet, part: Packet) -> Packet:
    """Add a packet to `arrived` in place, and return the sum."""
    for target, addend in zip(arrived.flats, part.flats):
        target.add_(addend)
    return arrived


@dataclass(frozen=True)
class TeamRing:
    """A ring of teams: attention as an n-body problem.

    The ranks of a team gather their tokens, and each rank attends to the keys of a share of the
    teams.  Blocks are larger, steps fewer, and the traffic around the ring is divided by the size
    of a team (WallFacer, 2024; Driscoll et al.: A communication-optimal n-body algorithm, IPDPS
    2013).  `ranks` has a place for every rank; the ranks of a team are consecutive.
    """

    ring: Group
    members: Group
    ranks: SequenceLayout

    @cached_property
    def layout(self) -> SequenceLayout:
        """The layout with a place for every team: the tokens of its ranks, rank after rank."""
        size, runs = self.members.size, self.ranks.runs
        return SequenceLayout(tuple(sum(runs[i : i + size], ()) for i in range(0, len(runs), size)))

    @property
    def team(self) -> Team | None:
        """The team, as of `KeyTransfers`."""
        size = self.members.size
        start = self.ring.rank * size
        return Team(self.members, self.ranks.counts[start : start + size]) if size > 1 else None

    @property
    def share(self) -> range:
        """The steps of the ring that this rank of the team does."""
        steps = -(-self.ring.size // self.members.size)
        return range(self.ring.size)[self.members.rank * steps : (self.members.rank + 1) * steps]

    def origin(self, step: int) -> int:
        """Return the team whose packet this rank has after `step` steps."""
        return (self.ring.rank - step) % self.ring.size

    def forward(self, local: Packet) -> Iterator[tuple[int, Packet]]:
        """Yield the packets of this rank's share of the teams."""
        packet = self._first(local)
        for step in self.share:
            pending = self._next(step, packet)
            yield self.origin(step), packet
            packet = packet if pending is None else pending.wait()

    def backward(self, local: Packet, contribute: Contribute) -> Packet:
        """Sum contributions as `KeyTransfers` does, over the ranks whose share includes this
        team."""
        packet, arriving = self._first(local), None
        for step in self.share:
            pending = self._next(step, packet)
            part = contribute(self.origin(step), packet)
            total = part if arriving is None else add_packet(arriving.wait(), part)
            last = step == self.share[-1]
            distance, after = (self.ring.size - step, 0) if last else (1, step + 1)
            arriving = self._shift(total, after, distance % self.ring.size)
            packet = packet if pending is None else pending.wait()
        if arriving is None:  # this rank has no steps
            zeros = [
                torch.zeros_like(t, dtype=accumulation_dtype(t.dtype)) for t in local.tensors[:2]
            ]
            return Packet.pack(zeros, (2, 2))
        return arriving.wait()

    def _first(self, local: Packet) -> Packet:
        """Receive the first packet of this rank's share, which skips the steps of other shares."""
        start = self.share.start if self.share else 0
        return self._shift(local, start, start).wait()

    def _next(self, step: int, packet: Packet) -> PendingPacket | None:
        return None if step == self.share[-1] else self._shift(packet, step + 1, 1)

    def _shift(self, packet: Packet, step: int, distance: int) -> PendingPacket:
        """Send a packet `distance` teams on, and receive the packet of step `step`."""
        if distance == 0:
            return PendingPacket(packet, packet, ())
        return start_shift(packet, self.layout.counts[self.origin(step)], self.ring, distance)


# -- attention of this rank's queries to keys and values in rounds --------------------------------


@dataclass(frozen=True)
class RingCall:
    """The parts of a call of attention that are not tensors saved by autograd.

    `runs` are the positions of the queries: of the team's, if there is a team.
    """

    rules: BlockRules
    rounds: KeyTransfers
    runs: Runs

    def first_packet(self, k: Tensor, v: Tensor, tags: TokenTags) -> tuple[Packet, PlacedTokens]:
        """Return this rank's first packet, and the tokens of its queries."""
        packet, team = pack_keys(k, v, tags), self.rounds.team
        if team is None:
            return packet, PlacedTokens(self.runs, tags)
        packet = team.all_gather(packet)
        return packet, unpack_keys(packet, tags, self.runs)[2]

    def unpack_packet(
        self, rank: int, packet: Packet, tags: TokenTags
    ) -> tuple[Tensor, Tensor, PlacedTokens]:
        """Return the keys, values and tokens of the packet from a place."""
        return unpack_keys(packet, tags, self.rounds.layout.runs[rank])


def _move_together(
    move: Callable[[Packet], Packet] | None, tensors: Sequence[Tensor | None]
) -> list[Any]:
    """Apply `move` to all tensors (tokens along dim 2) in one packet; Nones stay None.

    Without `move` the tensors are returned unchanged.
    """
    present = [t for t in tensors if t is not None]
    if move is not None:
        present = list(move(Packet.pack(present, [2] * len(present))).tensors)
    moved = iter(present)
    return [None if t is None else next(moved) for t in tensors]


class RingAttention(torch.autograd.Function):
    """The autograd function of attention: result and log-sum-exp for this rank's queries."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        rows: Tensor | None,
        call: RingCall,
        *tag_tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Attend to the keys of all places, place after place; then combine within the team."""
        tags, team = TokenTags(*tag_tensors), call.rounds.team
        with torch._C.DisableTorchFunction():
            keys, tokens = call.first_packet(k, v, tags)
            all_q, all_rows = _move_together(None if team is None else team.all_gather, (q, rows))
            rules = replace(call.rules, slopes=slopes, rows=all_rows)
            state = BlockwiseForward(rules, all_q, tokens, v.shape[-1])
            arriving = call.rounds.forward(keys)
            del keys  # so that it is freed when the next packet has arrived
            for rank, packet in arriving:
                state.add(*call.unpack_packet(rank, packet, tags))
            out, lse = state.out, state.lse
            out, lse = (out, lse) if team is None else team.combine_results(out, lse)
            out = out.to(q.dtype)
        ctx.call = call
        # in the order of torch's own operator: compressed saved tensors are matched by number
        ctx.save_for_backward(k, q, v, slopes, rows, lse, out, *tag_tensors)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of q, k, v, slopes and rows."""
        k, q, v, slopes, rows, lse, out, *tag_tensors = ctx.saved_tensors
        call, tags, team = ctx.call, TokenTags(*tag_tensors), ctx.call.rounds.team
        with torch._C.DisableTorchFunction():
            grad = torch.zeros_like(out) if grad is None else grad
            inner = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            # needed if forward used flash attention, so that backward rounds scores equally
            flash = out if grad_lse is None else None
            inner = inner if grad_lse is None else inner - grad_lse
            keys, tokens = call.first_packet(k, v, tags)
            gather, scatter = (
                (None, None) if team is None else (team.all_gather, team.reduce_scatter)
            )
            tensors = q, lse, grad, inner, rows, flash
            all_q, lse, grad, inner, all_rows, flash = _move_together(gather, tensors)
            rules = replace(call.rules, slopes=slopes, rows=all_rows)
            state = BlockwiseBackward(rules, all_q, tokens, lse, grad.to(lse.dtype), inner, flash)

            def contribute(rank: int, packet: Packet) -> Packet:
                return Packet.pack(state.add(*call.unpack_packet(rank, packet, tags)), (2, 2))

            own_grads = call.rounds.backward(keys, contribute)
            dk, dv = (own_grads if scatter is None else scatter(own_grads)).tensors
            dq, drows = _move_together(scatter, (state.dq, state.rows))
        grad_pairs = zip((dq, dk, dv, state.slopes, drows), (q, k, v, slopes, rows), strict=True)
        grads = (None if g is None else g.to(tensor.dtype) for g, tensor in grad_pairs)
        return (*grads, *[None] * (1 + len(tag_tensors)))
