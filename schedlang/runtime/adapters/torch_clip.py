"""Clipping by torch's `clip_grad_norm_`, heard of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.nn.utils import clip_grad

_plain = clip_grad._clip_grads_with_norm_


def hear_of_clipping(check: Callable[[Iterable[Any]], None]) -> None:
    """Let `check` see the parameters before `clip_grad_norm_` scales gradients, from now on.

    However it was imported: what it calls is looked up in its file.  `clip_grads_with_norm_`, by a
    norm that the caller gives, is not heard of.
    """

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> None:
        check(parameters)
        _plain(parameters, *args, **kwargs)

    clip_grad._clip_grads_with_norm_ = clip
