"""torch.autocast on any device, the meta device included; and off.

torch has no autocast for tensors without values, and counts of memory and of messages are made with
them.  There a function mode does what torch's lists say: matrix products, convolutions and
attention in the low dtype, losses and a few more in float32, everything else as it comes.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from schedlang.runtime.modes import Ambient

_LOW_NAMES = {
    torch: "matmul mm bmm addmm baddbmm addbmm addmv mv addr chain_matmul conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d prelu",
    Tensor: "matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm addbmm addmv mv addr",
    F: "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "scaled_dot_product_attention",
}
_WIDE_NAMES = {
    F: "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div ctc_loss "
    "binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss "
    "margin_ranking_loss multi_margin_loss poisson_nll_loss soft_margin_loss "
    "triplet_margin_loss grid_sample",
    torch: "cdist prod",
    Tensor: "prod",
}


def _named(names: dict[Any, str]) -> frozenset[Any]:
    return frozenset(getattr(where, n) for where, some in names.items() for n in some.split())


_LOW, _WIDE = _named(_LOW_NAMES), _named(_WIDE_NAMES)


def autocast(device: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast to `dtype` for tensors of a kind of device; None: no autocast.

    Casts of weights are not kept for a second use: what is gathered for one is gone by the other.
    """
    if device == "meta":
        return Imitated(dtype)
    if dtype is None:
        return torch.autocast(device, enabled=False)
    return torch.autocast(device, dtype=dtype, cache_enabled=False)


def imitated(device: str) -> AbstractContextManager[Any]:
    """For tensors without values, what autocast does here to those on a kind of device."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return Imitated(torch.get_autocast_dtype(device))


class _Here(threading.local):
    def __init__(self) -> None:
        self.modes: list[Imitated] = []  # the last one decides


_here = _Here()


class Imitated(Ambient):
    """The dtypes that autocast would give, for tensors without values; `dtype` None: no casts."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype

    def __enter__(self) -> Imitated:
        _here.modes.append(self)
        TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        TorchFunctionMode.__exit__(self, *error)  # type: ignore[no-untyped-call]
        _here.modes.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.dtype is None or not _here.modes or _here.modes[-1] is not self:
            return self.run(func, types, args, kwargs)
        wanted = self.dtype if func in _LOW else torch.float32 if func in _WIDE else None
        if wanted is not None:
            args = tuple(_to(value, wanted) for value in args)
            kwargs = {name: _to(value, wanted) for name, value in kwargs.items()}
            return func(*args, **kwargs)
        return self.run(func, types, args, kwargs)


def _to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return value.to(dtype)
    return value
