"""Attention as an n-body problem: teams of ranks share their queries, and the steps of the ring.

The ranks of a team gather their tokens, and each of them meets the keys of a part of the teams; so
blocks are larger and steps fewer, and what goes around the ring falls by the size of a team
(WallFacer, 2024; Driscoll et al.: A communication-optimal n-body algorithm, IPDPS 2013).  Only a
rank's own tokens are kept for the backward, which gathers them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.context_parallel.local_attention import (
    Backward,
    Forward,
    Rules,
    Tokens,
    finite,
    wide,
)
from schedlang.runtime.context_parallel.masks import Tags
from schedlang.runtime.context_parallel.ring import (
    Contribute,
    Moving,
    Packet,
    added,
    gathered,
    packed,
    scattered,
    shift,
    unpacked,
)
from schedlang.runtime.context_parallel.token_layout import Layout


@dataclass(frozen=True)
class Bodies:
    """Teams in a ring; `layout` has a place for every rank, those of a team one after the other."""

    ring: Group
    team: Group
    layout: Layout

    @property
    def teams(self) -> Layout:
        """A place for every team: the tokens of its ranks, one rank after the other."""
        size, runs = self.team.size, self.layout.runs
        return Layout(tuple(sum(runs[i : i + size], ()) for i in range(0, len(runs), size)))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many tokens each rank of this team holds."""
        first = self.ring.rank * self.team.size
        return self.layout.counts[first : first + self.team.size]

    @property
    def share(self) -> range:
        """The steps of the ring that this member of the team takes."""
        each = -(-self.ring.size // self.team.size)
        return range(self.ring.size)[self.team.rank * each : (self.team.rank + 1) * each]

    # -- within the team ---------------------------------------------------------------------------

    def together(self, own: Packet) -> Packet:
        """The tokens of the team's ranks side by side."""
        parts = gathered(own, self.counts, self.team)
        columns = zip(*(part.tensors for part in parts))
        return Packet.of([torch.cat(c, d) for c, d in zip(columns, own.dims)], own.dims)

    def apart(self, whole: Packet) -> Packet:
        """This rank's tokens of the sum over the team."""
        cut = [torch.split(t, list(self.counts), d) for t, d in zip(whole.tensors, whole.dims)]
        parts = [Packet.of(tensors, whole.dims) for tensors in zip(*cut)]
        return scattered(parts, self.counts, self.team)

    # -- around the ring ---------------------------------------------------------------------------

    def origin(self, step: int) -> int:
        """The team whose packet is here after so many steps."""
        return (self.ring.rank - step) % self.ring.size

    def forward(self, own: Packet) -> Iterator[tuple[int, Packet]]:
        """The packets of this member's share of the teams."""
        packet = self._first(own)
        for step in self.share:
            coming = self._next(step, packet)
            yield self.origin(step), packet
            packet = packet if coming is None else coming.wait()

    def backward(self, own: Packet, contribute: Contribute) -> Packet | None:
        """The sum of `contribute` over all that see this team's packet in the same share of steps.

        None where this member has no share.
        """
        packet, arriving = self._first(own), None
        for step in self.share:
            coming = self._next(step, packet)
            part = contribute(self.origin(step), packet)
            total = part if arriving is None else added(arriving.wait(), part)
            last = step == self.share[-1]
            by, after = (self.ring.size - step, 0) if last else (1, step + 1)
            arriving = self._moved(total, after, by % self.ring.size)
            packet = packet if coming is None else coming.wait()
        return None if arriving is None else arriving.wait()

    def _first(self, own: Packet) -> Packet:
        """The packet that this member's share begins with, which jumps over the other shares."""
        first = self.share.start if self.share else 0
        return self._moved(own, first, first).wait()

    def _next(self, step: int, packet: Packet) -> Moving | None:
        return None if step == self.share[-1] else self._moved(packet, step + 1, 1)

    def _moved(self, packet: Packet, step: int, by: int) -> Moving:
        """Send `by` teams on, and receive what is here after `step` steps."""
        if by == 0:
            return Moving(packet, packet, ())
        return shift(packet, self.teams.counts[self.origin(step)], self.ring, by)


@dataclass(frozen=True)
class Given:
    """What a call holds beside the tensors that autograd saves."""

    bodies: Bodies
    rules: Rules

    def queries(self, q: Tensor, rows: Tensor | None, *more: Tensor) -> Packet:
        """The team's queries, their rows of a mask, and what else is of their tokens."""
        tensors = [t for t in (q, *more, rows) if t is not None]
        return self.bodies.together(Packet.of(tensors, [2] * len(tensors)))

    def keys(self, k: Tensor, v: Tensor, tags: Tags) -> Packet:
        """The team's keys and values."""
        return self.bodies.together(packed(k, v, tags))

    def tokens(self, place: int, packet: Packet, tags: Tags) -> tuple[Tensor, Tensor, Tokens]:
        """Keys, values, and the tokens that they are."""
        return unpacked(packet, tags, self.bodies.teams.runs[place])


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
        call: Given,
        *tagged: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Meet this member's share of the keys, then the other members of the team."""
        tags, bodies = Tags(*tagged), call.bodies
        with torch._C.DisableTorchFunction():
            keys = call.keys(k, v, tags)
            all_q, *all_rows = call.queries(q, rows).tensors
            rules = replace(call.rules, slopes=slopes, rows=all_rows[0] if all_rows else None)
            *_, mine = call.tokens(bodies.ring.rank, keys, tags)
            state = Forward(rules, all_q, mine, v.shape[-1])
            for place, packet in bodies.forward(keys):
                state.add(*call.tokens(place, packet, tags))
            out, lse = _met(state, bodies)
            out = out.to(q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, k, v, slopes, rows, out, lse, *tagged)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        """Gradients of q, k, v, slopes and rows."""
        q, k, v, slopes, rows, out, lse, *tagged = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            grad = torch.zeros_like(out) if grad is None else grad
            inner = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            inner = inner if grad_lse is None else inner - grad_lse
            grads = _back(ctx.call, (q, k, v, slopes, rows), (lse, grad, inner), Tags(*tagged))
        return (*grads, None, *[None] * len(tagged))


def _met(state: Forward, bodies: Bodies) -> tuple[Tensor, Tensor]:
    """This rank's tokens of what the team's members found, each with its share of the keys."""
    if bodies.team.size == 1:
        return state.out, state.lse
    each = gathered(
        Packet.of([state.lse], [2]), [state.lse.shape[2]] * bodies.team.size, bodies.team
    )
    lse = torch.stack([packet.tensors[0] for packet in each]).logsumexp(0)
    weighed = state.out * (state.lse - finite(lse)).exp()[..., None]
    (out,) = bodies.apart(Packet.of([weighed], [2])).tensors
    first = sum(bodies.counts[: bodies.team.rank])
    return out, lse[:, :, first : first + out.shape[2]].contiguous()


def _back(
    call: Given, given: Sequence[Tensor | None], came: Sequence[Tensor], tags: Tags
) -> list[Tensor | None]:
    q, k, v, slopes, rows = given
    assert q is not None and k is not None and v is not None
    bodies, kind = call.bodies, wide(q.dtype)
    keys = call.keys(k, v, tags)
    all_q, lse, grad, inner, *all_rows = call.queries(q, rows, *came).tensors
    rules = replace(call.rules, slopes=slopes, rows=all_rows[0] if all_rows else None)
    *_, mine = call.tokens(bodies.ring.rank, keys, tags)
    state = Backward(rules, all_q, mine, lse, grad.to(kind), inner)

    def contribute(place: int, packet: Packet) -> Packet:
        return Packet.of(state.add(*call.tokens(place, packet, tags)), (2, 2))

    home = bodies.backward(keys, contribute)
    both = keys.tensors[:2] if home is None else home.tensors
    zeros = [torch.zeros_like(t, dtype=kind) for t in both]
    dk, dv = bodies.apart(Packet.of(both if home is not None else zeros, (2, 2))).tensors
    trained = [t for t in (state.dq, state.rows) if t is not None]
    dq, *drows = bodies.apart(Packet.of(trained, [2] * len(trained))).tensors
    made = (dq, dk, dv, state.slopes, drows[0] if drows else None)
    return [None if g is None or t is None else g.to(t.dtype) for g, t in zip(made, given)]
