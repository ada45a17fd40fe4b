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
from schedlang.runtime.forward import forward_below, layer_of
from schedlang.runtime.sharding import grid, norms
from schedlang.runtime.sharding.convolution import CONVOLUTIONS, POOLS, convolution, pool
from schedlang.runtime.sharding.edges import Edge, Forward, projection, wrap_forward
from schedlang.runtime.sharding.embedding import embedding, embedding_bag
from schedlang.runtime.sharding.norms import batch_norm, group_norm
from schedlang.runtime.storage.saved_tensors_slot import partial_sums, without_quantization


@dataclass(eq=False)
class ShardedLayer:
    """The layer of a sharded module.

    `kind` is a class name or a variant (see `FORWARDS`, `VARIANTS`); "": the module's own forward.
    """

    module: nn.Module
    kind: str
    edges: tuple[Edge, ...]
    wrapped: Forward | None = None  # the forward that `run` wraps
    run: Forward | None = None
    in_coded_module: bool = False  # whether an enclosing module compresses saved tensors
    name: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedLayer:
        # groups are not copied
        edges = (replace(e, cache=copy.deepcopy(e.cache, memo)) for e in self.edges)
        module = copy.deepcopy(self.module, memo)
        return ShardedLayer(
            module, self.kind, tuple(edges), in_coded_module=self.in_coded_module, name=self.name
        )

    def __call__(self, inner: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run the sharded computation; `inner` is the module's own forward."""
        if kwargs and not args and self.kind:  # `norm(input=x)`: the split tensor comes first
            _, input_name, *_ = inspect.signature(type(self.module).forward).parameters
            args = (kwargs.pop(input_name),) if input_name in kwargs else ()
        forward = self.run
        if forward is None or not torch.compiler.is_compiling() and self.wrapped is not inner:
            forward = forward_of(self, inner)
            if not torch.compiler.is_compiling():  # a compiled graph has no side effects
                self.wrapped, self.run = inner, forward
        if not self.in_coded_module:  # torch.compile traces only this line
            return forward(*args, **kwargs)
        with self._coding_context():
            return forward(*args, **kwargs)

    def _coding_context(self) -> AbstractContextManager[None]:
        """Return the context that tells an enclosing coded module which saved tensors to keep."""
        if self.kind == "experts":
            return without_quantization()
        sums = any(isinstance(edge.output_before, P) for edge in self.edges)
        return partial_sums() if sums else nullcontext()


def graph_obstacle(model: nn.Module) -> str:
    """Return why modules inside `model` cannot be compiled into a graph; "" if they can."""
    if any(layer_of(module, "decode") is not None for module in model.modules()):
        return "a weight in it is quantised, and dynamo has no graph for quantised weights"
    if any(layer_of(module, "gathered") is not None for module in model.modules()):
        return "rows are gathered in it, and dynamo has no graph for numbers of rows of other ranks"
    layers = (layer_of(module, "sharded") for module in model.modules())
    if any(layer is not None and layer.kind.startswith("summa") for layer in layers):
        return "its weights lie on a grid, and dynamo has no graph for broadcasts along a line"
    return ""


def build_forwards(model: nn.Module) -> None:
    """Build the forwards of sharded modules before torch.compile, which cannot trace the build."""
    for module in model.modules():
        sharded = layer_of(module, "sharded")
        if sharded is not None:
            sharded.wrapped = forward_below(module, "sharded")
            sharded.run = forward_of(sharded, sharded.wrapped)


def mark_coded(model: nn.Module) -> None:
    """Tell sharded modules that an enclosing module compresses its saved tensors."""
    for module in model.modules():
        sharded = layer_of(module, "sharded")
        if sharded is not None:
            sharded.in_coded_module = True


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
UNCHOSEN = "unchosen"  # of those where values that the forward computes may decide that


def _refuse_uncalled(sharded: ShardedLayer, *_: Any, **__: Any) -> Any:
    """Refuse the call of a module whose input layouts are unknown (S664)."""
    skips = sharded.kind == UNCHOSEN
    always = (
        f"let the forward call `{sharded.name}` for every batch, also with no rows: without a"
        " condition such as `if counts[i] == 0: continue`",
    )
    computed = ("values that the forward computes are not known there: counts are zero",)
    raise Refusal.of(
        "S664",
        f"`{sharded.name}` is sharded, and the batch of the build did not reach it",
        notes=(
            "how tensors arrive at a sharded module is read from a forward of that batch",
            *(computed if skips else ()),
        ),
        helps=(
            *(always if skips else ()),
            f"{'or ' * skips}build with a batch that reaches `{sharded.name}`: its first"
            " microbatch counts",
            "or leave its `shard` row out",
        ),
    )


# variants that rows choose: they may run the module's own forward
VARIANTS: Mapping[str, Callable[[ShardedLayer, Forward], Forward]] = {
    "summa Linear": grid.grid_projection,
    "summa Conv1D": grid.grid_projection,
    "summa Embedding": grid.grid_embedding,
    "cube Linear": grid.cube_projection,
    "cube Conv1D": grid.cube_projection,
    "cube Embedding": grid.cube_embedding,
    "norm": norms.hidden_norm,
    UNCALLED: lambda sharded, inner: partial(_refuse_uncalled, sharded),
    UNCHOSEN: lambda sharded, inner: partial(_refuse_uncalled, sharded),
    # Routing
    "experts": lambda sharded, inner: sharded.edges[0].variant.forward_of(sharded, inner),
}


def forward_of(sharded: ShardedLayer, inner: Forward) -> Forward:
    """Return the forward of a sharded module; of kind "" its own forward between its edges."""
    if sharded.kind in VARIANTS:
        return VARIANTS[sharded.kind](sharded, inner)
    make = FORWARDS.get(sharded.kind)
    if make is None:
        return wrap_forward(inner, sharded.edges)
    return make(sharded.module, sharded.kind, sharded.edges)
