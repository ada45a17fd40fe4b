"""Patches of torch's norm of gradients, and of `GradScaler.unscale_` that report calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad

_unscale: Any = GradScaler._unscale_grads_


def replace_norms(around: Callable[..., Tensor]) -> None:
    """Let `around(norm, tensors, ...)` take each total norm, from now on; `norm` is torch's.

    That is `clip_grad_norm_` and `get_total_norm`, however they were imported: both run a function
    that a wrapper of torch holds. `clip_grads_with_norm_`, with a norm of the caller, is not
    reported.
    """
    wrapper: Any = clip_grad._get_total_norm
    cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
    total_norm = cell.cell_contents

    def norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None
    ) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        return around(total_norm, tensors, norm_type, error_if_nonfinite, foreach)

    cell.cell_contents = norm


def check_unscaling(check: Callable[[Iterable[Any]], None]) -> None:
    """Let `check` see the parameters before `GradScaler` looks whether gradients are finite."""

    def unscale(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        check(parameter for group in optimizer.param_groups for parameter in group["params"])
        return _unscale(self, optimizer, *args, **kwargs)

    GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign]
