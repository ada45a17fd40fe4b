"""Numbers that pass between tensors on the meta device and lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

if TYPE_CHECKING:
    from schedlang.runtime.tracing.meta_runs import KnownValues


@dataclass(eq=False)
class LiteralsMode(TorchFunctionMode):
    """Mode that stores the numbers of literals in `constants`: on the meta device they are lost.

    Literals become tensors below dispatch: the arguments of `torch.tensor`, and lists of indices.
    The conversions back are below dispatch, too: `tolist`, and `format` of a scalar. Sizes of parts
    that are not known are replaced: one part is the whole tensor, the others are empty.
    """

    constants: KnownValues

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        reads = func in READING_CALLS and args[0].is_meta
        if reads and (value := self._read(func, args)) is not None:
            return value
        if func in INDEXING_CALLS and args[0].is_meta:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            literal = tuple(self._tensor(i) if isinstance(i, list) else i for i in index)
            args = (args[0], literal, *args[2:])
        if func in SPLITTING_CALLS and len(args) > 1 and self.constants.is_unknown(args[1]):
            args = (
                args[0],
                self._sizes(*args[:2], kwargs.get("dim", [*args[2:], 0][0])),
                *args[2:],
            )
        output = func(*args, **kwargs)
        if func in TENSOR_CALLS and output.is_meta and _plain(args[0]):
            self.constants.store_values(func(*args, **{**kwargs, "device": "cpu"}), output)
        return output

    def _read(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the numbers of a tensor; None if they are not known: then torch raises."""
        if func is torch.Tensor.tolist:
            return self.constants.list_of(args[0])
        return format(args[0].item(), *args[1:]) if args[0].ndim == 0 else None

    def _sizes(self, value: Any, sizes: list[int], dim: int) -> list[int]:
        """Return sizes of parts that add up, for sizes that are not known."""
        whole = 0 if not any(sizes) else len(sizes) - 1
        return [value.shape[dim] if part == whole else 0 for part in range(len(sizes))]

    def _tensor(self, numbers: list[Any]) -> Any:
        if not _plain(numbers):
            return numbers
        real = torch.tensor(numbers, device="cpu")
        bare = real.to("meta")
        self.constants.store_values(real, bare)
        return bare


INDEXING_CALLS = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
TENSOR_CALLS = (torch.tensor, torch.as_tensor)
SPLITTING_CALLS = (torch.split, torch.Tensor.split, torch.Tensor.split_with_sizes)
READING_CALLS = (torch.Tensor.tolist, torch.Tensor.__format__)


def _plain(data: Any) -> bool:
    return all(isinstance(value, int | bool) for value in _pytree.tree_leaves(data))
