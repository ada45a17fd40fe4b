"""Embeddings and embedding bags whose table is sharded by rows or by columns.

By rows, each rank looks up its own rows and gives zeros for the others; an all-reduce adds them up.
The mean over a bag is this sum divided by the bag's number of entries, which every rank knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from schedlang.ir.placement import P
from schedlang.runtime.index_bounds import check_indices
from schedlang.runtime.sharding.edges import Edge, Forward, mask_padding


def check_index(ids: Tensor, module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Refuse indices beyond the table's rows: a rank that holds a shard would not notice them."""
    helps = ("compare the size of the tokenizer's vocabulary with the model's",)
    check_indices(ids, module.num_embeddings, "the index", "the embedding's rows", helps)


class LookupMode(TorchFunctionMode):
    """Mode in which lookups in one module's weight are done by `rows`."""

    def __init__(self, module: nn.Embedding, rows: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.rows = module, rows

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the call; a lookup in the module's weight by `rows`."""
        if func is F.embedding and args[1] is self.module.weight:
            return self.rows(args[0])
        return func(*args, **(kwargs or {}))


def wrap_lookup(module: nn.Embedding, rows: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    """Return the module's own forward with lookups by `rows`; for a plain Embedding `rows`."""
    own_forward = type(module).forward
    if own_forward is nn.Embedding.forward:
        return rows

    def forward(ids: Tensor) -> Any:
        with LookupMode(module, rows):
            return own_forward(module, ids)

    return forward


class LocalRows(torch.autograd.Function):
    """Lookup in a shard of a table's rows, zeros for other indices: ids[...] -> [..., width].

    Only the indices are saved for backward, which the batch has anyway: local indices and a mask
    would be nine more bytes for each.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, first: int, pad: int | None) -> Tensor:
        """Look up local rows; `first`: number of the first, `pad`: local row without a gradient."""
        ctx.save_for_backward(ids)
        ctx.first, ctx.height, ctx.pad = first, weight.shape[0], pad
        indices, is_local = _local_indices(ids, first, ctx.height)
        # proofs without ranks recognise this product as a mask
        return F.embedding(indices, weight) * is_local

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        """Sum the gradients of each local row."""
        (ids,) = ctx.saved_tensors
        indices, is_local = _local_indices(ids, ctx.first, ctx.height)
        pad, own_grad = -1 if ctx.pad is None else ctx.pad, grads[0] * is_local
        added = torch.ops.aten.embedding_dense_backward(own_grad, indices, ctx.height, pad, False)
        return None, added, None, None


def _own_rows(ids: Tensor, weight: Tensor, first: int, pad: int | None) -> Tensor:
    return cast(Tensor, LocalRows.apply(ids, weight, first, pad))  # type: ignore[no-untyped-call]


def _local_indices(ids: Tensor, first: int, height: int) -> tuple[Tensor, Tensor]:
    """Return ids as indices into `height` rows from `first`, and a mask [..., 1] of local ids."""
    local = ids - first
    return local.clamp(0, height - 1), ((local >= 0) & (local < height))[..., None]


def embedding(module: nn.Module, kind: str, edges: tuple[Edge, ...]) -> Forward:
    """Return the forward of a sharded embedding: lookup in this rank's rows or columns, then exit.

    Lookups in shards of rows are summed over the ranks.
    """
    assert isinstance(module, nn.Embedding)
    edge = next((edge for edge in edges if isinstance(edge.output_before, P)), None)
    other_edges = [other_edge for other_edge in edges if other_edge is not edge]
    group = edge.group if edge is not None else None
    width = module.weight.shape[0]
    first = group.rank * width if group is not None else 0
    pad = module.padding_idx
    local_pad = pad - first if pad is not None and first <= pad < first + width else None

    def rows_of(ids: Tensor) -> Tensor:
        if edge is None:
            rows = F.embedding(ids, module.weight, local_pad)
        else:
            check_index(ids, module)
            rows = edge.exit(_own_rows(ids, module.weight, first, local_pad))
        for other_edge in other_edges:  # split by columns
            rows = other_edge.exit(mask_padding(rows, other_edge.output_before, other_edge.group))
        return rows

    return wrap_lookup(module, rows_of)


def embedding_bag(module: nn.Module, kind: str, edges: tuple[Edge, ...]) -> Forward:
    """Return the forward of a sharded bag: lookup in this rank's shard, then exit.

    The entries' weights are replicated, and enter each edge once.
    """
    assert isinstance(module, nn.EmbeddingBag)
    rows = next((edge for edge in edges if isinstance(edge.output_before, P)), None)
    columns = [edge for edge in edges if edge is not rows]

    def forward(
        input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        scales = per_sample_weights
        if scales is not None:
            for edge in edges:
                scales = edge.enter(scales)  # their gradient is partial on each rank
        if rows is None:
            options = module.mode, module.padding_idx
            output = _look_up_bags(module, input, module.weight, offsets, scales, *options)
        else:
            output = rows.exit(_sum_local_rows(module, input, offsets, scales, rows))
        for edge in columns:
            output = edge.exit(mask_padding(output, edge.output_before, edge.group))
        return output

    return forward


def _sum_local_rows(
    module: nn.EmbeddingBag, ids: Tensor, offsets: Tensor | None, scales: Tensor | None, edge: Edge
) -> Tensor:
    """Return the sum of this rank's rows in each bag; for a mean, divided by all entries."""
    weight = module.weight
    width = weight.shape[0]
    check_index(ids, module)
    local = ids - edge.group.rank * width
    counts = torch.ones_like(ids, dtype=weight.dtype)
    if module.padding_idx is not None:
        counts = (ids != module.padding_idx).to(weight.dtype)
    local_counts = counts * ((local >= 0) & (local < width))
    scales = local_counts if scales is None else scales * local_counts
    total = _look_up_bags(module, local.clamp(0, width - 1), weight, offsets, scales)
    if module.mode == "sum":
        return total
    ones = torch.ones(1, 1, dtype=weight.dtype, device=weight.device)  # the same on every rank
    entries = _look_up_bags(module, torch.zeros_like(ids), ones, offsets, counts)
    return total / entries.clamp(min=1)


def _look_up_bags(
    module: nn.EmbeddingBag,
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    scales: Tensor | None,
    mode: str = "sum",
    padding: int | None = None,
) -> Tensor:
    """Look up bags in a table, with the module's convention of offsets."""
    return F.embedding_bag(
        ids,
        weight,
        offsets,
        mode=mode,
        per_sample_weights=scales,
        include_last_offset=module.include_last_offset,
        padding_idx=padding,
    )
