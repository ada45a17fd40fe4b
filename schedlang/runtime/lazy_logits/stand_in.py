"""Base of stand-ins for logits: calls of torch's functions, indices, and the loss's arguments.

A stand-in goes through a model's own code in place of logits that are nowhere whole.  It knows a
few functions; for anything else it gives the whole, so that any model gets what it asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Size, Tensor
from torch.nn import functional as F

from schedlang.runtime.modes import again


class StandIn:
    """Logits [..., classes] that are not there as one tensor."""

    @property
    def ndim(self) -> int:
        """The number of dims, as Tensor.ndim."""
        return len(self.shape)

    @property
    def shape(self) -> Size:
        """The shape of the whole."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """The logits, as a plain tensor."""
        raise NotImplementedError

    def view(self, *shape: Any) -> Any:
        """View as Tensor.view."""
        raise NotImplementedError

    def has_loss(self) -> bool:
        """Tell whether the loss can be computed without the whole logits."""
        return True

    @classmethod
    def known(cls) -> Mapping[Any, Callable[..., Any]]:
        """Functions of torch whose first argument may be a stand-in, and what is done for them."""
        raise NotImplementedError

    def size(self, dim: int | None = None) -> Any:
        """Return the size, as Tensor.size."""
        return self.shape if dim is None else self.shape[dim]

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Flatten as Tensor.flatten; a view where the last dim stays whole."""
        first, last = start_dim % self.ndim, end_dim % self.ndim
        if not first <= last < self.ndim - 1:
            return self.whole().flatten(start_dim, end_dim)
        sizes = tuple(self.shape)
        return self.view(*sizes[:first], math.prod(sizes[first : last + 1]), *sizes[last + 1 :])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Functions of torch: what is known here, or a call with the whole."""
        kwargs, known = dict(kwargs or {}), cls.known().get(func)
        if "input" in kwargs and known is not None:
            args = (kwargs.pop("input"), *args)
        with again():  # a mode that saw the call first is off inside of it
            if known is not None and args and isinstance(args[0], cls):
                return known(*args, **kwargs)
            whole = {name: made_whole(value) for name, value in kwargs.items()}
            return func(*(made_whole(value) for value in args), **whole)


def made_whole(value: Any) -> Any:
    """Any stand-in in an argument as a tensor."""
    if isinstance(value, StandIn):
        return value.whole()
    return type(value)(map(made_whole, value)) if type(value) in (list, tuple) else value


def takes_rows(index: Any, ndim: int) -> bool:
    """Tell whether an index keeps the last dim whole, and picks among the others by numbers."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice | int) or part is Ellipsis for part in parts):
        return False
    return len(parts) < ndim and Ellipsis not in parts or parts[-1] == slice(None)


Loss = Callable[[Any, Tensor, Tensor, str, float], Tensor]


def as_torchs(loss: Loss) -> Callable[..., Tensor]:
    """`torch.nn.functional.cross_entropy` of a stand-in [tokens, classes] by `loss`.

    It is given the stand-in, the classes, which of them count, the reduction and the smoothing.
    Weights of classes and labels that are probabilities are left to torch, on the whole.
    """

    def cross_entropy(
        logits: Any,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        plain = logits.ndim == 2 and not target.is_floating_point() and logits.has_loss()
        if not plain or weight is not None or size_average is not None or reduce is not None:
            return F.cross_entropy(
                logits.whole(),
                target,
                weight,
                size_average,
                ignore_index,
                reduce,
                reduction,
                label_smoothing,
            )
        return loss(logits, target, target != ignore_index, reduction, label_smoothing)

    cross_entropy.__doc__ = loss.__doc__
    return cross_entropy


def reduced(loss: Tensor, counts: Tensor, reduction: str) -> Tensor:
    """The losses of tokens as torch reduces them; of those that do not count nothing."""
    loss = loss.masked_fill(~counts, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / counts.sum() if reduction == "mean" else loss.sum()
