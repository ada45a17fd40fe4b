"""Tiers on which storages lie: device (for whom), host memory, disk; told by who puts them there.

On a machine with a GPU host memory is another device. On a CPU it is not, so whatever is put off
the device is marked, with its storage, and everything else counts as the device's: the copies are
as real, and what lies where can be counted without a GPU.
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
from schedlang.runtime.storage.folder import together

DEVICE, CPU, DISK = "device", "cpu", "disk"
PEER = "peer"  # on the device, held for another rank
TIERS = (DEVICE, CPU, DISK, PEER)
_ENOUGH = 1024  # marks, before those of storages that are gone are looked for


class _Marks:
    """The storages off the device; one that is gone is forgotten."""

    def __init__(self) -> None:
        self.tiers: dict[int, tuple[StorageWeakRef, str]] = {}
        self.limit = _ENOUGH

    def put(self, reference: StorageWeakRef, tier: str) -> None:
        """Note on which tier a storage lies; forgets those that are gone, once there are many."""
        self.tiers[reference.cdata] = (reference, tier)
        if len(self.tiers) > self.limit:
            self.tiers = {k: m for k, m in list(self.tiers.items()) if not gone(m[0])}
            self.limit = max(_ENOUGH, 2 * len(self.tiers))

    def get(self, reference: StorageWeakRef) -> str:
        # a mark keeps its storage's place from being given to another, so it is never mistaken
        return self.tiers.get(reference.cdata, (None, DEVICE))[1]


class _Making(threading.local):
    """The tier of what is being made by `empty`, for whoever counts while it is."""

    tier = DEVICE


_marks = _Marks()
_making = _Making()


def gone(reference: StorageWeakRef) -> bool:
    """Return whether nothing holds a storage any more."""
    return bool(reference.expired())  # type: ignore[no-untyped-call]


def reference_to(tensor: Tensor) -> StorageWeakRef:
    """A reference to a tensor's storage that does not keep it."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def mark(tensor: Tensor, tier: str) -> Tensor:
    """Note where the storage of a tensor lies; the tensor."""
    _marks.put(reference_to(tensor), tier)
    return tensor


def tier_of(tensor: Tensor) -> str:
    """The tier of a tensor's storage."""
    return _marks.get(reference_to(tensor))


class Ledger:
    """The bytes that lie on each tier, and their peaks.

    It watches the storages themselves: a byte counts as long as anything holds it.  Looking
    costs time in proportion to the storages alive, so it is for tests and reports.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[StorageWeakRef, int, str | None]] = {}
        self.peak = dict.fromkeys(TIERS, 0)

    def track(self, tier: str | None, tensor: Tensor) -> None:
        """Count the storage behind `tensor` for as long as it lives; None: where it is marked."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if tier is None and reference.cdata in self._held:
            return
        if tier is None and _making.tier != DEVICE:
            _marks.put(reference, _making.tier)
        self._held[reference.cdata] = (reference, storage.nbytes(), tier)
        for tier, size in self.now().items():
            self.peak[tier] = max(self.peak[tier], size)

    def now(self) -> dict[str, int]:
        """The bytes alive on each tier."""
        self._held = {key: one for key, one in self._held.items() if not gone(one[0])}
        found = dict.fromkeys(TIERS, 0)
        for reference, size, tier in self._held.values():
            found[tier or _marks.get(reference)] += size
        return found

    def bytes(self, tier: str) -> int:
        """The bytes alive on a tier now."""
        return self.now()[tier]


class Residence(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, in its `ledger`, every storage that is made or used while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves((args, kwargs, out)):
            if isinstance(value, Tensor) and not value.is_meta:
                self.ledger.track(None, value)
        return out


@contextmanager
def _makes(tier: str) -> Iterator[None]:
    """Let storages made inside lie on a tier from their first moment on, for whoever counts."""
    before, _making.tier = _making.tier, tier
    try:
        yield
    finally:
        _making.tier = before


def empty(
    shape: torch.Size, dtype: torch.dtype, tier: str = CPU, *, beside: torch.device = HOST
) -> Tensor:
    """A new tensor in host memory, marked; pinned, where that helps copies of the device beside."""
    with _makes(tier):
        return mark(host_empty(shape, dtype, beside=beside), tier)


def made_on(
    device: torch.device, shape: Sequence[int], dtype: torch.dtype, tier: str = DEVICE
) -> Tensor:
    """A new tensor on a device, marked where it lies there for somebody else."""
    if tier == _making.tier == DEVICE:
        return torch.empty(shape, dtype=dtype, device=device)
    with _makes(tier):
        made = torch.empty(shape, dtype=dtype, device=device)
    return made if tier == DEVICE else mark(made, tier)


def plain_copy(tensor: Tensor, tier: str = CPU) -> Tensor:
    """A copy in host memory, contiguous, marked."""
    with torch._C.DisableTorchFunction():
        made = empty(tensor.shape, tensor.dtype, tier, beside=tensor.device)
        return made.copy_(tensor.detach())


# ---- Tensors in files that have no name: whole once mapped, and gone with whoever holds them.
# A file is made without a name in the temporary folder (`TMPDIR`), gets all its room at once, is
# written, and mapped copy-on-write. So nobody ever sees a part of one, a process that is killed
# leaves none behind, and a tensor in a file is read, copied and saved as any other.


_PIECE = 1 << 24  # bytes written at a time


class Scratch:
    """The files of one program on one rank.

    What does not fit stays in host memory, and is told at the end of the step, on all ranks alike:
    a rank that stopped in the middle would leave the others waiting for it.
    """

    def __init__(self) -> None:
        self.failure: OSError | None = None
        self.written = 0  # bytes so far
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Scratch:
        """Copies of a module go on using the same."""
        return self

    def put(self, tensor: Tensor) -> Tensor:
        """The same values in a file; in host memory if there is no room, which is noted."""
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            return mark(tensor.detach().cpu(), DISK)
        host = tensor if tensor.is_cpu and tensor.is_contiguous() else plain_copy(tensor)
        try:
            mapped = _write(host.detach(), size)
        except OSError as error:
            with self._lock:
                self.failure = self.failure or error
            return plain_copy(tensor, CPU)
        with self._lock:
            self.written += size
        return mark(mapped, DISK)

    def check(self, consequence: str) -> None:
        """Raise the same Refusal S850 on all ranks if anything could not be written on one."""
        failure, self.failure = self.failure, None

        def fail() -> None:
            if failure is not None:
                raise failure

        together(fail, lambda error: full(error, consequence))


def full(error: BaseException, consequence: str) -> Diagnostic:
    """The message where a file cannot be written."""
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
    """A tensor mapped from a new file of its bytes; raises OSError where there is no room."""
    with torch._C.DisableTorchFunction(), tempfile.TemporaryFile(buffering=0) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)  # all the room now, or an error now
        numbers: Any = host.reshape(-1).view(torch.uint8).numpy()
        raw = memoryview(numbers)
        at = 0
        while at < size:
            at += file.write(raw[at : at + _PIECE])
        # private to this process: writing into the tensor does not write into the file
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        return torch.frombuffer(mapped, dtype=torch.uint8).view(host.dtype).view(host.shape)
