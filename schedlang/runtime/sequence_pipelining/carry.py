"""Keys and values that slices carry on: their gradients back, a cache, and a model's own calls.

* Keys and values that slices of one sequence carry to later slices, and their gradients back. A
  slice attends to the keys of all slices before it. Those come in as leaves, one per slice, so
  that the backwards of later slices leave what they owe in `.grad`; slices run backward in
  reverse order, and the backward of a slice starts also from its own keys, with the sum that lies
  there (Li et al., TeraPipe, ICML 2021; Sun et al., Seq1F1B, 2024).
* Carried keys and values as the cache that models of transformers ask for theirs.
* Lines of a model that count positions by the length of what they are given. Such as
  `torch.arange(x.shape[1])`, `self.table[: x.shape[1]]`, or the last ones of a table.
* Carried keys and values at a model's own calls of torch's attention, and positions by length.
  For models that know no cache. Causal calls of `scaled_dot_product_attention` see the keys of
  all slices before; lines that count positions by the length of what they are given, such as
  `torch.arange(x.shape[1])` or `self.table[: x.shape[1]]`, count on from the slice's start.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime import scope
from schedlang.runtime.modes import Ambient

Place = tuple[str, int]  # a file and a line of it


@dataclass(frozen=True)
class Span:
    """The run [start, stop) of a sequence of `total` tokens; slice number `index`."""

    index: int
    start: int
    stop: int
    total: int

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return self.stop - self.start


@dataclass
class _Line:
    """One tensor of one attention along the whole sequence: its memory, and a leaf per slice."""

    whole: Tensor
    leaves: dict[int, Tensor] = field(default_factory=dict)
    edges: dict[int, GradientEdge | None] = field(default_factory=dict)


class Carried:
    """Keys and values of one microbatch on one stage, from the first forward to the last backward.

    All slices of a line lie in one memory of the whole length, so that no slice keeps a copy of
    what stands before it.
    """

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}

    def join(self, key: Hashable, new: Tensor, dim: int, span: Span) -> Tensor:
        """`new` with the same line of all earlier slices before it, along `dim`.

        The first call for a slice notes it; a second one, of a recomputation, gives the same.
        Raises LookupError where an earlier slice has no such line.
        """
        dim = dim % new.dim()
        if span.index == 0 and key not in self._lines:
            shape = [*new.shape[:dim], span.total, *new.shape[dim + 1 :]]
            self._lines[key] = _Line(new.new_empty(shape))
        line = self._lines.get(key)
        if line is None or any(index not in line.leaves for index in range(span.index)):
            raise LookupError(f"no keys of slices before {span.index} at {key}")
        past = [line.leaves[index] for index in range(span.index)]
        joined: Tensor = _Join.apply(line.whole, dim, span, new, *past)  # type: ignore[no-untyped-call]
        if span.index not in line.leaves:
            line.edges[span.index] = get_gradient_edge(new) if new.requires_grad else None
            own = line.whole.data.narrow(dim, span.start, span.length).detach()
            line.leaves[span.index] = own.requires_grad_(new.requires_grad)
        return joined

    def roots(self, index: int) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return where gradients of a slice's keys and values enter, and what later slices left of
        them."""
        found = [
            (edge, line.leaves[index].grad)
            for line in self._lines.values()
            if (edge := line.edges.get(index)) is not None
        ]
        there = [(edge, grad) for edge, grad in found if grad is not None]
        return [edge for edge, _ in there], [grad for _, grad in there]

    def leaves(self, index: int) -> list[Tensor]:
        """Return the keys and values that a slice has taken of earlier ones, and gives gradients
        to."""
        return [
            line.leaves[before]
            for line in self._lines.values()
            if index in line.leaves
            for before in range(index)
            if line.leaves[before].requires_grad
        ]

    def free(self, index: int) -> None:
        """The backward of a slice is done: nothing of it is needed any more."""
        for key, line in list(self._lines.items()):
            line.leaves.pop(index, None)
            line.edges.pop(index, None)
            if not line.leaves:
                del self._lines[key]


class _Join(torch.autograd.Function):
    """Writes a slice behind those before it and gives all of them, without a copy of the others."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, dim: int, span: Span, new: Tensor, *past: Tensor
    ) -> Tensor:
        ctx.dim, ctx.sizes = dim, [*(leaf.shape[dim] for leaf in past), new.shape[dim]]
        # tensors of their own over one memory: what a later slice writes behind does not count as
        # a change of what an earlier one has kept
        whole.data.narrow(dim, span.start, span.length).copy_(new)
        return whole.data.narrow(dim, 0, span.stop).data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *past, new = torch.split(grad, ctx.sizes, ctx.dim)
        return None, None, None, new, *past


@dataclass(frozen=True)
class Visit:
    """One slice of one microbatch on one stage, while it runs."""

    carried: Carried | None
    span: Span
    memo: dict[str, Any] = field(default_factory=dict)

    @property
    def index(self) -> int:
        """The number of this slice among the slices."""
        return self.span.index

    @property
    def total(self) -> int:
        """The number of tokens of the sequence."""
        return self.span.total

    @property
    def more(self) -> bool:
        """Whether another slice follows, whose first label this one has, too."""
        return self.span.stop != self.span.total

    def runs(self) -> dict[str, range]:
        """The positions of the tokens here, and of the keys that they see."""
        return {"rows": range(self.span.start, self.span.stop), "keys": range(self.span.stop)}

    def join(self, key: Hashable, new: Tensor, dim: int = -2) -> Tensor:
        """See Carried.join."""
        if self.carried is None:
            dim = dim % new.dim()
            return new.new_empty([*new.shape[:dim], self.span.stop, *new.shape[dim + 1 :]])
        return self.carried.join(key, new, dim, self.span)

    def on_meta(self) -> Visit:
        """The same for shapes only: it notes nothing, and joins with nothing."""
        return Visit(None, self.span)


_CACHES = ("cache", "past_key_values")  # from transformers 5.24 on, and before


def cache_argument(model: nn.Module) -> str | None:
    """Return the name of the cache of keys and values that a model of transformers takes."""
    if not any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
        return None
    taken = inspect.signature(model.forward).parameters
    return next((name for name in _CACHES if name in taken), None)


def cache(span: Span) -> Any:
    """The cache for one slice: it knows all lengths, whichever layers run here."""
    return _class()(span)


@functools.cache
def _class() -> type:
    """Made when first asked for: transformers is imported for its own models only."""
    from transformers.cache_utils import DynamicCache

    class SliceCache(DynamicCache):  # type: ignore[misc]
        """Answers for every layer alike; layers of other stages never call it."""

        def __init__(self, span: Span) -> None:
            super().__init__()
            self.span = span

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            """The keys and values of this slice behind those of the slices before."""
            visit = scope.visit()  # ours, or one for shapes only
            if visit is None or visit.span != self.span:
                raise LookupError("the cache of a slice is used outside its call")
            keys = visit.join((layer_idx, "keys"), key_states)
            return keys, visit.join((layer_idx, "values"), value_states)

        def _other(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError(
                "its cache holds states of convolutions or recurrences, not only keys and values"
            )

        update_conv_state = update_recurrent_state = update_indexer = _other
        get_conv_state = get_recurrent_state = has_previous_state = _other

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            """A recomputation, which copies what a forward changes, gets the same keys again."""
            return self

        def get_seq_length(self, layer_idx: int = 0) -> int:
            """Tokens before this slice."""
            return self.span.start

        def get_query_offset(self, layer_idx: int = 0) -> int:
            """Tokens before this slice."""
            return self.span.start

        def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
            """Keys that this slice sees; their first is the first of the sequence."""
            return self.span.stop, 0

    return SliceCache


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
    """Return whether these are the arguments of torch.arange(length), or torch.arange(0,
    length)."""
    ends = tuple(args) or tuple(kwargs[name] for name in ("start", "end") if name in kwargs)
    return ends in ((length,), (0, length))


def firsts(index: Any, length: int) -> list[bool]:
    """Return for each item of an index whether it is `[:length]`."""
    return [
        type(item) is slice and _plain(item) and item.start in (None, 0) and item.stop == length
        for item in items_of(index)
    ]


def lasts(tensor: Tensor, index: Any, length: int) -> list[bool]:
    """Return for each item of an index whether it takes the last `length` of more."""
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


_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


class Calls(Ambient):
    """The mode in which a slice runs: keys and values joined, positions moved at the places
    given."""

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
    return Refusal.of(
        "S655",
        f"`{scope.site() or 'the model'}` attends {what}",
        notes=("a slice has the keys of the slices before it only: attention must be causal",),
        helps=(
            "write `scaled_dot_product_attention(q, k, v, is_causal=True)`",
            "or leave `slices` out of the row",
        ),
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
