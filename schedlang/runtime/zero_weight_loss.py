"""Make the mean loss of a part of a batch without counted labels zero instead of 0 / 0.

The weight of the part is zero, but gradients of a NaN loss would be NaN too. The inputs of the part
do not change: a model may use labels for more, such as a decoder whose inputs are the shifted
labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from schedlang.runtime.batch_weights import Number
from schedlang.runtime.modes import LOSSES, enter_modes

_NAMES = (
    *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
    "label_smoothing",
)


class _NoLabels(TorchFunctionMode):
    """Computes the sum where torch would compute a mean over no label.

    If the weight of the part is on the device, the mean is replaced by zero on the device.
    """

    def __init__(self, weight: Number) -> None:
        super().__init__()
        self.weight = weight

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in LOSSES:
            arguments = bind_loss(args, kwargs)
            if _is_mean(arguments):
                none = ~torch.ne(arguments["target"], arguments.get("ignore_index", -100)).any()
                if isinstance(self.weight, Tensor):
                    return func(*args, **kwargs).masked_fill(none & (self.weight == 0), 0.0)
                if none:
                    return func(**{**arguments, "reduction": "sum"})
        return func(*args, **kwargs)


def bind_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a loss, by name."""
    return {**dict(zip(_NAMES, args)), **kwargs}


def _is_mean(arguments: dict[str, Any]) -> bool:
    modern = arguments.get("size_average") is None and arguments.get("reduce") is None
    mean = modern and arguments.get("reduction", "mean") == "mean"
    return mean and not arguments["target"].is_floating_point()


def zero_unlabelled_loss(weight: Number) -> AbstractContextManager[Any]:
    """Return a context for computing the loss of a part of a batch with this weight, perhaps
    zero."""
    may_be_zero = isinstance(weight, Tensor) or not weight
    return enter_modes(_NoLabels(weight)) if may_be_zero else nullcontext()


def with_loss_weight(
    weight: Number, around: AbstractContextManager[Any]
) -> AbstractContextManager[Any]:
    """Return a context: `around`, and inside it `zero_unlabelled_loss(weight)` where needed."""
    if not isinstance(weight, Tensor) and weight:
        return around  # the usual case, in every operation of a step
    return nest(around, zero_unlabelled_loss(weight))


@contextmanager
def nest(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Return a context: `outer`, and inside it `inner`."""
    with outer, inner:
        yield
