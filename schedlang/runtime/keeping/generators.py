"""All that a call's numbers hang on besides its arguments, as it was before the call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.device import Replayed, default_generators, own_generators


class Draws(AbstractContextManager[None]):
    """All that a call's numbers hang on besides its arguments: torch's generators, and autocast."""

    def __init__(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        kinds = sorted({t.device.type for t in tensors} | {"cpu"} - {"meta"})
        self.casts = [_autocast(kind) for kind in kinds if kind != "meta"]
        default = default_generators(t.device for t in tensors)
        self.replayed = Replayed([*default, *own_generators(module)])
        self.stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self.replayed)
            for kind, options in self.casts:
                stack.enter_context(torch.amp.autocast(kind, **options))
            self.stacks.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self.stacks.pop().__exit__(*error)


def _autocast(kind: str) -> tuple[str, dict[str, Any]]:
    options = dict(
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )
    return kind, options
