"""Bytes of a real step on CPU, counted from its storages: nothing of the estimate is used."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.passes.build import build
from schedlang.plan import Plan


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of all storages that operators return, now and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, Any] = {}
        self.most = 0

    def take(self, tensor: Any) -> None:
        """Count the storage of a tensor while it lives."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            storage = tensor.untyped_storage()
            self.alive[storage._cdata] = weakref.ref(storage)

    @property
    def now(self) -> int:
        """The bytes of all that is alive; what was freed in place counts as it is."""
        there = ((key, seen()) for key, seen in self.alive.items())
        self.alive = {key: weakref.ref(storage) for key, storage in there if storage is not None}
        return sum(seen().nbytes() for seen in self.alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves((out, args, kwargs)):
            self.take(value)
        self.most = max(self.most, self.now)
        return out


@dataclass(frozen=True)
class Counted:
    """Bytes of one rank: parameters (with buffers), moments, gradients after, at most in a step."""

    parameters: int
    optimizer: int
    gradients: int
    most: int


def adamw(named: Any) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW([parameter for _, parameter in named])


def count(plan: Plan, batch: Mapping[str, Any]) -> Counted:
    """On this rank: the second step of a program, counted."""
    program = build(plan, batch, optimizer=adamw)
    program.train_step(batch)
    assembly = program.assembly
    held = [_bytes(value) for value in (*assembly.parameters.values(), *assembly.buffers.values())]
    optimizer = program.optimizer
    states = [] if optimizer is None else [s for each in optimizer.state.values() for s in each.values()]
    counter = Counter()
    for value in (*assembly.parameters.values(), *assembly.buffers.values(), *states):
        counter.take(value)
    with counter:
        program.train_step(batch)
    moments = sum(_bytes(s) for s in states if s.dim())
    gradients = sum(_bytes(p.grad) for p in assembly.parameters.values() if p.grad is not None)
    return Counted(sum(held), moments, gradients, counter.most)


def _bytes(tensor: Any) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.untyped_storage().nbytes())
