"""Keep the results of collectives for a recomputation, so that no rank communicates twice.

torch's selective checkpointing keeps what an operator returns.  The collectives of
torch.distributed write into a tensor of the caller's instead; skipped, they would leave it as it
was, and the gradients would be wrong without a word.  Here the recomputation copies the kept result
into that tensor.  What was written into since (`h += x` on a sum over ranks) is sent again, by all
ranks alike: they run the same model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_NAMES = (
    "allreduce_",
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "reduce_scatter_",
    "alltoall_",
    "alltoall_base_",
    "broadcast_",
    "reduce_",
)


class KeepCollectives:
    """Two dispatch modes over one store: `forward` fills it, `again` reads it in the same order."""

    def __init__(self) -> None:
        self.kept: list[tuple[list[Tensor], list[int], Any]] = []
        self.forward = _Record(self.kept)
        self.again = _Replay(self.kept)


def _is_collective(func: Any) -> bool:
    namespace, _, name = func.name().partition("::")
    name, _, _ = name.partition(".")
    return namespace == "c10d" and name in _NAMES


def _written(args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors that a collective writes: its first argument, however it is nested."""

    def flat(value: Any) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value]
        return [tensor for each in value for tensor in flat(each)]

    return flat(args[0])


class Seeing(TorchDispatchMode):
    """A mode that sees operators of a higher order (flex_attention), and leaves alone what is
    compiled."""

    supports_higher_order_operators = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether functions stay compiled."""
        return True


class _Record(Seeing):
    def __init__(self, kept: list[tuple[list[Tensor], list[int], Any]]) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_collective(func):
            tensors = [alias(tensor) for tensor in _written(args)]
            self.kept.append((tensors, [tensor._version for tensor in tensors], result))
        return result


class _Replay(Seeing):
    def __init__(self, kept: list[tuple[list[Tensor], list[int], Any]]) -> None:
        super().__init__()
        self.kept = kept
        self.next = 0

    def __enter__(self) -> Any:
        self.next = 0  # a second backward through a retained graph starts over
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not _is_collective(func):
            return func(*args, **(kwargs or {}))
        tensors, versions, result = self.kept[self.next]
        self.next += 1
        if versions != [tensor._version for tensor in tensors]:
            return func(*args, **(kwargs or {}))
        for target, source in zip(_written(args), tensors, strict=True):
            target.copy_(source)
        return result


def alias(tensor: Tensor) -> Tensor:
    """The same storage and count of writes, without history."""
    # within a dispatch mode a plain detach would not share the count
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
