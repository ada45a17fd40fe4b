"""Carried keys and values as the cache that models of transformers ask for theirs."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from schedlang.runtime import scope
from schedlang.runtime.slicing.carry import Span


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
