"""Batches for a reduced model, made from batches of the full model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedlang.passes.reduce_model.sizes import reduction_refusal, special_ids

if TYPE_CHECKING:
    from torch import Tensor

Batch = Mapping[str, Any]
LENGTH = 12  # tokens of a longer sequence that stay
IGNORED = -100  # the label that torch's losses ignore


@dataclass(frozen=True)
class BatchReduction:
    """The changes of batches: new sizes of dims and vocabularies by old sizes, and special ids.

    `parts` are the numbers of parts of a batch before and after the reduction.
    """

    dims: Mapping[int, int]
    tables: Mapping[int, int]
    specials: tuple[int, ...]
    parts: tuple[int, int]


def reduce_batch(batch: Batch, reduction: BatchReduction) -> dict[str, Any]:
    """Return the batch with fewer rows, shorter sequences, smaller dims, and ids in the vocabulary.

    Of a long sequence some positions, spread over its length, stay; they are the same in all
    tensors, so that padding stays padding and labels stay with their tokens. Ids are taken modulo
    the smaller vocabulary; special ids and negative labels do not change. All else is unchanged.
    Refuses (S753) a tensor with one number per row that may be the row's length.
    """
    from torch import Tensor

    from schedlang.runtime.row_lists import is_row_list

    rows = _rows(batch)
    rows_kept = _new_rows(rows, *reduction.parts)
    lengths = _lengths(batch)
    reduced: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, Tensor):
            value = value[:rows_kept] if value.dim() and value.shape[0] == rows else value
            if value.dim() == 1 and key != "labels" and _counts_tokens(value, lengths):
                raise reduction_refusal(
                    "S753", f"`{key}` may count tokens, but sequences were shortened"
                )
            value = _shorten(value, lengths, reduction.dims)
            if _are_ids(value):
                value = _fold_ids(value, int(batch[key].max()), reduction)
        elif is_row_list(value, rows):
            value = value[:rows_kept]
        reduced[key] = value
    return reduced


def _rows(batch: Batch) -> int:
    from torch import Tensor

    return max((len(v) for v in batch.values() if isinstance(v, Tensor) and v.dim()), default=0)


def _new_rows(rows: int, old_parts: int, new_parts: int) -> int:
    """Return two rows per part, and one more where the full batch was not divisible."""
    return min(rows, 2 * new_parts + (1 if rows % old_parts and new_parts > 1 else 0))


def _lengths(batch: Batch) -> list[int]:
    """Return the lengths of the sequences of ids in a batch."""
    from torch import Tensor

    return [v.shape[1] for v in batch.values() if isinstance(v, Tensor) and _are_ids(v)]


def _counts_tokens(value: Tensor, lengths: Sequence[int]) -> bool:
    """Return whether a number of some row is above LENGTH and at most the length of a sequence."""
    is_integer = not value.is_floating_point() and value.numel() > 0
    return is_integer and any(LENGTH < int(value.max()) <= length for length in lengths)


def _are_ids(value: Tensor) -> bool:
    """Return whether a tensor may hold ids: integers, with two dims or more."""
    import torch

    is_integer = not value.is_floating_point() and value.dtype != torch.bool
    return is_integer and value.dim() >= 2 and value.numel() > 0


def _shorten(value: Tensor, lengths: Sequence[int], dims: Mapping[int, int]) -> Tensor:
    for dim in range(1, value.dim()):
        size = value.shape[dim]
        if size in lengths and size > LENGTH:
            places = [k * size // LENGTH for k in range(LENGTH)]
            value = value[(slice(None),) * dim + (places,)]
        elif size not in lengths and size in dims:
            value = value.narrow(dim, 0, dims[size])
    return value


def _fold_ids(ids: Tensor, largest: int, reduction: BatchReduction) -> Tensor:
    """Return ids mapped into the reduced vocabulary.

    The full vocabulary is the smallest table with more rows than the largest id.
    """
    import torch

    old_size = min((size for size in reduction.tables if size > largest), default=None)
    if old_size is None or reduction.tables[old_size] >= old_size:
        return ids
    size = reduction.tables[old_size]
    specials = special_ids(reduction.specials, size) if old_size == max(reduction.tables) else {}
    plain_ids = [v for v in range(size) if v not in specials.values()]
    folded = torch.tensor(plain_ids, dtype=ids.dtype)[ids % len(plain_ids)]
    for old_id, new_id in specials.items():
        folded = torch.where(ids == old_id, new_id, folded)
    return torch.where(ids < 0, ids, folded)
