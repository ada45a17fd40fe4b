"""Saved activations of a module in host memory, on disk or on another rank until backward.

* `offload_activations`: saved-tensor hooks around the forward of one module instance copy every
  saved storage to the host, once even if several views of it are saved, and drop the original (Rhu
  et al., "vDNN", 2016). Parameters and buffers stay. On an accelerator, copies use pinned memory
  and a stream of their own; the backward of a module starts the reload of the module before it. On
  a CPU the copies are real, too, so that a `Ledger` shows the bytes of each tier.
* `park_activations`: activations that another rank may hold between forward and backward. The
  module puts them into the bag of the running forward, which rows of the timeline move away and
  back (`pipeline.parking`). Without such rows they stay. An outer checkpoint does not see them: it
  counts the tensors that it sees, and must see as many in the second run.
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
from schedlang.runtime.device import host_wait
from schedlang.runtime.forward import wrap
from schedlang.runtime.storage import copies
from schedlang.runtime.storage.saved_tensors_slot import (
    LazyView,
    ModuleAddresses,
    SavedTensorPolicy,
    VersionedTensor,
    View,
    is_plain,
    memory_key,
    pack_hooks,
    pack_unchanged,
    policies,
    set_policies,
)
from schedlang.runtime.storage.tiers import CPU, DEVICE, DISK, ScratchFiles, is_freed, reference_to

MIN_BYTES = 1 << 16  # bytes; smaller storages cost more to move than to keep


@dataclass
class ActivationStore:
    """The offloaded activations of one program; all its modules share one store.

    `prefetch` modules are reloaded ahead of the one whose backward runs; 0 reloads each tensor when
    it is needed. Storages of fewer than `smallest` bytes stay. With `scratch` they go to disk.
    `paced`: the end of a call waits for the copies of the call before it, so that the copies of at
    most two calls are in flight.
    """

    prefetch: int = 1
    smallest: int = field(default_factory=lambda: 0 if _all_sizes.get() else MIN_BYTES)
    ledger: TierListener | None = None
    scratch: ScratchFiles | None = None
    paced: bool = False
    moved: int = 0  # bytes copied to the host so far
    _seen: dict[int, tuple[StorageWeakRef, int, weakref.ref[_Copy]]] = field(default_factory=dict)
    _mark: torch.Event | None = None
    _device: torch.device | None = None
    _last: dict[int | None, weakref.ref[_Call]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ledger is None:
            self.ledger = _listener

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationStore:
        """Return self: copies of a module share the store."""
        return self

    def track(self, tier: str, tensor: Tensor) -> None:
        """Report a tensor on a tier to the ledger, if there is one."""
        if self.ledger is not None:
            self.ledger.track(tier, tensor)

    def begin_call(self) -> _Call:
        """Begin a call of a module, linked to the call before it in the same forward.

        Activations of another stage of this rank are needed much later, so they are not linked.
        """
        call_scope, forward = scope.current(), scope.last_memo()
        key = call_scope.microbatch if call_scope is not None else None
        last = self._last.get(key)
        previous = last() if last is not None else None
        same_forward = previous is not None and previous.forward is forward
        call = _Call(self, previous if same_forward else None, forward)
        self._last[key] = weakref.ref(call)
        self._seen = {key: entry for key, entry in self._seen.items() if not is_freed(entry[0])}
        return call

    def end_call(self) -> None:
        """End a call, whose copies are in flight."""
        if self.paced and self._device is not None:
            pending, self._mark = self._mark, copies.record_copies(self._device)
            host_wait(pending)

    def copy_of(self, tensor: Tensor) -> _Copy:
        """Return the host copy of the storage of a tensor, new or shared with another view."""
        reference = reference_to(tensor)
        version = tensor._version
        entry = self._seen.get(reference.cdata)
        if entry is not None and entry[1] == version:
            copied = entry[2]()
            if copied is not None:
                return copied
        copied = _Copy(self, tensor)
        self._device = tensor.device
        self._seen[reference.cdata] = (reference, version, weakref.ref(copied))
        return copied


class TierListener(Protocol):
    """A listener to the storages of a store."""

    def track(self, tier: str, tensor: Tensor) -> None:
        """Record a storage on a tier."""


_all_sizes: ContextVar[bool] = ContextVar("all_moves", default=False)


@contextmanager
def offload_all_sizes() -> Iterator[None]:
    """Let stores that are created within a block move storages of any size, as for small models."""
    token = _all_sizes.set(True)
    try:
        yield
    finally:
        _all_sizes.reset(token)


_listener: TierListener | None = None


@contextmanager
def listen_to_stores(ledger: TierListener) -> Iterator[None]:
    """Let stores that are created within a block, without a ledger, report to this one."""
    global _listener
    previous, _listener = _listener, ledger
    try:
        yield
    finally:
        _listener = previous


def offload_activations(module: nn.Module, store: ActivationStore) -> None:
    """Offload the tensors that `module` saves for backward, in place; gradients are bit-equal.

    With a checkpoint on the same module, the offload is the outer layer: it moves the inputs of the
    checkpoint, and nothing else is saved. Tensors on other devices than the module, tensors of
    special layouts and tensor subclasses stay.
    """
    wrap(module, "offload", OffloadingPolicy(module, store))


class OffloadingPolicy(SavedTensorPolicy):
    """The policy that moves saved tensors to a store off the device."""

    def __init__(self, module: nn.Module, store: ActivationStore) -> None:
        self.module = module
        self.store = store

    def run_recorded(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `inner`; its saved storages go to the host, also after a policy inside."""
        call, module_addresses = self.store.begin_call(), ModuleAddresses(self.module)

        def pack(tensor: Tensor) -> Any:
            if self._stays(tensor, module_addresses):
                return pack_unchanged(tensor)
            if _has_own_versions(tensor):
                tensor = tensor.detach().clone()
            return LazyView(partial(call.fetch, call.keep(tensor)), View.of(tensor))

        with set_policies(offload=pack), pack_hooks(pack):
            output = inner(*args, **kwargs)
        self.store.end_call()
        return output

    def _stays(self, tensor: Tensor, module_addresses: ModuleAddresses) -> bool:
        if not is_plain(tensor) or (tensor.is_meta and self.store.ledger is None):
            return True
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.store.smallest or memory_key(tensor) == 0:
            return True
        device = next(self.module.parameters(), tensor).device
        if tensor.device != device or memory_key(tensor) in module_addresses:
            return True
        self.store.track(DEVICE, tensor)
        return False


def _has_own_versions(tensor: Tensor) -> bool:
    """Return whether a tensor is a part of a storage, with a version counter of its own.

    torch's recurrent cells split their gates by `unsafe_chunk` and write them one by one: the
    version of one part does not show that the rest of the storage has changed.
    """
    part = tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
    return part and not tensor._is_view()


class _Call:
    """One call of an offloaded module: the copies that its backward needs."""

    def __init__(self, store: ActivationStore, previous: _Call | None, forward: object) -> None:
        self.store, self.forward = store, forward
        # weak: the calls of a step must not outlive the step
        self.before = weakref.ref(previous) if previous is not None else None
        self.copies: list[weakref.ref[_Copy]] = []
        self.started = False

    def keep(self, tensor: Tensor) -> _Copy:
        """Return the host copy of a tensor that this call saves."""
        copied = self.store.copy_of(tensor)
        self.copies.append(weakref.ref(copied))
        return copied

    def fetch(self, copied: _Copy) -> Tensor:
        """Return the bytes of a storage on the device, for backward."""
        self.begin_backward()
        return copied.use()

    def begin_backward(self) -> None:
        """Start the reload of this call and of the calls before it."""
        if self.started or not self.store.prefetch:
            return
        self.started = True
        call: _Call | None = self
        for _ in range(self.store.prefetch + 1):
            if call is None:
                return
            call.reload()
            call = call.before() if call.before is not None else None

    def reload(self) -> None:
        """Start the copies back to the device, in reverse order."""
        for reference in reversed(self.copies):
            copied = reference()
            if copied is not None:
                copied.reload()


class _Copy:
    """One storage: on the host after forward, on the device after its reload."""

    def __init__(self, store: ActivationStore, tensor: Tensor) -> None:
        self.store = store
        self.device = tensor.device
        self.raw: Tensor | None = None
        self.ready: Any = None
        source = _bytes(tensor.untyped_storage(), tensor.device)
        self.host: Tensor | None = copies.to_host(source, store.scratch)
        store.moved += source.numel()
        store.track(CPU if store.scratch is None else DISK, self.host)

    def reload(self) -> None:
        """Start the copy back, once, and drop the host memory."""
        if self.host is None:
            return
        self.raw, self.ready = copies.to_device(self.host, self.device)
        self.host = None
        self.store.track(DEVICE, self.raw)

    def use(self) -> Tensor:
        """Return the bytes on the device, ready for the current stream."""
        self.reload()
        assert self.raw is not None
        return copies.wait_copy(self.raw, self.ready)


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class ParkingPolicy(SavedTensorPolicy):
    """The policy that puts saved tensors into the bag of the running forward, if there is one."""

    def run_recorded(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `inner`; tensors that stay are saved detached, because their graph would stay too."""
        with pack_hooks(policies.park or VersionedTensor):
            return inner(*args, **kwargs)


def park_activations(module: nn.Module) -> None:
    """Let the tensors that `module` saves move away with the bag of a forward."""
    wrap(module, "offload", ParkingPolicy())
