"""Counting of collectives and their bytes at torch's dispatcher, whoever calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
SILENT = ("wait", "barrier", "wrap_tensor")  # operators that send nothing
KINDS = {
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "broadcast": "broadcast",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "send": "send",
    "recv": "receive",
    "scatter": "scatter",
    "gather": "gather",
}


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives on this rank, of hand-written code and of schedlang alike.

    Both end in operators of torch's namespaces for communication: `c10d` for calls of
    torch.distributed (ours, and fully_shard's), `_c10d_functional` for DTensor.  Bytes are those
    of the largest tensor of a call: the whole of what is reduced, gathered or scattered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # DTensor first dispatches its own collectives
        result = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        if space in NAMESPACES and not any(part in name for part in SILENT):
            self._count(name, (args, kwargs, result))
        return result

    def _count(self, name: str, values: Any) -> None:
        kind = next((label for part, label in KINDS.items() if part in name), name)
        tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
        self.calls[kind] += 1
        self.bytes[kind] += max((t.numel() * t.element_size() for t in tensors), default=0)


def sent_bytes(sizes: Mapping[str, int], ranks: int) -> int:
    """Return the bytes that a rank sends, given counted bytes in one group and ring algorithms."""
    factors = {"all-reduce": 2 * (ranks - 1), "send": ranks, "receive": 0}
    return sum(size * factors.get(kind, ranks - 1) // ranks for kind, size in sizes.items())
