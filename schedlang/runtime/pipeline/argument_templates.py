"""Split the arguments of a call into tensors and a template, and fill the template again.

A second run of a forward needs the arguments of the first as they were: lists, dicts and objects
that a forward may change (a cache of keys and values) are copied in their state on entry.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_PLAIN = (str, bytes, bool, int, float, complex, type(None), type, torch.dtype, torch.device)


class _Slot:
    """The place of a tensor in a template."""

    def __init__(self, index: int) -> None:
        self.index = index


class _MutableObject:
    """An object that the forward may change (a cache of keys and values), as it was on entry."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def copy(self) -> Any:
        """Return a copy that may be changed, and holds the same tensors."""
        return _copy_structure(self.value)


def split_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Return `value` with slots for its tensors, which are appended to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    if type(value) in (list, tuple):
        return type(value)([split_tensors(item, tensors) for item in value])
    if type(value) is dict:
        return {key: split_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, (*_PLAIN, nn.Module)) or callable(value):
        return value
    return _MutableObject(_copy_structure(value))


def fill_template(template: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the arguments of a template, with these tensors in its slots."""
    if isinstance(template, _Slot):
        return tensors[template.index]
    if isinstance(template, _MutableObject):
        return template.copy()
    if type(template) in (list, tuple):
        return type(template)([fill_template(item, tensors) for item in template])
    if type(template) is dict:
        return {key: fill_template(item, tensors) for key, item in template.items()}
    return template


class _SharedTensors(TorchFunctionMode):
    """A mode under which a deep copy copies the structure and shares the tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            return args[0]
        return func(*args, **(kwargs or {}))


def _copy_structure(value: Any) -> Any:
    try:
        with _SharedTensors():
            return copy.deepcopy(value)
    except (TypeError, NotImplementedError, RuntimeError):
        return value  # a lock, a process group: nothing that a forward changes
