"""Carried keys and values as the cache that models of transformers ask for theirs."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from schedlang.runtime import scope
from schedlang.runtime.carry import Visit


def cache(visit: Visit) -> Any:
    """A `past_key_values` for one slice: it knows all lengths, whichever layers run here."""
    return _class()(visit)


@functools.cache
def _class() -> type:
    """Made when first asked for: transformers is imported for its own models only."""
    from transformers.cache_utils import DynamicCache

    class SliceCache(DynamicCache):  # type: ignore[misc]
        """Answers for every layer alike; layers of other stages never call it."""

        def __init__(self, visit: Visit) -> None:
            super().__init__()
            self.visit = visit

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            """The keys and values of this slice behind those of the slices before."""
            if scope.visit() is not self.visit:  # only shapes are asked for
                stop = self.visit.span.stop
                sizes = [(*t.shape[:-2], stop, t.shape[-1]) for t in (key_states, value_states)]
                return key_states.new_empty(sizes[0]), value_states.new_empty(sizes[1])
            keys = self.visit.join((layer_idx, "keys"), key_states)
            return keys, self.visit.join((layer_idx, "values"), value_states)

        def get_seq_length(self, layer_idx: int = 0) -> int:
            """Tokens before this slice."""
            return self.visit.span.start

        def get_query_offset(self, layer_idx: int = 0) -> int:
            """Tokens before this slice."""
            return self.visit.span.start

        def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
            """Keys that this slice sees; their first is the first of the sequence."""
            return self.visit.span.stop, 0

    return SliceCache
