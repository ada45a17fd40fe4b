"""Which saved tensors are a module's own, or given to it as they are; by the memory they lie in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float64, torch.float32, *HALVES)


def place(tensor: Tensor) -> int:
    """Equal for tensors in the same memory, or in the same that is not there."""
    storage = tensor.untyped_storage()
    return int(storage._cdata) if tensor.is_meta else int(storage.data_ptr())


def is_copy(tensor: Tensor, weight: Tensor) -> bool:
    """Is a tensor of 16 bits a weight of more as casts have it, perhaps transposed?"""
    if tensor.dtype not in HALVES or weight.dtype != torch.float32:
        return False
    if tensor.is_meta != weight.is_meta:
        return False
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for one in (weight, weight.t()) if weight.dim() == 2 else (weight,):
            if one.shape == tensor.shape and (
                tensor.is_meta or torch.equal(one.to(tensor.dtype), tensor)
            ):
                return True
    return False


def places(module: nn.Module) -> Iterator[int]:
    """Where parameters and buffers lie now: FSDP gathers those of submodules during forward."""
    return map(place, own(module))


def own(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers as this rank has them."""
    for group in (module.parameters(), module.buffers()):
        for each in group:
            with torch.no_grad():
                yield each.to_local() if hasattr(each, "to_local") else each


class Addresses:
    """Where a module's own tensors lie in one call, found anew only when some of them have moved.

    fully_shard gathers parameters, and offloading brings them, for a whole module at a time: so
    one parameter of each submodule tells. `address` is equal for tensors in the same memory, and
    `given` are others that count as its own.
    """

    def __init__(
        self,
        module: nn.Module,
        address: Callable[[Tensor], int] = place,
        given: Iterable[Tensor] = (),
    ) -> None:
        self._module, self._address = module, address
        self._given = frozenset(map(address, given))
        self._owners = [
            (owner, next(iter(names)))
            for owner in module.modules()
            if (names := [n for n, p in owner._parameters.items() if p is not None])
        ]
        self._seen: tuple[object, ...] | None = None
        self._found: frozenset[int] = frozenset()

    def __contains__(self, address: object) -> bool:
        now = tuple(_told(owner._parameters[name]) for owner, name in self._owners)
        if now != self._seen:
            self._seen = now
            self._found = self._given.union(map(self._address, own(self._module)))
        return address in self._found


def _told(parameter: Tensor | None) -> tuple[int, int]:
    """Another one whenever there is another parameter, or it has moved."""
    return id(parameter), parameter.data_ptr() if type(parameter) is nn.Parameter else 0


def given_whole(arguments: Any) -> frozenset[int]:
    """Where the tensors lie that a module is given as they are: without a gradient, or weights."""
    tensors = (t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor))
    return frozenset(
        place(t) for t in tensors if not t.requires_grad or isinstance(t, nn.Parameter)
    )


def is_candidate(tensor: Tensor, whole: Collection[int]) -> bool:
    """May a saved tensor be coded: a float in memory of its own?"""
    plain = type(tensor) is Tensor and tensor.layout == torch.strided
    return plain and tensor.dtype in FLOATS and tensor.numel() > 0 and place(tensor) not in whole
