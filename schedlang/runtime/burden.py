"""What each unit of a model costs in one forward: operations, and bytes kept for the backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import flop_counter


class Burden:
    """Counts on tensors that may lie on the meta device; each storage once for each unit."""

    def __init__(self, units: int) -> None:
        self.flops, self.saved, self.given = [0] * units, [0] * units, [0] * units
        self._never: set[int] = set()
        self._alive: list[Any] = []  # a freed storage would give its address to another

    def leave_out(self, tensor: torch.Tensor) -> None:
        """A parameter or buffer: it is there anyway."""
        self._never.add(_key(tensor))

    @contextmanager
    def of(self, unit: int, arguments: Sequence[torch.Tensor]) -> Iterator[None]:
        """Count what is saved within for one unit, and what its arguments take."""
        seen = set(self._never)
        self.given[unit] += sum(self._size(t, seen) for t in arguments if t.requires_grad)
        seen = set(self._never)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.saved[unit] += self._size(tensor, seen)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def ran(self, unit: int, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Count the operations of one operator, where torch has a formula for it."""
        formula = flop_counter.flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops[unit] += int(formula(*args, **kwargs, out_val=output))

    def _size(self, tensor: torch.Tensor, seen: set[int]) -> int:
        key = _key(tensor)
        if key in seen:
            return 0
        seen.add(key)
        self._alive.append(tensor)
        try:
            return int(tensor.untyped_storage().nbytes())
        except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors have none
            return tensor.numel() * tensor.element_size()


def _key(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)
