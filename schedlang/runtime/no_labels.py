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
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from schedlang.runtime.modes import ambient
from schedlang.runtime.weights import Number

_NAMES = (
    *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
    "label_smoothing",
)


class _NoLabels(TorchFunctionMode):
    """Takes sums where torch would take means over no label at all.

    Where only the device knows what the part weighs, zero is put in the place of such a mean there.
    """

    def __init__(self, weight: Number) -> None:
        super().__init__()
        self.weight = weight

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (F.cross_entropy, F.nll_loss):
            given = {**dict(zip(_NAMES, args)), **kwargs}
            if _is_mean(given):
                none = ~torch.ne(given["target"], given.get("ignore_index", -100)).any()
                if isinstance(self.weight, Tensor):
                    return func(*args, **kwargs).masked_fill(none & (self.weight == 0), 0.0)
                if none:
                    return func(**{**given, "reduction": "sum"})
        return func(*args, **kwargs)


def _is_mean(given: dict[str, Any]) -> bool:
    plain = given.get("size_average") is None and given.get("reduce") is None
    mean = plain and given.get("reduction", "mean") == "mean"
    return mean and not given["target"].is_floating_point()


def no_labels(weight: Number) -> AbstractContextManager[Any]:
    """Enter the computation of a loss of a part of a batch that weighs so much, perhaps nothing."""
    bare = isinstance(weight, Tensor) or not weight
    return ambient(_NoLabels(weight)) if bare else nullcontext()


def weighing(weight: Number, around: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return a context: `around`, and inside it that of the loss of a part that weighs so much."""
    if not isinstance(weight, Tensor) and weight:
        return around  # as almost always, and in every operation of a step
    return _both(around, no_labels(weight))


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield
