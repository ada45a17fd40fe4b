"""Tensors that autograd saves in a forward: dropped, and made again by a second run in backward."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from schedlang.runtime.storage.saved import Kept, as_it_is, outside, slot, unpack

Facts = tuple[torch.Size, torch.dtype, torch.device]


class _Note:
    """A note in the place of a saved tensor; the first that is asked for brings all."""

    __slots__ = ("__weakref__", "dropped", "value")

    dropped: Dropped
    value: Tensor | None

    def tensor(self) -> Tensor:
        """Give it once: another backward runs the forward again."""
        if self.value is None:
            self.dropped.again()
        value, self.value = self.value, None
        assert value is not None
        return value


class Dropped(ABC):
    """The tensors that autograd saves in one forward: notes in their places.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), by hooks on saved tensors,
    as the non-reentrant torch.utils.checkpoint does it, with less work for each.
    """

    def __init__(self) -> None:
        self.notes: list[weakref.ref[_Note]] = []
        self.facts: list[Facts] = []  # of each

    @abstractmethod
    def rerun(self) -> None:
        """Run the forward once more."""

    @abstractmethod
    def names(self) -> str:
        """The modules that run, for a message."""

    def dropping(self) -> saved_tensors_hooks:
        """Drop what autograd saves inside."""
        return saved_tensors_hooks(self.pack, _Note.tensor)

    def pack(self, tensor: Tensor) -> _Note:
        """Drop one tensor."""
        note = _Note()
        note.dropped, note.value = self, None
        self.notes.append(weakref.ref(note))
        self.facts.append((tensor.shape, tensor.dtype, tensor.device))
        return note

    def again(self) -> None:
        """Run the forward again, as far as it takes, and give the notes that are left their
        tensors."""
        count, last = 0, len(self.notes)

        def fill(tensor: Tensor) -> Tensor:
            nonlocal count
            note, facts = self.notes[count](), self.facts[count]
            count += 1
            value = tensor.detach() if tensor.requires_grad else tensor
            if note is not None:
                now = value.shape, value.dtype, value.device
                if now != facts:
                    self._fail(
                        f"saved {_said(now)} the second time where it saved {_said(facts)} the"
                        " first"
                    )
                note.value = value
            if count == last:
                raise _Enough
            return value

        try:
            with torch.enable_grad(), slot(fill):
                self.rerun()
        except _Enough:
            return
        self._fail(f"saved {count} tensors the second time, {last} the first")

    def _fail(self, what: str) -> None:
        raise RuntimeError(f"recomputation of {self.names()} took another way: it {what}")


def _said(facts: Facts) -> str:
    shape, dtype, device = facts
    return f"{dtype}{list(shape)} on {device}"


class _Enough(BaseException):
    """All that was saved is back; not an Exception, so that no model catches it."""


def hold(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Keep tensors as autograd keeps what it saves; the result gives them back, again and again.

    They come back without history.  One that was written into since is an error, as it is there.
    """
    keep = outside()
    if keep is as_it_is:
        kept: list[Any] = [Kept(tensor) for tensor in tensors]
    else:
        with torch.no_grad():
            kept = [keep(tensor.detach()) for tensor in tensors]
    return lambda: [unpack(one) for one in kept]
