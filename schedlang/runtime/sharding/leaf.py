"""The forward of a sharded module: how each kind computes with its parts, by the kind's name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.ir.placement import P
from schedlang.runtime.forward import layer_of
from schedlang.runtime.sharding import grid, norms
from schedlang.runtime.sharding.convolution import CONVOLUTIONS, POOLS, convolution, pool
from schedlang.runtime.sharding.norms import batch_norm, group_norm
from schedlang.runtime.sharding.shard import (
    Edge,
    Forward,
    embedding,
    projection,
    region,
    without_padding,
)
from schedlang.runtime.storage.saved import summing, uncoded

# ---- An embedding bag with the rows, or the part of each row, that a rank holds.
# Of the rows the sum over a bag has them all: every rank looks up its own and adds nothing for the
# others; a mean is that sum over the number of all entries of the bag, which every rank knows.


def embedding_bag(module: nn.Module, kind: str, edges: tuple[Edge, ...]) -> Forward:
    """The lookup on this rank's part; weights of entries, which all ranks have, enter once."""
    assert isinstance(module, nn.EmbeddingBag)
    rows = next((edge for edge in edges if isinstance(edge.computes, P)), None)
    columns = [edge for edge in edges if edge is not rows]

    def forward(
        input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        scales = per_sample_weights
        if scales is not None:
            for edge in edges:
                scales = edge.enter(scales)  # each rank has a part of their gradient
        if rows is None:
            how = module.mode, module.padding_idx
            out = _looked_up(module, input, module.weight, offsets, scales, *how)
        else:
            out = rows.exit(_of_rows(module, input, offsets, scales, rows))
        for edge in columns:
            out = edge.exit(without_padding(out, edge.computes, edge.group))
        return out

    return forward


def _of_rows(
    module: nn.EmbeddingBag, ids: Tensor, offsets: Tensor | None, scales: Tensor | None, edge: Edge
) -> Tensor:
    """Return what this rank's rows add to each bag."""
    weight = module.weight
    width = weight.shape[0]
    local = ids - edge.group.rank * width
    counts = torch.ones_like(ids, dtype=weight.dtype)
    if module.padding_idx is not None:
        counts = (ids != module.padding_idx).to(weight.dtype)
    mine = counts * ((local >= 0) & (local < width))
    scales = mine if scales is None else scales * mine
    out = _looked_up(module, local.clamp(0, width - 1), weight, offsets, scales)
    if module.mode == "sum":
        return out
    one = torch.ones(1, 1, dtype=weight.dtype, device=weight.device)  # the same on every rank
    entries = _looked_up(module, torch.zeros_like(ids), one, offsets, counts)
    return out / entries.clamp(min=1)


def _looked_up(
    module: nn.EmbeddingBag,
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    scales: Tensor | None,
    mode: str = "sum",
    padding: int | None = None,
) -> Tensor:
    """One lookup in a table, by the bags of the module."""
    return F.embedding_bag(
        ids,
        weight,
        offsets,
        mode=mode,
        per_sample_weights=scales,
        include_last_offset=module.include_last_offset,
        padding_idx=padding,
    )


# ---- The forward of a sharded module: how each kind computes with its parts, by the kind's name.


@dataclass(eq=False)
class Sharded:
    """The layer of a sharded module; `kind` is the class that says how it computes, or ""."""

    module: nn.Module
    kind: str
    edges: tuple[Edge, ...]
    inner: Forward | None = None  # what `run` was made around
    run: Forward | None = None
    coded: bool = False  # whether a module around it is

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        # groups are not copied
        edges = (replace(e, arrivals=copy.deepcopy(e.arrivals, memo)) for e in self.edges)
        module = copy.deepcopy(self.module, memo)
        return Sharded(module, self.kind, tuple(edges), coded=self.coded)

    def __call__(self, inner: Forward, *args: Any, **kwargs: Any) -> Any:
        """The sharded computation, in which `inner` is the module's own."""
        run = self.run
        if run is None or self.inner is not inner:
            run = forward_of(self, inner)
            if not torch.compiler.is_compiling():  # a graph changes nothing outside of it
                self.inner, self.run = inner, run
        if not self.coded:  # what is compiled sees no more than this
            return run(*args, **kwargs)
        with self._around():
            return run(*args, **kwargs)

    def _around(self) -> AbstractContextManager[None]:
        """Return the context that tells a coded module around of what no single process has."""
        if self.kind == "experts":
            return uncoded()
        sums = any(isinstance(edge.computes, P) for edge in self.edges)
        return summing() if sums else nullcontext()


def know_coded(model: nn.Module) -> None:
    """Let sharded modules say what of them a coded module around them keeps as it is."""
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
# kinds that rows choose: they may run the module's own forward
CHOSEN: Mapping[str, Callable[[Sharded, Forward], Forward]] = {
    "summa Linear": grid.projection,
    "summa Conv1D": grid.projection,
    "summa Embedding": grid.embedding,
    "cube Linear": grid.cube_projection,
    "cube Conv1D": grid.cube_projection,
    "cube Embedding": grid.cube_embedding,
    "norm": norms.norm,
    "experts": lambda sharded, inner: sharded.edges[0].told.forward_of(sharded, inner),  # Routing
}


def forward_of(sharded: Sharded, inner: Forward) -> Forward:
    """The computation of a sharded module; without a kind it runs as it is between its edges."""
    if sharded.kind in CHOSEN:
        return CHOSEN[sharded.kind](sharded, inner)
    make = FORWARDS.get(sharded.kind)
    if make is None:
        return region(inner, sharded.edges)
    return make(sharded.module, sharded.kind, sharded.edges)
