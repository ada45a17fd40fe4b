"""Products of operands in eight bits: what FP8 makes of an original that knows nothing of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FORMATS = ("float8_e4m3fn", "float8_e5m2")
KEPT = "bfloat16"  # what the rest is computed in
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}


class EightBits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Give matrix products their operands as FP8 has them, each tensor by its greatest number.

    A scale for each tensor is the coarsest that programs choose: those for rows or blocks round
    less. Inside `Nudged` each cast is off by one rounding more, in eight bits.
    """

    def __init__(self, dtype: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype: torch.dtype = getattr(torch, dtype)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        places = _PRODUCTS.get(func._overloadpacket.__name__, ())
        given = [self._rounded(a) if k in places else a for k, a in enumerate(args)]
        return func(*given, **(kwargs or {}))

    def _rounded(self, value: Tensor) -> Tensor:
        if not value.is_floating_point() or not value.numel():
            return value
        wide = value.float()
        scale = wide.abs().amax() / torch.finfo(self._dtype).max
        scale = torch.where(scale > 0, scale, 1.0)
        return ((wide / scale).to(self._dtype).float() * scale).to(value.dtype)
