"""The forward of a sharded module: how each kind computes with its parts, by the kind's name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from schedlang.placement import P
from schedlang.runtime.forward import layers_of
from schedlang.runtime.sharding import cube, grid, split_norm
from schedlang.runtime.sharding.bags import embedding_bag
from schedlang.runtime.sharding.convolution import CONVOLUTIONS, POOLS, convolution, pool
from schedlang.runtime.sharding.shard import Edge, Forward, embedding, projection, region
from schedlang.runtime.sharding.shared_norm import batch_norm, group_norm
from schedlang.runtime.storage.fewer import summing, uncoded


class Sharded:
    """The forward of a sharded module; `kind` is the class that says how it computes, or "".

    An object, not a closure: in a deep copy of the model it is bound to the copied module.
    """

    def __init__(
        self, module: nn.Module, kind: str, edges: tuple[Edge, ...], inner: Forward | None = None
    ) -> None:
        self.module, self.kind, self.edges = module, kind, edges
        self.inner: Forward = module.forward if inner is None else inner
        self.run: Forward | None = None
        self.coded = False  # whether a module around it is

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        made = Sharded.__new__(Sharded)
        memo[id(self)] = made
        made.module, made.kind = copy.deepcopy(self.module, memo), self.kind
        made.inner, made.edges = copy.deepcopy(self.inner, memo), self.edges
        made.run, made.coded = None, self.coded
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The sharded computation."""
        if self.run is None:
            self.run = forward_of(self)
        if not self.coded:  # what is compiled sees no more than this
            return self.run(*args, **kwargs)
        with self._around():
            return self.run(*args, **kwargs)

    def _around(self) -> AbstractContextManager[None]:
        """What of this computation no single process has, to a coded module around it."""
        if self.kind == "experts":
            return uncoded()
        sums = any(isinstance(edge.computes, P) for edge in self.edges)
        return summing() if sums else nullcontext()


def know_coded(model: nn.Module) -> None:
    """Let sharded modules say what of them a coded module around them keeps as it is."""
    for module in model.modules():
        layers = layers_of(module)
        forward = layers.original if layers is not None else vars(module).get("forward")
        if isinstance(forward, Sharded):
            forward.coded = True


FORWARDS: Mapping[str, Callable[[nn.Module, str, tuple[Edge, ...]], Forward]] = {
    "Linear": projection,
    "Conv1D": projection,
    "Embedding": embedding,
    "EmbeddingBag": embedding_bag,
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
