"""Carried keys and values at a model's own calls of attention, and lines that count positions."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.runtime import scope
from schedlang.runtime.modes import Ambient
from schedlang.runtime.sequence_pipelining.carry import Span, Visit
from schedlang.runtime.sequence_pipelining.slices import Place

# ---- Lines of a model that count positions by the length of what they are given.
# Such as `torch.arange(x.shape[1])`, `self.table[: x.shape[1]]`, or the last ones of a table.


_OURS = tuple(str(folder) for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))


class Watch(Ambient):
    """Notes in a whole forward the lines that count positions up to its length.

    `tables` are ids of the model's parameters and buffers. A line that also does something else of
    the kind is in `others`.
    """

    def __init__(self, length: int, tables: Collection[int]) -> None:
        super().__init__()
        self.length, self.tables = length, frozenset(tables)
        self.found: set[Place] = set()
        self.others: set[Place] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.arange:
            (self.found if upto(args, kwargs, self.length) else self.others).add(caller())
        elif func is Tensor.__getitem__:
            first, table = any(firsts(args[1], self.length)), id(args[0]) in self.tables
            if any(lasts(args[0], args[1], self.length)) or (first and table):
                self.found.add(caller())
            elif first or table:
                self.others.add(caller())
        return self.run(func, types, args, kwargs)


def caller() -> Place:
    """The line of the model that is running: the innermost outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def upto(args: Sequence[Any], kwargs: Mapping[str, Any], length: int) -> bool:
    """Whether these are the arguments of torch.arange(length), or torch.arange(0, length)."""
    ends = tuple(args) or tuple(kwargs[name] for name in ("start", "end") if name in kwargs)
    return ends in ((length,), (0, length))


def firsts(index: Any, length: int) -> list[bool]:
    """Which items of an index are `[:length]`."""
    return [
        type(item) is slice and _plain(item) and item.start in (None, 0) and item.stop == length
        for item in items_of(index)
    ]


def lasts(tensor: Tensor, index: Any, length: int) -> list[bool]:
    """Which items of an index take the last `length` of more."""
    items = items_of(index)
    sized = len(items) <= tensor.dim() and all(isinstance(item, (slice, int)) for item in items)
    return [
        sized
        and type(item) is slice
        and _plain(item)
        and item.stop is None
        and tensor.shape[dim] > length
        and item.start in (-length, tensor.shape[dim] - length)
        for dim, item in enumerate(items)
    ]


def items_of(index: Any) -> tuple[Any, ...]:
    """The items of an index, one or several."""
    return index if isinstance(index, tuple) else (index,)


def _plain(item: slice) -> bool:
    numbers = (item.start, item.stop)
    return item.step in (None, 1) and all(n is None or isinstance(n, int) for n in numbers)


# ---- Carried keys and values at a model's own calls of torch's attention, and positions by
# length.
# For models that know no cache. Causal calls of `scaled_dot_product_attention` see the keys of all
# slices before; lines that count positions by the length of what they are given, such as
# `torch.arange(x.shape[1])` or `self.table[: x.shape[1]]`, count on from the slice's start.


_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


class Calls(Ambient):
    """Where a slice runs: keys and values joined, positions moved at the places given."""

    eager = "sequences run in slices, which pass keys and values on"

    def __init__(self, places: Collection[Place]) -> None:
        super().__init__()
        self.places = frozenset(places)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        visit = scope.visit()
        if visit is not None:
            if func is F.scaled_dot_product_attention:
                args, kwargs = _attend(visit, args, kwargs)
            elif self.places and func in POSITIONS and caller() in self.places:
                args, kwargs = POSITIONS[func](visit.span, args, kwargs)
        return self.run(func, types, args, kwargs)


def _attend(visit: Visit, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    given = {**dict(zip(_ARGUMENTS, args)), **kwargs}
    query, key, value = given["query"], given["key"], given["value"]
    span, mask = visit.span, given.get("attn_mask")
    if query.shape[-2] != span.length or key.shape[-2] != span.length:
        return args, kwargs  # not along the sequence
    causal = bool(given.get("is_causal"))
    if not causal and (mask is None or mask.shape[-1] != span.stop):
        raise _not_causal(mask is None)
    if query.untyped_storage()._cdata == key.untyped_storage()._cdata:
        # a view of queries, keys and values in one would keep what has been copied to its line
        given["query"] = query.clone()
    turn = scope.next_call("keys and values")
    given["key"] = visit.join((turn, "keys"), key)
    given["value"] = visit.join((turn, "values"), value)
    if causal and span.start:
        given["attn_mask"], given["is_causal"] = _lower_right(visit, query), False
    return (), given


def _lower_right(visit: Visit, query: Tensor) -> Tensor:
    """The mask under which each query of the slice sees the keys up to its own.

    One for all layers, and of the queries' dtype: from a mask of booleans every call would make,
    and keep for its backward, one of its own.
    """
    key = f"mask {query.dtype}"
    if key not in visit.memo:
        span = visit.span
        hidden = query.new_full((span.length, span.stop), -math.inf)
        visit.memo[key] = hidden.triu(span.start + 1)
    mask: Tensor = visit.memo[key]
    return mask


def _not_causal(without: bool) -> Refusal:
    what = "without a mask" if without else "with a mask of its own slice only"
    return Refusal(
        Diagnostic(
            "S655",
            f"`{scope.site() or 'the model'}` attends {what}",
            notes=("a slice has the keys of the slices before it only: attention must be causal",),
            helps=(
                "write `scaled_dot_product_attention(q, k, v, is_causal=True)`",
                "or leave `slices` out of the row",
            ),
        )
    )


def _arange(span: Span, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """torch.arange(length) and torch.arange(0, length)."""
    if not upto(args, kwargs, span.length):
        return args, kwargs
    rest = {name: value for name, value in kwargs.items() if name not in ("start", "end")}
    return (span.start, span.stop), rest


def _getitem(span: Span, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """table[:length] of a parameter or buffer; of two such dims the first counts queries."""
    tensor, index = args
    runs = firsts(index, span.length)
    if not any(runs):
        return args, kwargs
    made, found = [], 0
    for item, run in zip(items_of(index), runs):
        found += run
        last = found == sum(runs) == 2
        made.append(slice(0 if last else span.start, span.stop) if run else item)
    return (tensor, tuple(made) if isinstance(index, tuple) else made[0]), kwargs


POSITIONS: dict[Any, Callable[[Span, Any, dict[str, Any]], tuple[Any, dict[str, Any]]]] = {
    torch.arange: _arange,
    Tensor.__getitem__: _getitem,
}
