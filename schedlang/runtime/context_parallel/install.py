"""A model made ready to run on some tokens of its sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.runtime import scope
from schedlang.runtime.comm.collectives import enter, reduce
from schedlang.runtime.context_parallel import described_attention, model_calls
from schedlang.runtime.context_parallel.attention import Way, attend_lse
from schedlang.runtime.context_parallel.local_tokens import Call, How, Seat, Tokens, seated
from schedlang.runtime.context_parallel.masks import Dropout
from schedlang.runtime.modes import ambient
from schedlang.runtime.rng.logical_dropout import LogicalDropout, Slices, Window, within
from schedlang.runtime.rng.native import NativeDropout
from schedlang.runtime.storage.saved import around


def install(model: nn.Module, tokens: Tokens, hows: Mapping[str, How]) -> list[Any]:
    """Let named attentions exchange; the result are handles of hooks, to be removed."""
    described_attention.use(model)
    for fqn, how in hows.items():
        module = model.get_submodule(fqn)
        described_attention.mark(module, how)
        model_calls.around(module, how, tokens.products)
    if tokens.shift != "head" or not tokens.head:
        return []
    return [model.get_submodule(tokens.head).register_forward_hook(_one_more)]


def _one_more(module: nn.Module, args: Any, output: Any) -> Any:
    """A row without label behind those of the tokens here, whose labels come moved by one."""
    seat = seated()
    if seat is None or not seat.more:
        return output
    return torch.cat([output, output.new_zeros(output[:, :1].shape)], 1)


class Exchanging:
    """Attention over groups of ranks; `draw` says which of its weights dropout takes."""

    def __init__(self, draw: LogicalDropout | NativeDropout | None = None) -> None:
        self.draw = draw

    def __call__(self, seat: Seat, how: How, call: Call) -> torch.Tensor:
        """See Seat.attend."""
        rows, heads = call.query.shape[:2]
        drop = call.drawn
        if call.dropout:
            drop = self.drawn(seat, call.dropout, rows, heads)
        way = Way(how.method, how.groups, seat.layout, call.scale, drop)
        out, lse = attend_lse(call.query, call.key, call.value, call.mask, way)
        if call.blind == "zero" or (call.mask.present is None and call.mask.rows is None):
            return out
        blind = lse.detach().isneginf().unsqueeze(-1)
        return torch.where(blind, _mean(call.value, heads, how, seat.layout.total), out)

    def drawn(self, seat: Seat, p: float, rows: int, heads: int) -> Dropout:
        """See Exchange."""
        assert self.draw is not None, "several ranks agree on masks"
        total = seat.layout.total
        if isinstance(self.draw, LogicalDropout):
            return Dropout.logical(p, self.draw, rows, heads, total)
        made = partial(Dropout.fresh, p, rows, heads, total)
        drawn: Dropout = self.draw.attended(made, (rows, heads, total, total))
        return drawn


class Unseen(Exchanging):
    """Attention of one rank in a model without values, where all masks of dropout are alike."""

    def drawn(self, seat: Seat, p: float, rows: int, heads: int) -> Dropout:
        """A mask of the right shape; raises Refusal S935 inside of what is kept in fewer bits, for
        attention that drops weights saves scores in one process, and none of them here."""
        if around.code is not None:
            raise Refusal(
                Diagnostic(
                    "S935",
                    "`compress` cannot round the activations of attention with dropout here",
                    notes=(
                        "a single process saves scores for this dropout; where ranks split"
                        " tokens,"
                        " none does",
                    ),
                    helps=(
                        "train without dropout in attention",
                        "or select other modules, for example `layers.*.mlp  compress(...)`",
                    ),
                )
            )
        return Dropout.fresh(p, rows, heads, seat.layout.total)


def _mean(value: torch.Tensor, heads: int, how: How, total: int) -> torch.Tensor:
    """The mean value of all tokens, for each head of the queries."""
    mean = value.sum(2, keepdim=True) / total
    for group in how.groups:
        mean = enter(reduce(mean, group), group)
    return mean.repeat_interleave(heads // value.shape[1], 1)


class At:
    """Enters the seats of a step's microbatches, with what counts positions in them."""

    def __init__(self, tokens: Tokens | None) -> None:
        counts = tokens is not None and (tokens.places or tokens.follow)
        self._mode = (
            model_calls.Positions(tokens.places, tokens.follow) if tokens and counts else None
        )

    @contextmanager
    def sitting(self, seat: Seat, around: AbstractContextManager[Any]) -> Iterator[None]:
        """Inside `around`, the forward or backward of a microbatch at its seat."""
        with ExitStack() as stack:
            stack.enter_context(around)
            stack.enter_context(scope.visiting(seat))
            stack.enter_context(ambient(*([self._mode] if self._mode else [])))
            yield


def windows(tokens: Tokens, inner: Slices | None) -> Slices:
    """The part of a logical mask that the tokens of a seat draw, on top of what shards draw."""

    def window(site: str, call: int, shape: tuple[int, ...]) -> Window | None:
        held = inner(site, call, shape) if inner else None
        seat = seated()
        if seat is None:
            return held
        dims, total = tokens.draws.get((site, call)), seat.layout.total
        if dims is None or len(dims) != len(shape):
            raise _unknown_draw(site)
        if all(size == total for size, what in zip(shape, dims) if what):
            return held  # an attention asks for the whole, and takes its part by itself
        runs: dict[str, Any] = {"rows": seat.positions(), "keys": range(total)}
        return within(held, shape, total, [runs.get(what) for what in dims])

    return window


def _unknown_draw(site: str) -> Refusal:
    return Refusal(
        Diagnostic(
            "S661",
            f"`{site}` draws random numbers that it did not draw at build",
            notes=("a rank must find its part of the numbers drawn for the full sequence",),
            helps=("leave `context_parallel` out for this model",),
        )
    )
