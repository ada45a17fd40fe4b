"""Bytes of a real step on CPU, counted from its storages: nothing of the estimate is used."""

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


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of all storages that operators return, now and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, Any] = {}
        self.host: list[Any] = []  # storages that count as moved away
        self.most = 0

    def take(self, tensor: Any) -> None:
        """Count the storage of a tensor while it lives."""
        tensor = _local(tensor)
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            storage = tensor.untyped_storage()
            self.alive[storage._cdata] = weakref.ref(storage)

    def track(self, tier: str, tensor: Tensor) -> None:
        """What lies in host memory is not on the device."""
        if tier == "cpu":
            self.host.append(weakref.ref(tensor.untyped_storage()))

    @property
    def now(self) -> int:
        """The bytes of all that is alive; what was freed in place counts as it is."""
        there = ((key, seen()) for key, seen in self.alive.items())
        self.alive = {key: weakref.ref(storage) for key, storage in there if storage is not None}
        away = {storage._cdata for seen in self.host if (storage := seen()) is not None}
        return sum(seen().nbytes() for key, seen in self.alive.items() if key not in away)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves((out, args, kwargs)):
            self.take(value)
        self.most = max(self.most, self.now)
        return out


@dataclass(frozen=True)
class Counted:
    """Bytes of one rank: parameters (with buffers), moments, at most in a step on the device.

    `saved` are those that autograd was given to keep, beside parameters.  `lent` of the moments lie
    on a peer, `parked` are bytes that another rank has lent, which `most` leaves out.
    """

    parameters: int
    optimizer: int
    most: int
    saved: int
    lent: int = 0
    parked: int = 0


def adamw(named: Any) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW([parameter for _, parameter in named])


class Saved:
    """The storages that autograd is given to keep."""

    def __init__(self, without: Iterable[Any]) -> None:
        self.found: dict[int, Tensor] = {}
        self.without = {_local(value).untyped_storage()._cdata for value in without}

    def __call__(self, tensor: Tensor) -> Tensor:
        """Note one."""
        key = tensor.untyped_storage()._cdata
        if key not in self.without and not tensor.is_meta:
            self.found[key] = tensor
        return tensor

    @property
    def bytes(self) -> int:
        """Their bytes."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.found.values())


def count(plan: Plan, batch: Mapping[str, Any]) -> Counted:
    """On this rank: the second and third step of a program, counted."""
    counter = Counter()
    with listen_to_stores(counter):
        program = build(plan, batch, optimizer=adamw)
    program.train_step(batch)
    assembly, optimizer = program.assembly, program.optimizer
    held = [*assembly.parameters.values(), *assembly.buffers.values()]
    states = [] if optimizer is None else list(optimizer.state.values())
    moments = [value for each in states for value in each.values() if value.dim()]
    for value in (*held, *moments):
        counter.take(value)
    with counter:
        program.train_step(batch)
    saved = Saved(held)
    with saved_tensors_hooks(saved, lambda tensor: tensor):
        program.train_step(batch)
    out = sum(value.nbytes for value in moments if value.is_meta)
    peer = program.offloaded.peer if program.offloaded is not None else None
    parked = peer.held_bytes() if peer is not None else 0
    return Counted(_sum(held), _sum(moments), counter.most, saved.bytes, out, parked)


def _local(tensor: Any) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _sum(tensors: Iterable[Any]) -> int:
    return sum(_local(tensor).untyped_storage().nbytes() for tensor in tensors)
