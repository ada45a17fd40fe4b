"""Keys and values that slices of a sequence carry to later slices, and their gradients back."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from schedlang.runtime import scope

# ---- Keys and values that slices of one sequence carry to later slices, and their gradients
# back.
# A slice attends to the keys of all slices before it. Those come in as leaves, one per slice, so
# that the backwards of later slices leave what they owe in `.grad`; slices run backward in reverse
# order, and the backward of a slice starts also from its own keys, with the sum that lies there
# (Li et al., TeraPipe, ICML 2021; Sun et al., Seq1F1B, 2024).


@dataclass(frozen=True)
class Span:
    """The run [start, stop) of a sequence of `total` tokens; slice number `index`."""

    index: int
    start: int
    stop: int
    total: int

    @property
    def length(self) -> int:
        """How many tokens it has."""
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
        """Where the gradients of a slice's keys and values enter, and what later slices left."""
        found = [
            (edge, line.leaves[index].grad)
            for line in self._lines.values()
            if (edge := line.edges.get(index)) is not None
        ]
        there = [(edge, grad) for edge, grad in found if grad is not None]
        return [edge for edge, _ in there], [grad for _, grad in there]

    def leaves(self, index: int) -> list[Tensor]:
        """What a slice has taken of earlier ones, where gradients go back to it."""
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
        """Which of the slices it is."""
        return self.span.index

    def join(self, key: Hashable, new: Tensor, dim: int = -2) -> Tensor:
        """See Carried.join."""
        if self.carried is None:
            dim = dim % new.dim()
            return new.new_empty([*new.shape[:dim], self.span.stop, *new.shape[dim + 1 :]])
        return self.carried.join(key, new, dim, self.span)

    def hollow(self) -> Visit:
        """The same for shapes only: it notes nothing, and joins with nothing."""
        return Visit(None, self.span)


# ---- Carried keys and values as the cache that models of transformers ask for theirs.


def cache(span: Span) -> Any:
    """A `past_key_values` for one slice: it knows all lengths, whichever layers run here."""
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
