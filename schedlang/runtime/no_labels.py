"""A part of a batch none of whose labels counts: the mean loss over them is zero, not 0 / 0.

Its weight is zero anyway, but what is computed from a loss that is no number gets gradients that
are none either.  Its inputs stay as they are: a model may read labels elsewhere, too, as decoders
do whose inputs are the labels moved by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from schedlang.runtime.modes import ambient

_NAMES = (
    *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
    "label_smoothing",
)


class _NoLabels(TorchFunctionMode):
    """Takes sums where torch would take means over no label at all."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (F.cross_entropy, F.nll_loss):
            given = {**dict(zip(_NAMES, args)), **kwargs}
            if _mean_of_none(given):
                return func(**{**given, "reduction": "sum"})
        return func(*args, **kwargs)


def _mean_of_none(given: dict[str, Any]) -> bool:
    target = given["target"]
    plain = given.get("size_average") is None and given.get("reduce") is None
    if not plain or given.get("reduction", "mean") != "mean" or target.is_floating_point():
        return False
    return not bool(torch.ne(target, given.get("ignore_index", -100)).any())


def no_labels(bare: bool) -> AbstractContextManager[Any]:
    """Around what computes a part of a batch: `bare` if none of its labels counts."""
    return ambient(_NoLabels()) if bare else nullcontext()


@contextmanager
def bare(around: AbstractContextManager[Any]) -> Iterator[None]:
    """Inside `around`, what computes a part none of whose labels counts."""
    with around, no_labels(True):
        yield
