"""The layer of a sharded module: its forward on shards, chosen by the module's kind."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.placement import P
from schedlang.runtime.forward import below, layer_of
from schedlang.runtime.sharding import grid, norms
from schedlang.runtime.sharding.convolution import CONVOLUTIONS, POOLS, convolution, pool
from schedlang.runtime.sharding.embedding import embedding, embedding_bag
from schedlang.runtime.sharding.norms import batch_norm, group_norm
from schedlang.runtime.sharding.shard import Edge, Forward, projection, region
from schedlang.runtime.storage.saved import partial_sums, uncoded


@dataclass(eq=False)
class Sharded:
    """The layer of a sharded module.

    `kind` is a class name or a variant (see `FORWARDS`, `CHOSEN`); "": the module's own forward.
    """

    module: nn.Module
    kind: str
    edges: tuple[Edge, ...]
    inner: Forward | None = None  # the forward that `run` wraps
    run: Forward | None = None
    coded: bool = False  # whether an enclosing module compresses saved tensors
    name: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        # groups are not copied
        edges = (replace(e, arrivals=copy.deepcopy(e.arrivals, memo)) for e in self.edges)
        module = copy.deepcopy(self.module, memo)
        return Sharded(module, self.kind, tuple(edges), coded=self.coded, name=self.name)

    def __call__(self, inner: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run the sharded computation; `inner` is the module's own forward."""
        if kwargs and not args and self.kind:  # `norm(input=x)`: the split tensor comes first
            _, first, *_ = inspect.signature(type(self.module).forward).parameters
            args = (kwargs.pop(first),) if first in kwargs else ()
        run = self.run
        if run is None or not torch.compiler.is_compiling() and self.inner is not inner:
            run = forward_of(self, inner)
            if not torch.compiler.is_compiling():  # a compiled graph has no side effects
                self.inner, self.run = inner, run
        if not self.coded:  # torch.compile traces only this line
            return run(*args, **kwargs)
        with self._coding_context():
            return run(*args, **kwargs)

    def _coding_context(self) -> AbstractContextManager[None]:
        """Return the context that tells an enclosing coded module which saved tensors to keep."""
        if self.kind == "experts":
            return uncoded()
        sums = any(isinstance(edge.computes, P) for edge in self.edges)
        return partial_sums() if sums else nullcontext()


def without_graph(model: nn.Module) -> str:
    """Return why modules inside `model` cannot be compiled into a graph; "" if they can."""
    if any(layer_of(module, "decode") is not None for module in model.modules()):
        return "a weight in it is quantised, and dynamo has no graph for quantised weights"
    every = (layer_of(module, "sharded") for module in model.modules())
    if any(one is not None and one.kind.startswith("summa") for one in every):
        return "its weights lie on a grid, and dynamo has no graph for broadcasts along a line"
    return ""


def make_ready(model: nn.Module) -> None:
    """Build the forwards of sharded modules before torch.compile, which cannot trace the build."""
    for module in model.modules():
        sharded = layer_of(module, "sharded")
        if sharded is not None:
            sharded.inner = below(module, "sharded")
            sharded.run = forward_of(sharded, sharded.inner)


def know_coded(model: nn.Module) -> None:
    """Tell sharded modules that an enclosing module compresses its saved tensors."""
    for module in model.modules():
        sharded = layer_of(module, "sharded")
        if sharded is not None:
            sharded.coded = True


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
UNCALLED = "uncalled"  # kind of modules that the recorded forward did not call


def _refuse_uncalled(sharded: Sharded, *_: Any, **__: Any) -> Any:
    """Refuse the call of a module whose input layouts are unknown (S664)."""
    raise Refusal.of(
        "S664",
        f"`{sharded.name}` is sharded, and the batch of the build did not reach it",
        notes=("how tensors arrive at a sharded module is read from a forward of that batch",),
        helps=(
            f"build with a batch that reaches `{sharded.name}`: its first microbatch counts",
            "or leave its `shard` row out",
        ),
    )


# variants that rows choose: they may run the module's own forward
CHOSEN: Mapping[str, Callable[[Sharded, Forward], Forward]] = {
    "summa Linear": grid.projection,
    "summa Conv1D": grid.projection,
    "summa Embedding": grid.embedding,
    "cube Linear": grid.cube_projection,
    "cube Conv1D": grid.cube_projection,
    "cube Embedding": grid.cube_embedding,
    "norm": norms.norm,
    UNCALLED: lambda sharded, inner: partial(_refuse_uncalled, sharded),
    "experts": lambda sharded, inner: sharded.edges[0].told.forward_of(sharded, inner),  # Routing
}


def forward_of(sharded: Sharded, inner: Forward) -> Forward:
    """Return the forward of a sharded module; of kind "" its own forward between its edges."""
    if sharded.kind in CHOSEN:
        return CHOSEN[sharded.kind](sharded, inner)
    make = FORWARDS.get(sharded.kind)
    if make is None:
        return region(inner, sharded.edges)
    return make(sharded.module, sharded.kind, sharded.edges)
