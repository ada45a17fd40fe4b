"""Attention over a sequence that is split over ranks: every method, as functions of tensors.

    layout = Layout.of("zigzag", total=8192, ranks=4)
    mine = layout.take(tokens, dim=1, place=place_of(groups))
    out = attend(q, k, v, Mask(causal=True), Way("ring", (group,), layout))

q is [batch, heads, local tokens, head_dim]; k and v may have fewer heads, v another head_dim.
All of it is differentiable, and on meta tensors it counts what it would send.
"""

from schedlang.runtime.context_parallel.attention import (
    METHODS,
    Way,
    attend,
    attend_lse,
    place_of,
    ranks_of,
    refuse_heads,
)
from schedlang.runtime.context_parallel.masks import Dropout, Mask
from schedlang.runtime.context_parallel.token_layout import KINDS, Layout

__all__ = [
    "KINDS",
    "METHODS",
    "Dropout",
    "Layout",
    "Mask",
    "Way",
    "attend",
    "attend_lse",
    "place_of",
    "ranks_of",
    "refuse_heads",
]
