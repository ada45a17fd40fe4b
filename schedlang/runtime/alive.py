"""Bytes of the tensors that operators make and that something still holds, and the most so far."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches every storage that is made within, on any device, the meta device too.

    Parameters, gradients and buffers of `model` do not count, nor what was there before. Looking
    costs time in proportion to what is alive: for reports and tests.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._most = 0  # at least the bytes alive now
        self._mine = {_key(t) for t in (*model.parameters(), *model.buffers())}
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._leave_out)  # type: ignore[no-untyped-call]
            for p in model.parameters()
            if p.requires_grad
        ]

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        before = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in before | self._mine:
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._held[storage._cdata] = (reference, storage.nbytes())
                self._most += storage.nbytes()
        if self._most > self.peak:
            self.peak = max(self.peak, self.bytes())
        return output

    def bytes(self) -> int:
        """The bytes alive now."""
        self._held = {
            key: entry
            for key, entry in self._held.items()
            if key not in self._mine and not entry[0].expired()  # type: ignore[no-untyped-call]
        }
        self._most = sum(size for _, size in self._held.values())
        return self._most

    def _leave_out(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._mine.add(_key(parameter.grad))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
