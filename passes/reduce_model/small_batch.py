"""Batches for a reduced model, from those that were made for the whole one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedlang.passes.reduce_model.sizes import refused, special_ids

if TYPE_CHECKING:
    from torch import Tensor

Batch = Mapping[str, Any]
LENGTH = 12  # tokens that are kept of a longer row
IGNORED = -100  # the label that torch's losses leave out


@dataclass(frozen=True)
class Cutting:
    """Changes of batches: dims by their old size, vocabularies (old and new rows), special ids.

    `parts` are the parts that a batch is cut into, before and after the reduction.
    """

    dims: Mapping[int, int]
    tables: Mapping[int, int]
    specials: tuple[int, ...]
    parts: tuple[int, int]


def small(batch: Batch, how: Cutting) -> dict[str, Any]:
    """The batch with fewer rows, shorter sequences, smaller dims, and ids below the vocabulary.

    Of a long sequence places spread over all of it are kept, alike in all tensors, so that padding
    stays padding and labels stay beside their tokens.  Ids go round in the smaller vocabulary;
    special ids and negative labels stay what they are.  Everything else is passed on as it is,
    but for a number for each row that may be its length: it is refused (S753).
    """
    from torch import Tensor

    rows = _rows(batch)
    kept = _kept_rows(rows, *how.parts)
    lengths = _lengths(batch)
    out: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, Tensor):
            value = value[:kept] if value.dim() and value.shape[0] == rows else value
            if value.dim() == 1 and key != "labels" and _counts_tokens(value, lengths):
                raise refused("S753", f"`{key}` may count tokens, but sequences were shortened")
            value = _shorter(value, lengths, how.dims)
            if _are_ids(value):
                value = _folded(value, int(batch[key].max()), how)
        out[key] = value
    return out


def _rows(batch: Batch) -> int:
    from torch import Tensor

    return max((len(v) for v in batch.values() if isinstance(v, Tensor) and v.dim()), default=0)


def _kept_rows(rows: int, before: int, after: int) -> int:
    """Two rows a part, and one more where the rows of the whole batch did not divide."""
    return min(rows, 2 * after + (1 if rows % before and after > 1 else 0))


def _lengths(batch: Batch) -> list[int]:
    """The lengths of sequences of ids."""
    from torch import Tensor

    return [v.shape[1] for v in batch.values() if isinstance(v, Tensor) and _are_ids(v)]


def _counts_tokens(value: Tensor, lengths: Sequence[int]) -> bool:
    """A number for each row, too large for what is left of a row and right for all of it."""
    whole = not value.is_floating_point() and value.numel() > 0
    return whole and any(LENGTH < int(value.max()) <= length for length in lengths)


def _are_ids(value: Tensor) -> bool:
    """Whole numbers, a row of them for each row of the batch."""
    import torch

    whole = not value.is_floating_point() and value.dtype != torch.bool
    return whole and value.dim() >= 2 and value.numel() > 0


def _shorter(value: Tensor, lengths: Sequence[int], dims: Mapping[int, int]) -> Tensor:
    for dim in range(1, value.dim()):
        size = value.shape[dim]
        if size in lengths and size > LENGTH:
            places = [k * size // LENGTH for k in range(LENGTH)]
            value = value[(slice(None),) * dim + (places,)]
        elif size not in lengths and size in dims:
            value = value.narrow(dim, 0, dims[size])
    return value


def _folded(ids: Tensor, largest: int, how: Cutting) -> Tensor:
    """Ids in the smallest vocabulary that holds the largest of them."""
    import torch

    old = min((size for size in how.tables if size > largest), default=None)
    if old is None or how.tables[old] >= old:
        return ids
    size = how.tables[old]
    specials = special_ids(how.specials, size) if old == max(how.tables) else {}
    plain = [v for v in range(size) if v not in specials.values()]
    new = torch.tensor(plain, dtype=ids.dtype)[ids % len(plain)]
    for before, after in specials.items():
        new = torch.where(ids == before, after, new)
    return torch.where(ids < 0, ids, new)
