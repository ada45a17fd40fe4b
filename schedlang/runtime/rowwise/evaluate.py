"""A chain computed by torch, from the very values and expressions that its kernel is written from.

It stands in for a kernel where none can run, and in float64 it is what a proof compares: then the
roles of rows and columns, the order of reductions and the sums are proven, and what is left to the
kernel's own check is its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.rowwise.chain import Chain, Stored, Value

NARROW = (torch.bfloat16, torch.float16)
# what an expression may call
_NAMES = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "abs", "floor",
          "ceil", "where")  # fmt: skip


def evaluated(
    chain: Chain, given: Sequence[Tensor], rounding: str
) -> tuple[list[Tensor], list[Tensor]]:
    """(what the kernel stores, the sums over rows); `given` is what the chain loads."""
    wide = torch.float64 if any(t.dtype == torch.float64 for t in given) else torch.float32
    run = _Run(chain, dict(zip(chain.given, given, strict=True)), rounding, wide)
    return [run.whole(one) for one in chain.stored], [run.summed(one) for one in chain.sums]


class _Torch:
    """Triton's functions, by torch."""

    def __init__(self, wide: torch.dtype) -> None:
        self.float32 = wide
        for name in _NAMES:
            setattr(self, name, getattr(torch, name))


@dataclass
class _Run:
    chain: Chain
    given: dict[Value, Tensor]
    rounding: str
    wide: torch.dtype
    known: dict[Value, Tensor] = field(default_factory=dict)

    def whole(self, one: Stored) -> Tensor:
        """A result as it is stored."""
        grid, value = self.chain.grid, one.value
        shape = (grid.rows if value.rows else 1, grid.size if value.cols else 1)
        made = self.of(value).broadcast_to(shape).to(one.dtype).reshape(one.shape)
        return made.clone(memory_format=torch.contiguous_format)

    def summed(self, one: Stored) -> Tensor:
        """A sum over all rows, in the type that the model has it in."""
        (value,) = one.value.operands
        grid = self.chain.grid
        each = self.of(value).broadcast_to(grid.rows, grid.size if one.value.cols else 1)
        return each.sum(0).to(one.dtype).reshape(one.shape)

    def of(self, value: Value) -> Tensor:
        """A value, as rows of columns; each is computed once."""
        if value not in self.known:
            made = self._made(value)
            if value.dtype in NARROW and self.rounding == "eager" and value.how != "given":
                made = made.to(value.dtype).to(self.wide)
            self.known[value] = made
        return self.known[value]

    def _made(self, value: Value) -> Tensor:
        if value.how == "given":
            found = self.given[value].reshape(-1 if value.rows else 1, self._size(value))
            return found if found.dtype is torch.bool else found.to(self.wide)
        operands = [self.of(one) for one in value.operands]
        if value.how == "row":
            (each,) = operands
            each = each.broadcast_to(each.shape[0], self.chain.grid.size)
            reduce: Any = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[value.text]
            made: Tensor = reduce(each, 1, keepdim=True)
            return made
        return self._expression(value, operands)

    def _size(self, value: Value) -> int:
        return self.chain.grid.size if value.cols else 1

    def _expression(self, value: Value, operands: Sequence[Tensor]) -> Tensor:
        names = [one.name for one in value.operands]
        space = {"tl": _Torch(self.wide), "tanh": torch.tanh, "log1p": torch.log1p,
                 "expm1": torch.expm1, **dict(zip(names, operands))}  # fmt: skip
        made = eval(value.text.format(*names), space)
        if not isinstance(made, Tensor):
            like = self.given[self.chain.given[0]]
            made = torch.full((1, 1), float(made), dtype=self.wide, device=like.device)
        return made if made.dtype is torch.bool else made.to(self.wide)
