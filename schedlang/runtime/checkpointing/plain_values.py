"""Values that are no shards of a tensor, as the plain data of a checkpoint, and back.

An optimizer has such values: hyperparameters, numbers of steps, lists of tensors, a table of its
own. Numbers of numpy, and subclasses of int, float and str, become plain ones: a checkpoint is read
without running anything, so other classes could not be read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.storage.offloaded_gradients import local_tensor

_TABLE = "table"  # the one key of a dict that stands for a table of the optimizer


def to_plain(name: str, value: Any) -> Any:
    """Return a value of an optimizer as plain data; tensors go to the CPU, with a note if they were
    elsewhere.

    Raises Refusal S637 for an object of another class.
    """
    if isinstance(value, Tensor):
        return {"tensor": local_tensor(value).cpu().clone(), "moved": not value.is_cpu}
    if isinstance(value, Mapping):
        rows = [
            (to_plain(f"{name}: a key", k), to_plain(f"{name}.{k}", v)) for k, v in value.items()
        ]
        return {_TABLE: rows}
    if isinstance(value, list | tuple):
        items = [to_plain(name, item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    value = plain_scalar(value)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    raise Refusal.of(
        "S637",
        f"`{name}` of the optimizer is a `{type(value).__name__}`",
        notes=("a checkpoint may hold tensors, numbers and strings",),
        helps=("remove it from the optimizer's state before saving",),
    )


def from_plain(value: Any, device: torch.device) -> Any:
    """Return the value of `to_plain`, on a parameter's device if it was not on the CPU."""
    if isinstance(value, dict) and _TABLE in value:
        return {key: from_plain(item, device) for key, item in value[_TABLE]}
    if isinstance(value, dict):
        copy: Tensor = value["tensor"].clone()
        return copy.to(device) if value["moved"] else copy
    if isinstance(value, list | tuple):
        return type(value)(from_plain(item, device) for item in value)
    return value


def is_plain(value: Any) -> bool:
    """Return whether a value that was read is one that `to_plain` returns."""
    if is_table(value):
        return True
    if isinstance(value, dict):
        tensor, moved = value.get("tensor"), value.get("moved")
        return len(value) == 2 and type(tensor) is Tensor and isinstance(moved, bool)
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def is_table(value: Any) -> bool:
    """Return whether a value that was read is a table, as `to_plain` returns it for a dict."""
    if not isinstance(value, dict) or value.keys() != {_TABLE}:
        return False
    rows = value[_TABLE]
    return isinstance(rows, list) and all(map(_is_row, rows))


def _is_row(row: Any) -> bool:
    pair = isinstance(row, tuple) and len(row) == 2 and is_plain(row[1])
    return pair and isinstance(row[0], bool | int | float | str | type(None))


def plain_scalar(value: Any) -> Any:
    """Return a number or text of any class as one of Python's own; other values as they are."""
    if isinstance(value, np.generic):
        return value.item()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            plain: Any = kind.__str__(value) if kind is str else kind(value)
            return plain
    return value


def plain_tree(value: Any) -> Any:
    """Return nested dicts, lists and tuples with plain scalars."""
    if type(value) is dict:
        return {plain_scalar(key): plain_tree(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain_tree, value))
    return plain_scalar(value)


def equal_values(a: Any, b: Any) -> bool:
    """Return whether plain values are equal, with the classes and dtypes of what is in them."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() == b.keys() == {_TABLE}:
            a, b = dict(a[_TABLE]), dict(b[_TABLE])
        return a.keys() == b.keys() and all(equal_values(a[k], b[k]) for k in a)
    if isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str):
        return len(a) == len(b) and all(map(equal_values, a, b))
    return type(a) is type(b) and bool(a == b)


def can_replace(current: Any, saved: Any) -> bool:
    """Return whether a saved value may replace this one."""
    if isinstance(saved, dict) and _TABLE in saved:
        return current is None or isinstance(current, Mapping)
    if isinstance(saved, dict) and isinstance(current, Tensor):
        return bool(saved["tensor"].shape == current.shape)
    current = plain_scalar(current)
    if isinstance(current, Tensor) or type(current) in (int, float):
        one_element = isinstance(saved, dict) and saved["tensor"].numel() == 1
        return one_element or type(saved) in (int, float)
    if isinstance(current, list | tuple) and isinstance(saved, list | tuple):
        return len(current) == len(saved) and all(map(can_replace, current, saved))
    return current is None or saved is None or type(current) is type(saved)


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists and tables of a plain value, not one that is the value itself."""
    if isinstance(value, dict) and _TABLE in value:
        value = [item for _, item in value[_TABLE]]
    for item in value if isinstance(value, list | tuple) else ():
        if isinstance(item, dict) and "tensor" in item:
            yield item["tensor"]
        else:
            yield from tensors_within(item)
