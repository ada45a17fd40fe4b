"""A model's own calls of torch's attention, and its own counting of positions, on some tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.runtime.attend import Mask
from schedlang.runtime.context.described import unknown
from schedlang.runtime.context.seat import Call, How, Seat, seated
from schedlang.runtime.counting import caller, firsts, items_of, upto
from schedlang.runtime.forward import wrap
from schedlang.runtime.modes import Ambient, ambient
from schedlang.runtime.slices import Place

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
_LOWEST = -1e4  # what is added to a score to hide a key is lower


class Attention(Ambient):
    """Inside a module that a row names: its calls of `scaled_dot_product_attention`."""

    def __init__(self, how: How) -> None:
        super().__init__()
        self.how = how

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        seat = seated()
        if seat is not None and func is F.scaled_dot_product_attention:
            given = {**dict(zip(_ARGUMENTS, args)), **kwargs}
            query, key = given["query"], given["key"]
            if query.shape[-2] == key.shape[-2] == seat.length:
                return _attend(seat, self.how, given)
        return self.run(func, types, args, kwargs)


def around(module: nn.Module, how: How) -> None:
    """Let a module's own calls of torch's attention meet the keys of other ranks."""

    def layer(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if seated() is None:
            return inner(*args, **kwargs)
        with ambient(Attention(how)):
            return inner(*args, **kwargs)

    wrap(module, "context", layer)


def _attend(seat: Seat, how: How, given: dict[str, Any]) -> Tensor:
    query, key, value = given["query"], given["key"], given["value"]
    flat = query.dim() == 3  # one head
    if flat:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
    if query.dim() != 4:
        raise unknown(f"its queries have {query.dim()} dims")
    rule = _rule(seat, given.get("attn_mask"), bool(given.get("is_causal")))
    call = Call(query, key, value, rule, given.get("scale"), given.get("dropout_p", 0.0))
    out = seat.attend(how, call)
    return out.squeeze(1) if flat else out


def _rule(seat: Seat, mask: Tensor | None, causal: bool) -> Mask:
    """The mask of a call as a rule."""
    if mask is None:
        return Mask(causal=causal)
    if mask.shape[-1] == seat.length and mask.dim() == 4 and mask.shape[1:3] == (1, 1):
        return Mask(causal=causal, present=_present(mask[:, 0, 0]))
    if mask.shape[-2:] == (seat.length, seat.layout.total) and mask.dim() <= 4:
        rows = mask[(None,) * (4 - mask.dim())]
        if rows.dtype == torch.bool and not mask.is_meta and _causal(seat, rows):
            return Mask(causal=True)  # a ring leaves out what positions hide
        return Mask(causal=causal, rows=rows)
    raise unknown("it attends under a mask of its own tokens, not of all")


def _causal(seat: Seat, rows: Tensor) -> bool:
    at = seat.positions(rows.device)[:, None]
    keys = torch.arange(seat.layout.total, device=rows.device)
    return bool((rows == (keys <= at)).all())


def _present(mask: Tensor) -> Tensor:
    """Which keys a mask lets through; it must be booleans, or zeros and very low numbers."""
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    if not mask.is_meta and not bool((seen | (mask < _LOWEST)).all()):
        raise unknown("it adds numbers to its scores, which belong to its own tokens only")
    return seen


# -- positions -----------------------------------------------------------------------------------


class Positions(Ambient):
    """Lines that count positions by the length of what they are given count those of the seat."""

    def __init__(self, places: Collection[Place]) -> None:
        super().__init__()
        self.places = frozenset(places)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        seat = seated()
        if seat is not None and func in _COUNTED and caller() in self.places:
            found = _COUNTED[func](seat, args, kwargs)
            if found is not None:
                return found
        return self.run(func, types, args, kwargs)


def _arange(seat: Seat, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """torch.arange(length) and torch.arange(0, length)."""
    if not upto(args, kwargs, seat.length):
        return None
    made = seat.positions(kwargs.get("device") or torch.get_default_device())
    return made.to(kwargs["dtype"]) if kwargs.get("dtype") else made


def _getitem(seat: Seat, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """table[:length] of a parameter or buffer; of two such dims the first counts queries."""
    tensor, index = args
    items = list(items_of(index))
    runs = [k for k, run in enumerate(firsts(index, seat.length)) if run]
    if not runs or Ellipsis in items or any(isinstance(item, Tensor) for item in items):
        return None
    keys = runs[1] if len(runs) == 2 else -1
    whole = slice(0, seat.layout.total)
    out: Tensor = tensor[tuple(whole if k in runs else item for k, item in enumerate(items))]
    for k in runs:
        if k != keys:
            dim = sum(not isinstance(item, int) for item in items[:k])
            out = out.index_select(dim, seat.positions(out.device))
    return out


_COUNTED: dict[Any, Callable[[Seat, Any, dict[str, Any]], Tensor | None]] = {
    torch.arange: _arange,
    Tensor.__getitem__: _getitem,
}
