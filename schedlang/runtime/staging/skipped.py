"""Random draws of a call that is not made here: counted, so that later calls draw their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime import scope
from schedlang.runtime.drawing.draws import LOGICAL
from schedlang.runtime.modes import Ambient


class Counted(Ambient):
    """Counts draws by site; what they give has a shape and no meaning."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in LOGICAL:
            kwargs.pop("generator", None)
            return LOGICAL[func](self, func, *args, **kwargs)
        return self.run(func, types, args, kwargs)

    def keep(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        """A mask of `shape` that drops nothing."""
        self.calls[scope.site()] += 1
        return torch.ones(tuple(shape), dtype=torch.bool, device=device)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Numbers of `shape` in [0, 1)."""
        self.calls[scope.site()] += 1
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
