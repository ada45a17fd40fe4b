"""Count the bytes of a real step on CPU from its storages, independently of the estimate."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from schedlang.runtime.offload.offloaded_activations import listen_to_stores


class StorageCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operators return: current and peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, Any] = {}
        self.host: list[Any] = []  # storages in host memory, which do not count
        self.most = 0

    def take(self, tensor: Any) -> None:
        """Count the storage of a tensor while it lives."""
        tensor = _local_tensor(tensor)
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            storage = tensor.untyped_storage()
            self.alive[storage._cdata] = weakref.ref(storage)

    def track(self, tier: str, tensor: Tensor) -> None:
        """Note that a tensor moved to a tier; in host memory it does not count."""
        if tier == "cpu":
            self.host.append(weakref.ref(tensor.untyped_storage()))

    @property
    def now(self) -> int:
        """The current bytes of all living storages."""
        references = ((key, reference()) for key, reference in self.alive.items())
        self.alive = {
            key: weakref.ref(storage) for key, storage in references if storage is not None
        }
        away = {storage._cdata for reference in self.host if (storage := reference()) is not None}
        return sum(reference().nbytes() for key, reference in self.alive.items() if key not in away)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves((results, args, kwargs)):
            self.take(value)
        self.most = max(self.most, self.now)
        return results


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank: parameters (with buffers), optimizer moments, and the peak in a step.

    `saved`: what autograd saves, without parameters.  `lent`: moments stored on a peer.  `parked`:
    bytes that this rank stores for another one, which are not in `most`.
    """

    parameters: int
    optimizer: int
    most: int
    saved: int
    lent: int = 0
    parked: int = 0


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW([parameter for _, parameter in parameters])


class SavedStorages:
    """Collects the storages that autograd saves."""

    def __init__(self, without: Iterable[Any]) -> None:
        self.found: dict[int, Tensor] = {}
        self.without = {_local_tensor(value).untyped_storage()._cdata for value in without}

    def __call__(self, tensor: Tensor) -> Tensor:
        """Note the storage of a saved tensor."""
        key = tensor.untyped_storage()._cdata
        if key not in self.without and not tensor.is_meta:
            self.found[key] = tensor
        return tensor

    @property
    def bytes(self) -> int:
        """Total bytes of the saved storages."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.found.values())


def count_step(plan: Plan, batch: Mapping[str, Any]) -> RankBytes:
    """On this rank: count the bytes of the second and third step of a program."""
    counter = StorageCounter()
    with listen_to_stores(counter):
        program = build(plan, batch, optimizer=adamw)
    program.train_step(batch)
    assembly, optimizer = program.assembly, program.optimizer
    persistent = [*assembly.parameters.values(), *assembly.buffers.values()]
    states = [] if optimizer is None else list(optimizer.state.values())
    moments = [value for state in states for value in state.values() if value.dim()]
    for value in (*persistent, *moments):
        counter.take(value)
    with counter:
        program.train_step(batch)
    saved = SavedStorages(persistent)
    with saved_tensors_hooks(saved, lambda tensor: tensor):
        program.train_step(batch)
    lent = sum(value.nbytes for value in moments if value.is_meta)
    peer = program.offloaded.peer if program.offloaded is not None else None
    parked = peer.held_bytes() if peer is not None else 0
    return RankBytes(
        _total_bytes(persistent), _total_bytes(moments), counter.most, saved.bytes, lent, parked
    )


def _local_tensor(tensor: Any) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _total_bytes(tensors: Iterable[Any]) -> int:
    return sum(_local_tensor(tensor).untyped_storage().nbytes() for tensor in tensors)
