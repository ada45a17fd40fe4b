"""Lines of a model that count positions by the length of what they are given.

Such as `torch.arange(x.shape[1])`, `self.table[: x.shape[1]]`, or the last ones of a table.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.modes import Ambient
from schedlang.runtime.slicing.slices import Place

_OURS = tuple(str(folder) for folder in (Path(torch.__file__).parent, Path(__file__).parent.parent))


class Watch(Ambient):
    """Notes in a whole forward the lines that count positions up to its length.

    `tables` are ids of the model's parameters and buffers. A line that also does something else of
    the kind is in `others`.
    """

    def __init__(self, length: int, tables: Collection[int]) -> None:
        super().__init__()
        self.length, self.tables = length, frozenset(tables)
        self.found: set[Place] = set()
        self.others: set[Place] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.arange:
            (self.found if upto(args, kwargs, self.length) else self.others).add(caller())
        elif func is Tensor.__getitem__:
            first, table = any(firsts(args[1], self.length)), id(args[0]) in self.tables
            if any(lasts(args[0], args[1], self.length)) or (first and table):
                self.found.add(caller())
            elif first or table:
                self.others.add(caller())
        return self.run(func, types, args, kwargs)


def caller() -> Place:
    """The line of the model that is running: the innermost outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def upto(args: Sequence[Any], kwargs: Mapping[str, Any], length: int) -> bool:
    """Whether these are the arguments of torch.arange(length), or torch.arange(0, length)."""
    ends = tuple(args) or tuple(kwargs[name] for name in ("start", "end") if name in kwargs)
    return ends in ((length,), (0, length))


def firsts(index: Any, length: int) -> list[bool]:
    """Which items of an index are `[:length]`."""
    return [
        type(item) is slice and _plain(item) and item.start in (None, 0) and item.stop == length
        for item in items_of(index)
    ]


def lasts(tensor: Tensor, index: Any, length: int) -> list[bool]:
    """Which items of an index take the last `length` of more."""
    items = items_of(index)
    sized = len(items) <= tensor.dim() and all(isinstance(item, (slice, int)) for item in items)
    return [
        sized and type(item) is slice and _plain(item) and item.stop is None
        and tensor.shape[dim] > length and item.start in (-length, tensor.shape[dim] - length)
        for dim, item in enumerate(items)
    ]  # fmt: skip


def items_of(index: Any) -> tuple[Any, ...]:
    """The items of an index, one or several."""
    return index if isinstance(index, tuple) else (index,)


def _plain(item: slice) -> bool:
    numbers = (item.start, item.stop)
    return item.step in (None, 1) and all(n is None or isinstance(n, int) for n in numbers)
