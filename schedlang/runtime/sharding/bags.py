"""An embedding bag with the rows, or the part of each row, that a rank holds.

Of the rows the sum over a bag has them all: every rank looks up its own and adds nothing for the
others; a mean is that sum over the number of all entries of the bag, which every rank knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.placement import P
from schedlang.runtime.sharding.shard import Edge, without_padding

Forward = Callable[..., Any]


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
                scales = edge.entry()(scales)  # each rank has a part of their gradient
        if rows is None:
            how = module.mode, module.padding_idx
            out = _looked_up(module, input, module.weight, offsets, scales, *how)
        else:
            out = rows.exit()(_of_rows(module, input, offsets, scales, rows))
        for edge in columns:
            out = edge.exit()(without_padding(out, edge.computes, edge.group))
        return out

    return forward


def _of_rows(
    module: nn.EmbeddingBag, ids: Tensor, offsets: Tensor | None, scales: Tensor | None, edge: Edge
) -> Tensor:
    """What this rank's rows add to each bag."""
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
    one = weight.new_ones(1, 1)
    entries = _looked_up(module, torch.zeros_like(ids), one, offsets, counts)
    return out / entries.clamp(min=1)


def _looked_up(
    module: nn.EmbeddingBag, ids: Tensor, weight: Tensor, offsets: Tensor | None,
    scales: Tensor | None, mode: str = "sum", padding: int | None = None,
) -> Tensor:  # fmt: skip
    """One lookup in a table, by the bags of the module."""
    return F.embedding_bag(
        ids, weight, offsets, mode=mode, per_sample_weights=scales,
        include_last_offset=module.include_last_offset, padding_idx=padding,
    )  # fmt: skip
