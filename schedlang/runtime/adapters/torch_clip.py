"""Patches of torch's `clip_grad_norm_` and `GradScaler.unscale_` that report calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad

_plain = clip_grad._clip_grads_with_norm_
_unscale: Any = GradScaler._unscale_grads_


def check_clipping(check: Callable[[Iterable[Any]], None]) -> None:
    """Let `check` see the parameters before `clip_grad_norm_` scales gradients, from now on.

    This works however the function was imported, because the function that it calls is looked up in
    its module. `clip_grads_with_norm_`, with a norm given by the caller, is not reported.
    """

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> None:
        check(parameters)
        _plain(parameters, *args, **kwargs)

    clip_grad._clip_grads_with_norm_ = clip


def check_unscaling(check: Callable[[Iterable[Any]], None]) -> None:
    """Let `check` see the parameters before `GradScaler` looks whether gradients are finite."""

    def unscale(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        check(parameter for group in optimizer.param_groups for parameter in group["params"])
        return _unscale(self, optimizer, *args, **kwargs)

    GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign]
