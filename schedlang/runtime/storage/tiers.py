"""Where storages lie: on the device (for whom), in host memory or on disk; told by who puts them.

On a machine with a GPU host memory is another device. On a CPU it is not, so whatever is put off
the device is marked, with its storage, and everything else counts as the device's: the copies are
as real, and what lies where can be counted without a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.runtime.device import HOST, host_empty

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
    """Whether nothing holds a storage any more."""
    return bool(reference.expired())  # type: ignore[no-untyped-call]


def reference_to(tensor: Tensor) -> StorageWeakRef:
    """A reference to a tensor's storage that does not keep it."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def mark(tensor: Tensor, tier: str) -> Tensor:
    """Note where the storage of a tensor lies; the tensor."""
    _marks.put(reference_to(tensor), tier)
    return tensor


def tier_of(tensor: Tensor) -> str:
    """Where the storage of a tensor lies."""
    return _marks.get(reference_to(tensor))


class Ledger:
    """How many bytes lie on each tier, and the peaks.

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
    """What is made in it, while somebody counts, lies on a tier from its first moment on."""
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
    with _makes(tier):
        made = torch.empty(shape, dtype=dtype, device=device)
    return made if tier == DEVICE else mark(made, tier)


def plain_copy(tensor: Tensor, tier: str = CPU) -> Tensor:
    """A copy in host memory, contiguous, marked."""
    with torch._C.DisableTorchFunction():
        made = empty(tensor.shape, tensor.dtype, tier, beside=tensor.device)
        return made.copy_(tensor.detach())
