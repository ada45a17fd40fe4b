"""Lists and numpy arrays of a batch that have an entry for each row: texts, boxes of each image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from schedlang.ir import pytree


def is_row_list(value: Any, count: int) -> bool:
    """Return whether a value of a batch of `count` rows has one entry for each row, in its order.

    That is an array of so many rows, or a list or tuple of so many texts, or of so many entries
    that hold tensors. If these tensors all have `count` rows, they are features of all rows: only
    they are split. Numbers are no entries of rows, as in `size=[224, 224]`.
    """
    if type(value).__module__ == "numpy":
        return getattr(value, "ndim", 0) > 0 and value.shape[0] == count
    if type(value) not in (list, tuple) or len(value) != count:
        return False
    if all(isinstance(entry, str | bytes) for entry in value):
        return True
    tensors = [[t for t in pytree.tree_leaves(e) if isinstance(t, Tensor)] for e in value]
    return all(tensors) and any(t.shape[:1] != (count,) for entry in tensors for t in entry)


def take_rows(value: Any, index: Tensor) -> Any:
    """Return the entries of such a list or array at the numbers in `index`, as its class."""
    if isinstance(value, list | tuple):
        return type(value)(value[number] for number in index.tolist())
    return value[index.numpy()]


def describe_number_lists(batch: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Return notes on lists of numbers with a multiple of `count` entries, which are not split."""
    lists = {key: value for key, value in batch.items() if type(value) in (list, tuple) and value}
    return tuple(
        f"`{key}` is a {type(value).__name__} of {len(value)} numbers: it is not split by rows, and"
        " each part has all of it; a tensor of one entry for each row is split"
        for key, value in lists.items()
        if count > 1 and len(value) % count == 0
        if all(isinstance(entry, int | float) for entry in value)
    )
