"""Finds whole numbers in a batch that stand for its rows: edges of a graph, pairs of samples.

Such a batch cannot be cut by rows: a part would name rows that lie in others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from schedlang.runtime.batch import called
from schedlang.runtime.tracing.constants import on_meta
from schedlang.runtime.tracing.meta import hollow_batch, hollow_model
from schedlang.runtime.tracing.torch_calls import model_line, name_of, tensors_in

INDEXED = {
    "index_select",
    "gather",
    "scatter",
    "scatter_",
    "scatter_add",
    "scatter_add_",
    "index_add",
    "index_add_",
    "scatter_reduce",
    "scatter_reduce_",
    "take_along_dim",
    "__getitem__",
}


@dataclass(frozen=True)
class Named:
    """A tensor of the batch that names rows, and where that shows.

    call, line  what of torch finds none of them, and the model's line that calls it
    size        how many rows it finds
    """

    key: str
    call: str
    line: str
    largest: int
    size: int


def names_rows(model: nn.Module, part: Mapping[str, Any], suspects: Mapping[str, Tensor]) -> Any:
    """What of a part of a batch names rows that the part does not have; None if nothing does.

    `suspects` are its tensors of whole numbers that were not cut, by name.
    """
    bare, inputs = hollow_model(model, {}), hollow_batch(dict(part))
    bare.train()
    following = _Following()
    by_value = {id(value): key for key, value in suspects.items()}
    for whole, meta in zip(tensors_in(dict(part)), tensors_in(inputs)):
        if id(whole) in by_value:
            meta.__dict__[_MARK] = by_value[id(whole)], int(whole.max())
    try:
        with on_meta(part, inputs), following, torch.device("meta"), torch.no_grad():
            called(bare, inputs)
    except Exception:  # what else is wrong is told where the model is followed in earnest
        pass
    return following.found


_MARK = "_schedlang_names"


class _Following(TorchFunctionMode):
    """What is made of a suspect is one; where it indexes a dim that is too short it is found."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Named | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        marks = [t.__dict__[_MARK] for t in given if _MARK in t.__dict__]
        name = name_of(func)
        if marks and self.found is None and name in INDEXED:
            self._look(name, args, kwargs, given)
        out = func(*args, **kwargs)
        for tensor in tensors_in(out) if marks else ():
            if not tensor.is_floating_point() and tensor.dtype != torch.bool:
                tensor.__dict__[_MARK] = marks[0]
        return out

    def _look(self, name: str, args: Any, kwargs: Any, given: list[Tensor]) -> None:
        source = given[0]
        if _MARK in source.__dict__:  # it is looked up itself
            return
        key, largest = next(t.__dict__[_MARK] for t in given if _MARK in t.__dict__)
        dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else 0)
        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            dim = next((k for k, i in enumerate(index) if isinstance(i, Tensor)), 0)
            if any(not isinstance(i, (Tensor, slice)) for i in index):
                return
        if source.ndim and largest >= source.shape[dim]:
            self.found = Named(key, name, model_line(), largest, source.shape[dim])
