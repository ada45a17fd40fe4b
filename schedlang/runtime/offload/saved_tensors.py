"""Keep a module's saved activations in host memory, on disk or on another rank until backward.

* Keep a module's saved activations in host memory, or on disk, between forward and backward.
  Saved-tensor hooks around the forward of one module instance copy every storage that autograd
  wants to keep, once however many views of it are saved, and let go of the original (Rhu et al.,
  "vDNN", 2016).  Parameters and buffers stay where they are.  On an accelerator copies go through
  pinned memory on a stream of their own; backward of one module starts the reload of the one
  before it.  On a CPU the copies are as real, so that a `Ledger` shows what lies where.
* A module whose saved activations another rank may hold between its forward and its backward. It
  puts them into the bag of the forward that runs, which the rows of the timeline carry away and
  back (`pipeline.parking`). Where nothing is carried away they stay, and an outer checkpoint does
  not see them either: it counts what it sees, and must see as much again when it runs a second
  time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from schedlang.runtime import scope
from schedlang.runtime.device import settled
from schedlang.runtime.forward import wrap
from schedlang.runtime.storage import copies
from schedlang.runtime.storage.saved import (
    Addresses,
    Kept,
    Policy,
    View,
    Viewed,
    as_it_is,
    place,
    plain,
    policies,
    slot,
    within,
)
from schedlang.runtime.storage.tiers import CPU, DEVICE, DISK, Scratch, gone, reference_to

SMALLEST = 1 << 16  # bytes; what is smaller costs more to move than to keep


@dataclass
class Store:
    """The store of the offloaded activations of one program; share it among its modules.

    `prefetch` modules are reloaded ahead of the one whose backward runs; 0 reloads each tensor when
    it is asked for.  Storages of fewer than `smallest` bytes stay.  With `scratch` they go to disk.
    `paced`: when a call ends, what the call before it has copied is waited for, so that no more
    than two of them are on their way at a time.
    """

    prefetch: int = 1
    smallest: int = field(default_factory=lambda: 0 if _all_moves.get() else SMALLEST)
    ledger: Tracks | None = None
    scratch: Scratch | None = None
    paced: bool = False
    moved: int = 0  # bytes copied to the host so far
    _seen: dict[int, tuple[StorageWeakRef, int, weakref.ref[_Copy]]] = field(default_factory=dict)
    _mark: torch.Event | None = None
    _device: torch.device | None = None
    _last: dict[int | None, weakref.ref[_Call]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ledger is None:
            self.ledger = _watching

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        """Copies of a module go on using the same store."""
        return self

    def track(self, tier: str, tensor: Tensor) -> None:
        """Tell the ledger, if there is one."""
        if self.ledger is not None:
            self.ledger.track(tier, tensor)

    def begin(self) -> _Call:
        """A new call of a module, after the one before it in the same forward of a microbatch.

        What another stage of this rank saved is wanted much later, if it has several.
        """
        here, forward = scope.current(), scope.noted()
        key = here.microbatch if here is not None else None
        last = self._last.get(key)
        before = last() if last is not None else None
        near = before is not None and before.forward is forward
        call = _Call(self, before if near else None, forward)
        self._last[key] = weakref.ref(call)
        self._seen = {key: entry for key, entry in self._seen.items() if not gone(entry[0])}
        return call

    def end(self) -> None:
        """A call has ended, its copies are on their way."""
        if self.paced and self._device is not None:
            under_way, self._mark = self._mark, copies.mark(self._device)
            settled(under_way)

    def copy_of(self, tensor: Tensor) -> _Copy:
        """The host copy of the storage behind a tensor, made now or shared with another view."""
        reference = reference_to(tensor)
        version = tensor._version
        known = self._seen.get(reference.cdata)
        if known is not None and known[1] == version:
            copied = known[2]()
            if copied is not None:
                return copied
        copied = _Copy(self, tensor)
        self._device = tensor.device
        self._seen[reference.cdata] = (reference, version, weakref.ref(copied))
        return copied


class Tracks(Protocol):
    """A listener to the storages of a store."""

    def track(self, tier: str, tensor: Tensor) -> None:
        """A storage lies on a tier."""


_all_moves: ContextVar[bool] = ContextVar("all_moves", default=False)


@contextmanager
def everything_moves() -> Iterator[None]:
    """Stores that are made inside move storages of any size: a proof's models are small."""
    token = _all_moves.set(True)
    try:
        yield
    finally:
        _all_moves.reset(token)


_watching: Tracks | None = None


@contextmanager
def watched(ledger: Tracks) -> Iterator[None]:
    """Stores that are made inside tell this ledger, if they are given none."""
    global _watching
    before, _watching = _watching, ledger
    try:
        yield
    finally:
        _watching = before


def offload(module: nn.Module, store: Store) -> None:
    """Keep what `module` saves for backward in host memory, in place; gradients stay bit-equal.

    With a checkpoint on the same module the layer lies around it: the inputs of the checkpoint are
    offloaded, and nothing else is kept.  Tensors on other devices than the module, tensors of
    special layouts and tensor subclasses stay.
    """
    wrap(module, "offload", Offload(module, store))


class Offload(Policy):
    """Off the device, in a store."""

    def __init__(self, module: nn.Module, store: Store) -> None:
        self.module = module
        self.store = store

    def saving(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `inner`, whose storages go to the host; what a policy inside makes of them, too."""
        call, own = self.store.begin(), Addresses(self.module)

        def pack(tensor: Tensor) -> Any:
            if self._stays(tensor, own):
                return as_it_is(tensor)
            if _counts_apart(tensor):
                tensor = tensor.detach().clone()
            return Viewed(partial(call.give, call.keep(tensor)), View.of(tensor))

        with within(offload=pack), slot(pack):
            output = inner(*args, **kwargs)
        self.store.end()
        return output

    def _stays(self, tensor: Tensor, own: Addresses) -> bool:
        if not plain(tensor) or (tensor.is_meta and self.store.ledger is None):
            return True
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.store.smallest or place(tensor) == 0:
            return True
        home = next(self.module.parameters(), tensor).device
        if tensor.device != home or place(tensor) in own:
            return True
        self.store.track(DEVICE, tensor)
        return False


def _counts_apart(tensor: Tensor) -> bool:
    """Return whether a tensor is a part of a storage whose other parts count their own writes.

    So it is with `unsafe_chunk`, by which torch's recurrent cells take their gates apart and write
    them one by one: their versions do not tell that the rest of the storage has changed since.
    """
    part = tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
    return part and not tensor._is_view()


class _Call:
    """One call of an offloaded module: the copies that its backward will want."""

    def __init__(self, store: Store, before: _Call | None, forward: object) -> None:
        self.store, self.forward = store, forward
        # weak: the calls of a step that is over must not live on behind the next
        self.before = weakref.ref(before) if before is not None else None
        self.copies: list[weakref.ref[_Copy]] = []
        self.touched = False

    def keep(self, tensor: Tensor) -> _Copy:
        """The host copy of a tensor that this call saves."""
        copied = self.store.copy_of(tensor)
        self.copies.append(weakref.ref(copied))
        return copied

    def give(self, copied: _Copy) -> Tensor:
        """The bytes of a storage on the device again, for backward."""
        self.touch()
        return copied.use()

    def touch(self) -> None:
        """Backward of this call begins: reload its tensors and those of the calls before it."""
        if self.touched or not self.store.prefetch:
            return
        self.touched = True
        call: _Call | None = self
        for _ in range(self.store.prefetch + 1):
            if call is None:
                return
            call.reload()
            call = call.before() if call.before is not None else None

    def reload(self) -> None:
        """Start to bring everything back, what was saved last first."""
        for reference in reversed(self.copies):
            copied = reference()
            if copied is not None:
                copied.reload()


class _Copy:
    """One storage: on the host after forward, on the device again from its reload on."""

    def __init__(self, store: Store, tensor: Tensor) -> None:
        self.store = store
        self.device = tensor.device
        self.raw: Tensor | None = None
        self.ready: Any = None
        source = _bytes(tensor.untyped_storage(), tensor.device)
        self.host: Tensor | None = copies.to_host(source, store.scratch)
        store.moved += source.numel()
        store.track(CPU if store.scratch is None else DISK, self.host)

    def reload(self) -> None:
        """Start the copy back, once; the host's memory is given up."""
        if self.host is None:
            return
        self.raw, self.ready = copies.to_device(self.host, self.device)
        self.host = None
        self.store.track(DEVICE, self.raw)

    def use(self) -> Tensor:
        """The bytes on the device, ready for the current stream."""
        self.reload()
        assert self.raw is not None
        return copies.ready(self.raw, self.ready)


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class Lodged(Policy):
    """The policy that keeps tensors in the bag of the forward that runs, if there is one."""

    def saving(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `inner`; what stays is kept without its history, which would live on with it."""
        with slot(policies.park or Kept):
            return inner(*args, **kwargs)


def park(module: nn.Module) -> None:
    """Let what `module` saves be carried away with the bag of a forward."""
    wrap(module, "offload", Lodged())
