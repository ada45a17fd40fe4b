"""A patch of torch's `clip_grad_norm_` that reports calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.nn.utils import clip_grad

_plain = clip_grad._clip_grads_with_norm_


def hear_of_clipping(check: Callable[[Iterable[Any]], None]) -> None:
    """Let `check` see the parameters before `clip_grad_norm_` scales gradients, from now on.

    This works however the function was imported, because the function that it calls is looked up in
    its module. `clip_grads_with_norm_`, with a norm given by the caller, is not reported.
    """

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> None:
        check(parameters)
        _plain(parameters, *args, **kwargs)

    clip_grad._clip_grads_with_norm_ = clip
