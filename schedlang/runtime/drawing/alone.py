"""Random draws of a model that is called alone, outside of programs: by row, or standing still."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.drawing.draws import LOGICAL, Draw
from schedlang.runtime.modes import Ambient


class Alone(Ambient):
    """A model draws from this source.

    It shares nothing with the logical draws of programs but the form of each random function: what
    these do wrong is not said of the model.
    """

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw = draw

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in LOGICAL:
            kwargs.pop("generator", None)
            return LOGICAL[func](self.draw, func, *args, **kwargs)
        return self.run(func, types, args, kwargs)


class ByRow:
    """For every call and row a generator of torch: a row draws the same in every part."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows, self.calls = tuple(rows), 0

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See Draw; a tensor of more rows holds those of each sample side by side."""
        first, *rest = shape
        assert first % len(self.rows) == 0, f"{first} rows of {len(self.rows)} samples"
        each, self.calls = (first // len(self.rows), *rest), self.calls + 1
        made = [
            torch.rand(
                each, dtype=torch.float64,
                generator=torch.Generator().manual_seed(self.calls * 2**32 + row),
            )
            for row in self.rows
        ]  # fmt: skip
        return torch.cat(made).to(device, dtype)

    def keep(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        """See Draw."""
        return torch.ge(self.uniform(shape, torch.float64, device), p)


class Still:
    """Nothing is dropped, and every number is the middle one."""

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See Draw."""
        return torch.full(tuple(shape), 0.5, dtype=dtype, device=device)

    def keep(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        """See Draw."""
        return torch.ones(tuple(shape), dtype=torch.bool, device=device)
