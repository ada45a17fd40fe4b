"""Embeddings and bags of which a rank holds some rows of the table, or a part of each row.

Each rank looks up its own rows and adds nothing for the others: the sum has them all.  A mean over
a bag is that sum over the number of all entries of the bag, which every rank knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from schedlang.ir.placement import P
from schedlang.runtime.bounds import check_within
from schedlang.runtime.sharding.shard import Edge, Forward, without_padding


def check_index(ids: Tensor, module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Refuse numbers that name no row of the table, of which a rank holds some."""
    helps = ("compare the size of the tokenizer's vocabulary with the model's",)
    check_within(ids, module.num_embeddings, "the index", "the embedding's rows", helps)


class Lookup(TorchFunctionMode):
    """The mode in which the rows of one module's weight are looked up by `rows`."""

    def __init__(self, module: nn.Embedding, rows: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.rows = module, rows

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The call, or the rows."""
        if func is F.embedding and args[1] is self.module.weight:
            return self.rows(args[0])
        return func(*args, **(kwargs or {}))


def around(module: nn.Embedding, rows: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    """The module's own forward around the rows; the rows alone if it is a plain one."""
    own = type(module).forward
    if own is nn.Embedding.forward:
        return rows

    def forward(ids: Tensor) -> Any:
        with Lookup(module, rows):
            return own(module, ids)

    return forward


class OwnRows(torch.autograd.Function):
    """The rows of a part of a table, zeros for numbers outside of it: ids[...] -> [..., width].

    Until backward it keeps the numbers alone, which the batch has anyway: their places in the part
    and whether they are in it would be nine bytes of each.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, first: int, pad: int | None) -> Tensor:
        """Look up what is here; `first` is the number of its first row, `pad` a row untrained."""
        ctx.save_for_backward(ids)
        ctx.first, ctx.height, ctx.pad = first, weight.shape[0], pad
        places, mine = _places(ids, first, ctx.height)
        return F.embedding(places, weight) * mine  # as proofs without ranks know a mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        """Add up what came for each row."""
        (ids,) = ctx.saved_tensors
        places, mine = _places(ids, ctx.first, ctx.height)
        pad, own = -1 if ctx.pad is None else ctx.pad, grads[0] * mine
        added = torch.ops.aten.embedding_dense_backward(own, places, ctx.height, pad, False)
        return None, added, None, None


def _own_rows(ids: Tensor, weight: Tensor, first: int, pad: int | None) -> Tensor:
    return cast(Tensor, OwnRows.apply(ids, weight, first, pad))  # type: ignore[no-untyped-call]


def _places(ids: Tensor, first: int, height: int) -> tuple[Tensor, Tensor]:
    """Places of rows in a part of so many from `first`, and which ones are in it [..., 1]."""
    local = ids - first
    return local.clamp(0, height - 1), ((local >= 0) & (local < height))[..., None]


def embedding(module: nn.Module, kind: str, edges: tuple[Edge, ...]) -> Forward:
    """An embedding that looks up only the rows, or the part of each, that this rank holds.

    Of the rows the sum has them all.
    """
    assert isinstance(module, nn.Embedding)
    edge = next((edge for edge in edges if isinstance(edge.computes, P)), None)
    others = [one for one in edges if one is not edge]
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
        for one in others:  # split along what each row holds
            rows = one.exit(without_padding(rows, one.computes, one.group))
        return rows

    return around(module, rows_of)


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
    check_index(ids, module)
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
