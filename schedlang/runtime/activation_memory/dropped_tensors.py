"""Saved tensors of a forward that are dropped, and made again by a second run in backward."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from schedlang.runtime.storage.saved_tensors_slot import (
    VersionedTensor,
    outer_pack,
    pack_hooks,
    pack_unchanged,
    unpack,
)

Facts = tuple[torch.Size, torch.dtype, torch.device]


class _Placeholder:
    """The placeholder of a saved tensor; the first one that is unpacked restores all."""

    __slots__ = ("__weakref__", "dropped", "value")

    dropped: DroppedTensors
    value: Tensor | None

    def tensor(self) -> Tensor:
        """Return the tensor once: another backward runs the forward again."""
        if self.value is None:
            self.dropped.restore()
        value, self.value = self.value, None
        assert value is not None
        return value


class DroppedTensors(ABC):
    """The tensors that autograd saves in one forward, replaced by placeholders.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), by saved-tensor hooks, as
    in the non-reentrant torch.utils.checkpoint, with less work for each tensor.
    """

    def __init__(self) -> None:
        self.notes: list[weakref.ref[_Placeholder]] = []
        self.facts: list[Facts] = []  # of each saved tensor

    @abstractmethod
    def rerun(self) -> None:
        """Run the forward again."""

    @abstractmethod
    def describe_modules(self) -> str:
        """Return the names of the modules that run, for a message."""

    def drop_saved(self) -> saved_tensors_hooks:
        """Drop, within a block, all tensors that autograd saves."""
        return saved_tensors_hooks(self.pack, _Placeholder.tensor)

    def pack(self, tensor: Tensor) -> _Placeholder:
        """Drop one tensor, and return its placeholder."""
        note = _Placeholder()
        note.dropped, note.value = self, None
        self.notes.append(weakref.ref(note))
        self.facts.append((tensor.shape, tensor.dtype, tensor.device))
        return note

    def restore(self) -> None:
        """Run the forward again up to its last saved tensor; fill the placeholders still in use."""
        count, last = 0, len(self.notes)

        def fill(tensor: Tensor) -> Tensor:
            nonlocal count
            note, facts = self.notes[count](), self.facts[count]
            count += 1
            value = tensor.detach() if tensor.requires_grad else tensor
            if note is not None:
                current = value.shape, value.dtype, value.device
                if current != facts:
                    self._fail(
                        f"saved {_text(current)} the second time where it saved {_text(facts)} the"
                        " first"
                    )
                note.value = value
            if count == last:
                raise _AllRestored
            return value

        try:
            with torch.enable_grad(), pack_hooks(fill):
                self.rerun()
        except _AllRestored:
            return
        self._fail(f"saved {count} tensors the second time, {last} the first")

    def _fail(self, change: str) -> None:
        raise RuntimeError(
            f"recomputation of {self.describe_modules()} ran differently: it {change}"
        )


def _text(facts: Facts) -> str:
    shape, dtype, device = facts
    return f"{dtype}{list(shape)} on {device}"


class _AllRestored(BaseException):
    """Raised when the last tensor is restored; not an Exception, so that no model catches it."""


def save_tensors(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Save tensors as autograd does; the returned function gives them back, any number of times.

    They come back detached. A tensor that was written into since raises an error, as in autograd.
    """
    pack = outer_pack()
    if pack is pack_unchanged:
        saved: list[Any] = [VersionedTensor(tensor) for tensor in tensors]
    else:
        with torch.no_grad():
            saved = [pack(tensor.detach()) for tensor in tensors]
    return lambda: [unpack(entry) for entry in saved]
