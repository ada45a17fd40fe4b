"""What each unit of a model costs in one forward: operations, and bytes kept for the backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from schedlang.runtime.tracing.units import Switch


class Burden:
    """Counts on tensors that may lie on the meta device; each storage once for each unit."""

    def __init__(self, units: int) -> None:
        self.flops, self.saved, self.given = [0] * units, [0] * units, [0] * units
        self._never: set[int] = set()
        self._alive: list[Any] = []  # a freed storage would give its address to another

    def leave_out(self, tensor: torch.Tensor) -> None:
        """A parameter or buffer: it is there anyway."""
        self._never.add(key_of(tensor))

    @contextmanager
    def of(self, unit: int, arguments: Sequence[torch.Tensor]) -> Iterator[None]:
        """Count what is saved within for one unit, and what its arguments take."""
        seen = set(self._never)
        self.given[unit] += sum(self._size(t, seen) for t in arguments if t.requires_grad)
        seen = set(self._never)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.keeps(unit, tensor, self._size(tensor, seen))
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def keeps(self, unit: int, tensor: torch.Tensor, size: int) -> None:
        """Count what autograd saves: bytes that no tensor of this call had before."""
        self.saved[unit] += size

    def ran(self, unit: int, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Count the operations of one operator, where torch has a formula for it."""
        formula = flop_counter.flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops[unit] += int(formula(*args, **kwargs, out_val=output))

    def _size(self, tensor: torch.Tensor, seen: set[int]) -> int:
        key = key_of(tensor)
        if key in seen:
            return 0
        seen.add(key)
        self._alive.append(tensor)
        try:
            return int(tensor.untyped_storage().nbytes())
        except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors have none
            return tensor.numel() * tensor.element_size()


def operations(func: Any, args: Any, kwargs: Any, output: Any) -> float:
    """Of one operator, by torch's formula; where there is none, one for each element it makes."""
    formula = flop_counter.flop_registry.get(func._overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=output))
    return float(sum(one.numel() for one in tree_leaves(output) if isinstance(one, torch.Tensor)))


def key_of(tensor: torch.Tensor) -> int:
    """What tells one storage from others, as long as it lives."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


@contextmanager
def counted(burden: Burden, model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Count what calls of these modules cost, those inside of another one's with that one."""
    for tensor in (*model.parameters(), *model.buffers()):
        burden.leave_out(tensor)
    mode = _Operators(burden)
    switch = Switch(model, names)

    def handle(unit: int, original: Any, args: Any, kwargs: Any) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        mode.unit, outer = unit, mode.unit
        try:
            with burden.of(unit, given):
                return original(*args, **kwargs)
        finally:
            mode.unit = outer

    try:
        with switch.using(handle), mode:
            yield
    finally:
        switch.remove()


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every operator that runs in a unit."""

    def __init__(self, burden: Burden) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.burden = burden
        self.unit: int | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.unit is not None:
            self.burden.ran(self.unit, func, args, kwargs or {}, output)
        return output
