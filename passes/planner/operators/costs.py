"""Seconds of operators and of what ranks send each other, as the solver asks for them."""

from __future__ import annotations

from typing import Protocol

from schedlang.passes.planner.values import Kind


class Costs(Protocol):
    """Seconds of operators and collectives; a cluster that knows both is one."""

    def operator(self, kind: Kind, flops: float, moved: float) -> float:
        """Seconds of one operator of so many operations, that reads and writes so many bytes."""
        ...

    def collective(self, op: str, size: float, ranks: int, stride: int) -> float:
        """Seconds of one collective on a whole tensor of `size` bytes, ranks `stride` apart."""
        ...
