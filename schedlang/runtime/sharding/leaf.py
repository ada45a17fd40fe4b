"""How each kind of sharded module computes with its parts, by the name of the kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from schedlang.runtime.sharding import cube, grid, split_norm
from schedlang.runtime.sharding.convolution import CONVOLUTIONS, POOLS, convolution, pool
from schedlang.runtime.sharding.shard import Edge, Forward, Sharded, embedding, projection, region
from schedlang.runtime.sharding.shared_norm import batch_norm, group_norm

FORWARDS: Mapping[str, Callable[[nn.Module, str, tuple[Edge, ...]], Forward]] = {
    "Linear": projection,
    "Conv1D": projection,
    "Embedding": embedding,
    **dict.fromkeys(CONVOLUTIONS, convolution),
    **dict.fromkeys(POOLS, pool),
    **dict.fromkeys((f"BatchNorm{dims}d" for dims in (1, 2, 3)), batch_norm),
    "GroupNorm": group_norm,
}
# kinds that rows choose: they may run the module's own forward
CHOSEN: Mapping[str, Callable[[Sharded], Forward]] = {
    "summa Linear": grid.projection,
    "summa Conv1D": grid.projection,
    "summa Embedding": grid.embedding,
    "cube Linear": cube.projection,
    "cube Conv1D": cube.projection,
    "cube Embedding": cube.embedding,
    "norm": split_norm.norm,
    "experts": lambda sharded: sharded.edges[0].told.forward_of(sharded),  # a `Routing`
}


def forward_of(sharded: Sharded) -> Forward:
    """The computation of a sharded module; without a kind it runs as it is between its edges."""
    if sharded.kind in CHOSEN:
        return CHOSEN[sharded.kind](sharded)
    make = FORWARDS.get(sharded.kind)
    if make is None:
        return region(sharded.inner, sharded.edges)
    return make(sharded.module, sharded.kind, sharded.edges)
