"""Sizes that a module reads of its input, and by which it counts what each rank holds a part of.

`B, T, C = x.size()`, and then `k.view(B, T, heads, C // heads)` and `y.view(B, T, C)`: the input is
whole on every rank, but the module's own code means the width of its heads.  With a part of the
heads it reads that part of the width; every other reader of the tensor sees its true size.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Counted:
    """An argument of a module, of whose dim (from the last, below 0) a rank counts its part."""

    name: str
    dim: int
    parts: int


class WithSizes:
    """The forward of a module that counts by sizes of its arguments.

    An object, not a closure: in a deep copy of the model it is bound to the copied module.
    """

    def __init__(self, module: nn.Module, counted: Sequence[Counted]) -> None:
        self.module, self.counted, self.inner = module, tuple(counted), module.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> WithSizes:
        made = WithSizes.__new__(WithSizes)
        memo[id(self)] = made
        made.module, made.inner = copy.deepcopy((self.module, self.inner), memo)
        made.counted = self.counted
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call, in which the module reads its own sizes."""
        given = dict(arguments(self.module, args, kwargs))
        own = [(given[c.name], c.dim, c.parts) for c in self.counted if c.name in given]
        with _Reading(self.module, own):
            return self.inner(*args, **kwargs)


def arguments(module: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a call by the names that the module's forward gives them."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    for name, value in [*zip(names, args), *((k, v) for k, v in kwargs.items() if k in names)]:
        if isinstance(value, Tensor):
            yield name, value


class _Reading(TorchFunctionMode):
    """While it is on, one module's own code reads some sizes of some tensors as its part."""

    def __init__(self, module: nn.Module, own: Sequence[tuple[Tensor, int, int]]) -> None:
        super().__init__()
        self.module, self.own = module, own

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The call; of a size that the module reads, its part."""
        if func is not Tensor.size and func != SHAPE:
            return func(*args, **(kwargs or {}))
        tensor = args[0]
        parts = {dim % tensor.ndim: n for held, dim, n in self.own if held is tensor}
        if not parts or not _runs(self.module, sys._getframe(1)):
            return func(*args, **(kwargs or {}))
        sizes = [size // parts.get(dim, 1) for dim, size in enumerate(SHAPE(tensor))]
        at = (kwargs or {}).get("dim", args[1] if len(args) > 1 else None)
        return torch.Size(sizes) if at is None else sizes[at]


def _runs(module: nn.Module, frame: FrameType | None) -> bool:
    """Is this the module's own code: a method of it, or what stands inside of one?"""
    while frame is not None and frame.f_code.co_name.startswith("<"):
        frame = frame.f_back
    names = frame.f_code.co_varnames[:1] if frame is not None else ()
    return bool(names) and frame is not None and frame.f_locals.get(names[0]) is module
