"""What is done to scores that are followed: scaled, biased, hidden, made weights, met by values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.attend import Mask
from schedlang.runtime.context.described import Described, is_causal, unknown
from schedlang.runtime.context.known import by_keys
from schedlang.runtime.context.seat import Call, How, Seat

LOW = -1e4  # what hides a key is lower


@dataclass(frozen=True)
class State:
    """Scores as they would be: what a call of attention takes, so far.

    lead    the dims before queries and keys, as the model has them now
    inner   the same as they are in `added`: [rows, heads] as soon as the model says so
    added   numbers for [*inner, queries or 1, keys of the whole sequence], -inf where hidden
    hides   whether some of `added` may hide all keys of a query
    weights whether the softmax has been taken
    """

    seat: Seat
    how: How
    query: Tensor
    key: Tensor
    lead: tuple[int, ...]
    inner: tuple[int, ...]
    scale: float = 1.0
    added: Tensor | None = None
    mask: Mask | None = None
    hides: bool = False
    weights: bool = False
    drawn: Any = None


def rows_of(state: State, given: Tensor) -> Tensor:
    """Numbers that are added to scores: for the queries here, and all keys; in `inner`'s dims."""
    dims = len(state.lead) + 2
    value = by_keys(state.seat, given if given.dim() > 1 else given[None])
    if value is None:
        raise unknown("what it adds to its scores covers only the tokens of one rank")
    if value.dim() > dims:
        raise unknown("what it adds to its scores has other dims")
    value = value[(None,) * (dims - value.dim())]
    if state.lead == state.inner:
        return value
    if set(value.shape[:-2]) != {1}:
        value = value.expand(*state.lead, -1, -1)
        return value.reshape(*state.inner, *value.shape[-2:])
    return value.reshape(*[1] * len(state.inner), *value.shape[-2:])


def plus(state: State, rows: Tensor) -> State:
    """With more numbers that are added."""
    return replace(state, added=rows if state.added is None else state.added + rows)


def _add(state: State, other: Any, alpha: float = 1) -> State:
    _before(state)
    if isinstance(other, Described):
        return _under(state, other)
    if isinstance(other, Tensor) and other.dim():
        return plus(state, rows_of(state, other) * alpha if alpha != 1 else rows_of(state, other))
    if not isinstance(other, (int, float, Tensor)):
        raise unknown(f"it adds a `{type(other).__name__}` to its scores")
    return state  # the same for all keys


def _sub(state: State, other: Any, alpha: float = 1) -> State:
    if isinstance(other, Described):
        raise unknown("it subtracts a mask from its scores")
    return _add(state, other, alpha=-alpha)


def _mul(state: State, by: Any) -> State:
    _before(state)
    if isinstance(by, Tensor) and (by.dim() or by.requires_grad or by.is_meta):
        raise unknown("it multiplies its scores by a tensor, not by a number")
    factor = float(by)
    added = None if state.added is None else state.added * factor
    return replace(state, scale=state.scale * factor, added=added)


def _div(state: State, by: Any) -> State:
    return _mul(state, 1 / by)


def _under(state: State, given: Described) -> State:
    if state.mask is not None:
        raise unknown("it applies two masks to its scores")
    return replace(state, mask=given.mask)


def _fill(state: State, hidden: Any, value: Any) -> State:
    """Keys are hidden by a very low score."""
    _before(state)
    if float(value) > LOW:
        raise unknown(f"it sets some of its scores to {float(value):g}")
    if isinstance(hidden, Described):
        return _under(state, hidden)
    if not isinstance(hidden, Tensor) or hidden.dtype != torch.bool:
        raise unknown("it masks keys by something other than booleans")
    gone = rows_of(state, hidden)
    if state.mask is None and is_causal(state.seat, ~gone):
        return replace(state, mask=Mask(causal=True))  # a ring leaves out what positions hide
    zero = torch.zeros(gone.shape, dtype=state.query.dtype, device=gone.device)
    return plus(replace(state, hides=True), zero.masked_fill(gone, -math.inf))


def _where(state: State, *given: Any) -> State:
    """torch.where(seen, scores, low)."""
    seen, low = given
    return _fill(state, ~seen, low)


def _view(state: State, *sizes: Any, **_: Any) -> State:
    given = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    length, lead = state.seat.length, given[:-2]
    if len(given) < 3 or given[-1] not in (length, -1) or given[-2] not in (length, -1):
        raise unknown("it changes the shape of its scores")
    count = math.prod(state.lead)
    if -1 in lead:
        rest = math.prod(n for n in lead if n != -1)
        lead = tuple(count // rest if n == -1 else n for n in lead)
    if math.prod(lead) != count:
        raise unknown("it changes the shape of its scores")
    if len(lead) < 2 or state.inner == lead or len(state.inner) > 1:
        return replace(state, lead=tuple(lead))
    added = state.added
    if added is not None:
        flat = added.expand(count, -1, -1) if added.shape[0] != count else added
        added = flat.reshape(*lead, *added.shape[-2:])
    return replace(state, lead=tuple(lead), inner=tuple(lead), added=added)


def _softmax(state: State, dim: Any = None, *_: Any, **__: Any) -> State:
    _before(state)
    if dim not in (-1, len(state.lead) + 1):
        raise unknown("its softmax is not over keys")
    return replace(state, weights=True)


def _dropout(state: State, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> State:
    if not state.weights or state.drawn is not None:
        raise unknown("it applies dropout to its scores, or twice")
    if not training or not p:
        return state
    rows, heads = _heads(state)
    return replace(state, drawn=state.seat.draw(p, rows, heads))


def _same(state: State, *_: Any, **__: Any) -> State:
    return state


def _values(state: State, value: Tensor) -> Tensor:
    """The product with values: the call of attention."""
    if not state.weights:
        raise unknown("its scores are scaled twice before their softmax")
    rows, heads = _heads(state)
    mask = state.mask or Mask()
    tagged = next((tag for tag in mask.tags if tag is not None), None)
    if tagged is not None and len(tagged) not in (1, rows):
        raise unknown("its heads and rows share a dim")
    if state.added is not None:
        wide = state.added.reshape(state.added.shape[0], -1, *state.added.shape[-2:]) if (
            len(state.inner) > 1) else state.added[:, None]  # fmt: skip
        mask = replace(mask, rows=wide)
    parts = [_four(x, state, rows) for x in (state.query, state.key, value)]
    blind: Any = "mean" if state.hides or mask.present is not None else "zero"
    call = Call(parts[0], parts[1], parts[2], mask, state.scale, blind=blind, drawn=state.drawn)
    out = state.seat.attend(state.how, call)
    return out.reshape(*state.lead, *out.shape[-2:])


def _heads(state: State) -> tuple[int, int]:
    return state.inner[0], math.prod(state.inner[1:])


def _four(x: Tensor, state: State, rows: int) -> Tensor:
    """[rows, heads, tokens, size]."""
    if x.shape[:-2].numel() not in (math.prod(state.lead), rows):
        raise unknown("its queries, keys and values have different numbers of heads")
    return x.reshape(rows, -1, *x.shape[-2:])


def _before(state: State) -> None:
    if state.weights:
        raise unknown("it changes its weights after their softmax")


RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "radd", "iadd"), _add),
    **dict.fromkeys(("sub", "isub"), _sub),
    **dict.fromkeys(("mul", "rmul", "imul"), _mul),
    **dict.fromkeys(("div", "truediv", "itruediv"), _div),
    **dict.fromkeys(("view", "reshape"), _view),
    **dict.fromkeys(("to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous",
                     "clone"), _same),
    **dict.fromkeys(("matmul", "bmm"), _values),
    "masked_fill": _fill, "where": _where, "softmax": _softmax, "dropout": _dropout,
}  # fmt: skip
