"""Keys and values that slices of a sequence pass to later slices, and their gradients back.

* `CarriedKeys`: a slice attends to the keys of all earlier slices.  These are autograd leaves, one
  per slice, so that the backwards of later slices accumulate gradients in `.grad`.  Slices run
  backward in reverse order; the backward of a slice starts from its loss and from its own keys,
  with these gradients (Li et al., TeraPipe, ICML 2021; Sun et al., Seq1F1B, 2024).
* `slice_cache`: carried keys and values as a cache for models of transformers.
* `SliceMode`: for models without a cache.  Causal calls of `scaled_dot_product_attention` get the
  keys of all earlier slices, and lines that count positions by the length of their input, such as
  `torch.arange(x.shape[1])` or `self.table[: x.shape[1]]`, count from the slice's start.
* `PositionLines`: finds these lines, also such as take the last rows of a table.
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
from schedlang.runtime.modes import AmbientMode

Place = tuple[str, int]  # (file, line)


@dataclass(frozen=True)
class SliceSpan:
    """The positions [start, stop) of slice number `index` of a sequence of `total` tokens."""

    index: int
    start: int
    stop: int
    total: int

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.stop - self.start


@dataclass
class _Line:
    """Keys or values of one attention along the full sequence: their memory, a leaf per slice."""

    whole: Tensor
    leaves: dict[int, Tensor] = field(default_factory=dict)
    edges: dict[int, GradientEdge | None] = field(default_factory=dict)


class CarriedKeys:
    """Keys and values of one microbatch on one stage, from the first forward to the last backward.

    All slices of a line share one tensor of the full length: no slice holds a copy of earlier ones.
    """

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}

    def join(self, key: Hashable, new: Tensor, dim: int, span: SliceSpan) -> Tensor:
        """Return the line `key` of all earlier slices and `new`, concatenated along `dim`.

        The first call for a slice records it; a second call, in a recomputation, returns the same.
        Raises LookupError if an earlier slice has no such line.
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
            own_slice = line.whole.data.narrow(dim, span.start, span.length).detach()
            line.leaves[span.index] = own_slice.requires_grad_(new.requires_grad)
        return joined

    def backward_roots(self, index: int) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return the gradient edges of a slice's keys and values, and their gradients.

        Later slices have accumulated these gradients.
        """
        edge_grads = [
            (edge, line.leaves[index].grad)
            for line in self._lines.values()
            if (edge := line.edges.get(index)) is not None
        ]
        present = [(edge, grad) for edge, grad in edge_grads if grad is not None]
        return [edge for edge, _ in present], [grad for _, grad in present]

    def earlier_leaves(self, index: int) -> list[Tensor]:
        """Return the keys and values of earlier slices to which a slice gives gradients."""
        return [
            line.leaves[earlier]
            for line in self._lines.values()
            if index in line.leaves
            for earlier in range(index)
            if line.leaves[earlier].requires_grad
        ]

    def free(self, index: int) -> None:
        """Free a slice's keys and values, after its backward."""
        for key, line in list(self._lines.items()):
            line.leaves.pop(index, None)
            line.edges.pop(index, None)
            if not line.leaves:
                del self._lines[key]


class _Join(torch.autograd.Function):
    """Write a slice behind the earlier slices, and return all, without a copy of the earlier."""

    @staticmethod
    def forward(
        ctx: Any, memory: Tensor, dim: int, span: SliceSpan, new: Tensor, *past: Tensor
    ) -> Tensor:
        ctx.dim, ctx.sizes = dim, [*(leaf.shape[dim] for leaf in past), new.shape[dim]]
        # separate tensors over one storage: a later slice's write does not change the version of
        # tensors that earlier slices have saved
        memory.data.narrow(dim, span.start, span.length).copy_(new)
        return memory.data.narrow(dim, 0, span.stop).data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *past, new = torch.split(grad, ctx.sizes, ctx.dim)
        return None, None, None, new, *past


@dataclass(frozen=True)
class SliceVisit:
    """One slice of one microbatch on one stage, while it runs."""

    carried: CarriedKeys | None
    span: SliceSpan
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
        """Return the positions of the slice's tokens, and of the keys that they see."""
        return {"rows": range(self.span.start, self.span.stop), "keys": range(self.span.stop)}

    def join(self, key: Hashable, new: Tensor, dim: int = -2) -> Tensor:
        """Concatenate with earlier slices, as `Carried.join`; without `carried` for shapes only."""
        if self.carried is None:
            dim = dim % new.dim()
            return new.new_empty([*new.shape[:dim], self.span.stop, *new.shape[dim + 1 :]])
        return self.carried.join(key, new, dim, self.span)

    def on_meta(self) -> SliceVisit:
        """Return the visit for shapes only: it records nothing."""
        return SliceVisit(None, self.span)


_CACHES = ("cache", "past_key_values")  # from transformers 5.24 on, and before


def cache_argument(model: nn.Module) -> str | None:
    """Return the name of a transformers model's argument for a cache; None if it has none."""
    if not any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
        return None
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in _CACHES if name in parameters), None)


def slice_cache(span: SliceSpan) -> Any:
    """Return the cache for one slice; its lengths do not depend on the layers of this stage."""
    return _cache_class()(span)


@functools.cache
def _cache_class() -> type:
    """Return the class of caches; imports transformers, which only its own models need."""
    from transformers.cache_utils import DynamicCache

    class SliceCache(DynamicCache):  # type: ignore[misc]
        """The cache of one slice, equal for every layer; layers of other stages do not call it."""

        def __init__(self, span: SliceSpan) -> None:
            super().__init__()
            self.span = span

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            """Return the keys and values of all earlier slices and of this slice."""
            visit = scope.current_visit()  # of this slice, perhaps for shapes only
            if visit is None or visit.span != self.span:
                raise LookupError("the cache of a slice is used outside its call")
            keys = visit.join((layer_idx, "keys"), key_states)
            return keys, visit.join((layer_idx, "values"), value_states)

        def _refuse(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError(
                "its cache holds states of convolutions or recurrences, not only keys and values"
            )

        update_conv_state = update_recurrent_state = update_indexer = _refuse
        get_conv_state = get_recurrent_state = has_previous_state = _refuse

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            """Return the cache itself: a recomputation, which copies arguments, needs its keys."""
            return self

        def get_seq_length(self, layer_idx: int = 0) -> int:
            """Return the number of tokens before this slice."""
            return self.span.start

        def get_query_offset(self, layer_idx: int = 0) -> int:
            """Return the number of tokens before this slice."""
            return self.span.start

        def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
            """Return the number of keys that this slice sees, and the position of the first, 0."""
            return self.span.stop, 0

    return SliceCache


_OURS = tuple(str(folder) for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))


class PositionLines(AmbientMode):
    """Mode that records in a full forward the lines that count positions up to its length.

    length  the number of tokens
    tables  ids of the model's parameters and buffers
    found   lines that count positions
    others  lines with similar calls that do not count positions; a line may be in both
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
            (self.found if counts_up_to(args, kwargs, self.length) else self.others).add(
                calling_line()
            )
        elif func is Tensor.__getitem__:
            is_prefix, table = any(takes_first(args[1], self.length)), id(args[0]) in self.tables
            if any(takes_last(args[0], args[1], self.length)) or (is_prefix and table):
                self.found.add(calling_line())
            elif is_prefix or table:
                self.others.add(calling_line())
        return self.run(func, types, args, kwargs)


def calling_line(within: Callable[..., Any] | None = None) -> Place:
    """Return the running line of the model: the innermost outside of torch and of schedlang.

    `("", 0)` while the line runs `within`, a function of schedlang: the model has not called.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        if within is not None and frame.f_code is within.__code__:
            return "", 0
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def counts_up_to(args: Sequence[Any], kwargs: Mapping[str, Any], length: int) -> bool:
    """Return whether arguments are those of `torch.arange(length)` or `torch.arange(0, length)`."""
    ends = tuple(args) or tuple(kwargs[name] for name in ("start", "end") if name in kwargs)
    return ends in ((length,), (0, length))


def takes_first(index: Any, length: int) -> list[bool]:
    """Return for each item of an index whether it is `[:length]`."""
    return [
        type(item) is slice and _plain(item) and item.start in (None, 0) and item.stop == length
        for item in index_items(index)
    ]


def takes_last(tensor: Tensor, index: Any, length: int) -> list[bool]:
    """Return for each item of an index whether it takes the last `length` of a longer dim."""
    items = index_items(index)
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


def index_items(index: Any) -> tuple[Any, ...]:
    """Return the items of an index as a tuple."""
    return index if isinstance(index, tuple) else (index,)


def _plain(item: slice) -> bool:
    numbers = (item.start, item.stop)
    return item.step in (None, 1) and all(n is None or isinstance(n, int) for n in numbers)


_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


class SliceMode(AmbientMode):
    """Mode in which a slice runs: carries keys and values, and shifts positions in `places`."""

    eager = "sequences run in slices, which pass keys and values on"

    def __init__(self, places: Collection[Place]) -> None:
        super().__init__()
        self.places = frozenset(places)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        visit = scope.current_visit()
        if visit is not None:
            if func is F.scaled_dot_product_attention:
                args, kwargs = _attend(visit, args, kwargs)
            elif self.places and func in POSITIONS and calling_line() in self.places:
                args, kwargs = POSITIONS[func](visit.span, args, kwargs)
        return self.run(func, types, args, kwargs)


def _attend(visit: SliceVisit, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    passed = {**dict(zip(_ARGUMENTS, args)), **kwargs}
    query, key, value = passed["query"], passed["key"], passed["value"]
    span, mask = visit.span, passed.get("attn_mask")
    if query.shape[-2] != span.length or key.shape[-2] != span.length:
        return args, kwargs  # not along the sequence
    causal = bool(passed.get("is_causal"))
    if not causal and (mask is None or mask.shape[-1] != span.stop):
        raise _not_causal(mask is None)
    if query.untyped_storage()._cdata == key.untyped_storage()._cdata:
        # as a view of fused queries, keys and values, the query would keep keys and values alive
        passed["query"] = query.clone()
    call_number = scope.count_call("keys and values")
    passed["key"] = visit.join((call_number, "keys"), key)
    passed["value"] = visit.join((call_number, "values"), value)
    if causal and span.start:
        passed["attn_mask"], passed["is_causal"] = _lower_right(visit, query), False
    return (), passed


def _lower_right(visit: SliceVisit, query: Tensor) -> Tensor:
    """Return the additive causal mask of a slice's queries over all keys so far.

    One mask for all layers, in the queries' dtype: from a boolean mask every call would make its
    own, and save it for backward.
    """
    key = f"mask {query.dtype}"
    if key not in visit.memo:
        span = visit.span
        hidden = query.new_full((span.length, span.stop), -math.inf)
        visit.memo[key] = hidden.triu(span.start + 1)
    mask: Tensor = visit.memo[key]
    return mask


def _not_causal(without: bool) -> Refusal:
    description = "without a mask" if without else "with a mask of its own slice only"
    return Refusal.of(
        "S655",
        f"`{scope.current_site() or 'the model'}` attends {description}",
        notes=("a slice has the keys of the slices before it only: attention must be causal",),
        helps=(
            "write `scaled_dot_product_attention(q, k, v, is_causal=True)`",
            "or leave `slices` out of the row",
        ),
    )


def _arange(span: SliceSpan, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Change `torch.arange(length)` and `torch.arange(0, length)` to the slice's positions."""
    if not counts_up_to(args, kwargs, span.length):
        return args, kwargs
    options = {name: value for name, value in kwargs.items() if name not in ("start", "end")}
    return (span.start, span.stop), options


def _getitem(span: SliceSpan, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Change `table[:length]` to the slice's positions; of two such dims the last is of keys."""
    tensor, index = args
    prefixes = takes_first(index, span.length)
    if not any(prefixes):
        return args, kwargs
    items, count = [], 0
    for item, is_prefix in zip(index_items(index), prefixes):
        count += is_prefix
        last = count == sum(prefixes) == 2
        items.append(slice(0 if last else span.start, span.stop) if is_prefix else item)
    return (tensor, tuple(items) if isinstance(index, tuple) else items[0]), kwargs


POSITIONS: dict[Any, Callable[[SliceSpan, Any, dict[str, Any]], tuple[Any, dict[str, Any]]]] = {
    torch.arange: _arange,
    Tensor.__getitem__: _getitem,
}
