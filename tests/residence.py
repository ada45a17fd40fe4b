"""Bytes of storages on each tier, counted while something runs, and their peaks."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.runtime.storage import tiers


class Ledger:
    """How many bytes lie on each tier, and the peaks.

    It watches the storages themselves: a byte counts as long as anything holds it.  Looking
    costs time in proportion to the storages alive, so it is for tests and reports.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[StorageWeakRef, int, str | None]] = {}
        self.peak = dict.fromkeys(tiers.TIERS, 0)

    def track(self, tier: str | None, tensor: Tensor) -> None:
        """Count the storage behind `tensor` for as long as it lives; None: where it is marked."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if tier is None and reference.cdata in self._held:
            return
        if tier is None and tiers._making.tier != tiers.DEVICE:
            tiers._marks.put(reference, tiers._making.tier)
        self._held[reference.cdata] = (reference, storage.nbytes(), tier)
        for tier, size in self.now().items():
            self.peak[tier] = max(self.peak[tier], size)

    def now(self) -> dict[str, int]:
        """The bytes alive on each tier."""
        self._held = {key: one for key, one in self._held.items() if not tiers.gone(one[0])}
        found = dict.fromkeys(tiers.TIERS, 0)
        for reference, size, tier in self._held.values():
            found[tier or tiers._marks.get(reference)] += size
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
