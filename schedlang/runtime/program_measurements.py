"""Measure a program: bytes of its tensors on this rank, and units of work in a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from schedlang.runtime.batch import row_count
from schedlang.runtime.device import device_of, peak_bytes
from schedlang.runtime.grad_reduction.gradient import local_gradients
from schedlang.runtime.program import Program


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of tensors on one rank; `peak` as the allocator counted it, or None."""

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    peak: int | None = None

    def to_json(self) -> dict[str, int | None]:
        """Return all fields."""
        return asdict(self)


def memory_of(program: Program) -> MemoryUse:
    """Return the bytes that this rank holds now; gradients exist from a step until the next
    step."""
    parameters = list(program.assembly.parameters.values())
    grads = local_gradients(parameters)
    state: list[Any] = []
    if program.optimizer is not None:
        state = [value for slots in program.optimizer.state.values() for value in slots.values()]
    peer = program.offloaded.peer if program.offloaded is not None else None
    state_bytes = _bytes(state) + (peer.held_bytes() if peer is not None else 0)
    peak = peak_bytes(device_of(parameters))
    rank = program.assembly.ranks.rank
    return MemoryUse(rank, _bytes(parameters), _bytes(grads), state_bytes, peak)


def _bytes(values: Iterable[Any]) -> int:
    local = (v.to_local() if hasattr(v, "to_local") else v for v in values)
    return sum(
        v.numel() * v.element_size() for v in local if isinstance(v, Tensor) and not v.is_meta
    )


def work_in(batch: Mapping[str, Any]) -> tuple[int, str]:
    """Return the work in a batch and its unit.

    The unit is "tokens" (with padding) if an input is an integer tensor of 2 dims, else "rows".
    """
    for value in batch.values():
        if isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point():
            return value.numel(), "tokens"
    return row_count(batch), "rows"
