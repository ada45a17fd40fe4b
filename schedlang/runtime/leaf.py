"""How each kind of sharded module computes with its parts, by the name of the kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from schedlang.runtime.convolution import CONVOLUTIONS, POOLS, convolution, pool
from schedlang.runtime.shard import Edge, Forward, embedding, projection
from schedlang.runtime.shared_norm import batch_norm, group_norm

FORWARDS: Mapping[str, Callable[[nn.Module, str, tuple[Edge, ...]], Forward]] = {
    "Linear": projection,
    "Conv1D": projection,
    "Embedding": embedding,
    **dict.fromkeys(CONVOLUTIONS, convolution),
    **dict.fromkeys(POOLS, pool),
    **dict.fromkeys((f"BatchNorm{dims}d" for dims in (1, 2, 3)), batch_norm),
    "GroupNorm": group_norm,
}
