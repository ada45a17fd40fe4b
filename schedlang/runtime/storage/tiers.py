"""Tiers of memory: device, host memory, disk, or a device for another rank.

On a machine with a GPU, host memory is another device. On a CPU it is not, so a storage that is
moved off the device is marked, and all others count as the device's: the copies are real in both
cases, and bytes per tier can be counted without a GPU.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.runtime.device import HOST, host_empty
from schedlang.runtime.storage.folder import run_on_all_ranks

DEVICE, CPU, DISK = "device", "cpu", "disk"
PEER = "peer"  # on the device, held for another rank
TIERS = (DEVICE, CPU, DISK, PEER)
_MANY = 1024  # marks, above which those of freed storages are removed


class _Marks:
    """The tiers of storages off the device; marks of freed storages are removed."""

    def __init__(self) -> None:
        self.tiers: dict[int, tuple[StorageWeakRef, str]] = {}
        self.limit = _MANY

    def put(self, reference: StorageWeakRef, tier: str) -> None:
        """Mark the tier of a storage; remove marks of freed storages once there are many."""
        self.tiers[reference.cdata] = (reference, tier)
        if len(self.tiers) > self.limit:
            self.tiers = {k: m for k, m in list(self.tiers.items()) if not is_freed(m[0])}
            self.limit = max(_MANY, 2 * len(self.tiers))

    def get(self, reference: StorageWeakRef) -> str:
        # the weak reference keeps the address reserved, so no other storage can have this key
        return self.tiers.get(reference.cdata, (None, DEVICE))[1]


class _CreationTier(threading.local):
    """The tier of tensors that `empty_on_host` is creating, for dispatch modes that count
    meanwhile."""

    tier = DEVICE


_marks = _Marks()
_creation_tier = _CreationTier()


def is_freed(reference: StorageWeakRef) -> bool:
    """Return whether a storage was freed."""
    return bool(reference.expired())  # type: ignore[no-untyped-call]


def reference_to(tensor: Tensor) -> StorageWeakRef:
    """Return a weak reference to the storage of a tensor."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def set_tier(tensor: Tensor, tier: str) -> Tensor:
    """Mark the tier of the storage of a tensor; return the tensor."""
    _marks.put(reference_to(tensor), tier)
    return tensor


def tier_of(tensor: Tensor) -> str:
    """Return the tier of a tensor's storage."""
    return _marks.get(reference_to(tensor))


class TierBytes:
    """The bytes on each tier, and their peaks.

    It watches storages: a byte counts as long as anything refers to it. Each look costs time in
    proportion to the live storages, so this is for tests and reports.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[StorageWeakRef, int, str | None]] = {}
        self.peak = dict.fromkeys(TIERS, 0)

    def track(self, tier: str | None, tensor: Tensor) -> None:
        """Count the storage of `tensor` as long as it lives, on `tier`; None: on its marked
        tier."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if tier is None and reference.cdata in self._held:
            return
        if tier is None and _creation_tier.tier != DEVICE:
            _marks.put(reference, _creation_tier.tier)
        self._held[reference.cdata] = (reference, storage.nbytes(), tier)
        for tier, size in self.alive_bytes().items():
            self.peak[tier] = max(self.peak[tier], size)

    def alive_bytes(self) -> dict[str, int]:
        """Return the live bytes of each tier."""
        self._held = {key: entry for key, entry in self._held.items() if not is_freed(entry[0])}
        totals = dict.fromkeys(TIERS, 0)
        for reference, size, tier in self._held.values():
            totals[tier or _marks.get(reference)] += size
        return totals

    def bytes(self, tier: str) -> int:
        """Return the live bytes of a tier."""
        return self.alive_bytes()[tier]


class TierCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts, in its `ledger`, every storage that is created or used."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = TierBytes()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves((args, kwargs, output)):
            if isinstance(value, Tensor) and not value.is_meta:
                self.ledger.track(None, value)
        return output


@contextmanager
def _create_on(tier: str) -> Iterator[None]:
    """Count storages created within a block on a tier from the start."""
    previous, _creation_tier.tier = _creation_tier.tier, tier
    try:
        yield
    finally:
        _creation_tier.tier = previous


def empty_on_host(
    shape: torch.Size, dtype: torch.dtype, tier: str = CPU, *, beside: torch.device = HOST
) -> Tensor:
    """Return a new marked tensor in host memory; pinned, if that helps copies of device
    `beside`."""
    with _create_on(tier):
        return set_tier(host_empty(shape, dtype, beside=beside), tier)


def empty_on(
    device: torch.device, shape: Sequence[int], dtype: torch.dtype, tier: str = DEVICE
) -> Tensor:
    """Return a new tensor on a device, marked if it is held there for another rank."""
    if tier == _creation_tier.tier == DEVICE:
        return torch.empty(shape, dtype=dtype, device=device)
    with _create_on(tier):
        tensor = torch.empty(shape, dtype=dtype, device=device)
    return tensor if tier == DEVICE else set_tier(tensor, tier)


def host_copy(tensor: Tensor, tier: str = CPU) -> Tensor:
    """Return a contiguous, marked copy in host memory."""
    with torch._C.DisableTorchFunction():
        copied = empty_on_host(tensor.shape, tensor.dtype, tier, beside=tensor.device)
        return copied.copy_(tensor.detach())


# ---- Tensors in anonymous files: complete once mapped, and freed with the last reference.
# A file is created without a name in the temporary folder (`TMPDIR`), gets all its room at once, is
# written, and mapped copy-on-write. So no partial file is ever visible, a killed process leaves no
# file behind, and a tensor in a file is read, copied and saved as any other.


_PIECE = 1 << 24  # bytes written at a time


class ScratchFiles:
    """The temporary files of one program on one rank.

    A tensor for which there is no room stays in host memory; the error is raised at the end of the
    step, on all ranks alike, because others would wait for a rank that stopped in the middle.
    """

    def __init__(self) -> None:
        self.failure: OSError | None = None
        self.written = 0  # bytes so far
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> ScratchFiles:
        """Return self: copies of a module share the files."""
        return self

    def store(self, tensor: Tensor) -> Tensor:
        """Return the values in a file; in host memory if there is no room, which is recorded."""
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            return set_tier(tensor.detach().cpu(), DISK)
        host = tensor if tensor.is_cpu and tensor.is_contiguous() else host_copy(tensor)
        try:
            mapped = _write(host.detach(), size)
        except OSError as error:
            with self._lock:
                self.failure = self.failure or error
            return host_copy(tensor, CPU)
        with self._lock:
            self.written += size
        return set_tier(mapped, DISK)

    def raise_failure(self, consequence: str) -> None:
        """Raise the same Refusal S850 on all ranks if a write has failed on one."""
        failure, self.failure = self.failure, None

        def fail() -> None:
            if failure is not None:
                raise failure

        run_on_all_ranks(fail, lambda error: disk_full(error, consequence))


def disk_full(error: BaseException, consequence: str) -> Diagnostic:
    """Return the message for a file that cannot be written."""
    return Diagnostic(
        "S850",
        f"cannot write what a row offloads to disk in `{tempfile.gettempdir()}`",
        notes=(str(error), consequence),
        helps=(
            "make room, or set TMPDIR to a folder on a larger disk",
            "or offload to host memory: `to=cpu`",
        ),
    )


def _write(host: Tensor, size: int) -> Tensor:
    """Return a tensor mapped from a new file of its bytes; raises OSError if there is no room."""
    with torch._C.DisableTorchFunction(), tempfile.TemporaryFile(buffering=0) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)  # all the room now, or an error now
        numbers: Any = host.reshape(-1).view(torch.uint8).numpy()
        raw = memoryview(numbers)
        offset = 0
        while offset < size:
            offset += file.write(raw[offset : offset + _PIECE])
        # private to this process: writing into the tensor does not write into the file
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        return torch.frombuffer(mapped, dtype=torch.uint8).view(host.dtype).view(host.shape)
