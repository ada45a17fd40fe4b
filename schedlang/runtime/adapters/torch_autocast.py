"""A patch of torch.autocast: code that names the device of its tensors may name the meta device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch.amp.autocast_mode import autocast

from schedlang.runtime.device import HOST, accelerator

Context = AbstractContextManager[Any]


@cache
def imitate_on_meta(make: Callable[[torch.dtype | None], Context]) -> None:
    """Let `torch.autocast("meta", ...)` enter `make(dtype)`; `dtype` None: autocast disabled.

    torch has no autocast there, and raises even where code only disables it around an operator:
    `torch.autocast(x.device.type, enabled=False)`.
    """
    patched: Any = autocast
    init, enter, leave = patched.__init__, patched.__enter__, patched.__exit__

    def __init__(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type != "meta":
            init(self, device_type, dtype, enabled, cache_enabled)
            return
        default = torch.get_autocast_dtype((accelerator() or HOST).type)
        self.device, self.fast_dtype, self._enabled = device_type, dtype or default, enabled
        self._imitations = []  # a decorator enters one object again in a recursive call

    def __enter__(self: Any) -> Any:
        if self.device != "meta":
            return enter(self)
        self._imitations.append(make(self.fast_dtype if self._enabled else None))
        self._imitations[-1].__enter__()
        return self

    def __exit__(self: Any, *error: Any) -> Any:
        return (
            leave(self, *error)
            if self.device != "meta"
            else self._imitations.pop().__exit__(*error)
        )

    patched.__init__, patched.__enter__, patched.__exit__ = __init__, __enter__, __exit__
