"""Attention of this rank's queries to keys and values that come by in rounds, and its gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from schedlang.runtime.attend.blocks import Rules, Tokens
from schedlang.runtime.attend.keys import packed, unpacked
from schedlang.runtime.attend.layout import Runs
from schedlang.runtime.attend.local import Backward, Forward
from schedlang.runtime.attend.mask import Tags
from schedlang.runtime.attend.rounds import Rounds
from schedlang.runtime.attend.travel import Packet


class Call:
    """What a call of attention holds beside the tensors that autograd saves."""

    def __init__(self, rules: Rules, rounds: Rounds, runs: Runs) -> None:
        self.rules, self.rounds, self.runs = rules, rounds, runs


class Attention(torch.autograd.Function):
    """The result and the log-sum-exp for this rank's queries."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None,
        rows: Tensor | None, call: Call, *given: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
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
