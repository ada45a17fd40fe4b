"""Tensors that modules save for backward in a forward on the meta device: their sites and shapes.

Comparing the original's list with that of its sharded copy shows how the ranks split each saved
tensor.  It also shows which tensors are one memory in one model and two in the other: a rank with
one head has nothing to transpose, so a copy in the original is a view there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.runtime.storage.saved_tensors_slot import (
    element_key,
    is_candidate,
    memory_key,
    memory_keys,
    pack_hooks,
    policies,
    set_policies,
    ungraded_inputs,
)
from schedlang.runtime.storage.tiers import reference_to

if TYPE_CHECKING:
    from schedlang.runtime.propagation.trace import ModuleStack

Turn = tuple[str, int]  # the innermost module that saves, and the number of the save, from 1


class SavedTensor(NamedTuple):
    """A saved tensor: the innermost module that saved it, its shape, and its number in the call.

    `same`: the earlier save of the same elements of the same memory in this call, if there was one.
    """

    site: str
    shape: tuple[int, ...]
    turn: int = 1
    same: Turn | None = None


SavedBy = dict[str, list[SavedTensor]]  # by module, in order


def watch_saved(model: nn.Module, modules: Iterable[str], stack: ModuleStack) -> SavedBy:
    """Wrap the forwards of some modules of a throwaway copy, so that their saved tensors are noted.

    Only tensors that may be compressed count: floats that are neither weights, nor casts of
    weights, nor inputs without a gradient.
    """
    saved: SavedBy = {}
    for fqn in modules:
        module = model.get_submodule(fqn)
        module.forward = _watched(module, stack, saved.setdefault(fqn, []))
    return saved


def _watched(module: nn.Module, stack: ModuleStack, saved: list[SavedTensor]) -> Callable[..., Any]:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            casts, input_keys = _Casts(module), ungraded_inputs((args, kwargs))
        call = _Call(saved)

        def pack(tensor: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():
                if not policies.uncoded and is_candidate(tensor, input_keys | casts.own):
                    call.note(stack.frames[-1][0], tensor)
            return tensor

        with set_policies(code=pack), pack_hooks(pack), casts:
            return inner(*args, **kwargs)

    return forward


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that collects the storages of a module's own tensors, and of their casts in its forward.

    Programs recognise a cast by its values; on the meta device there are none.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = set(memory_keys(module))
        self.made: list[Tensor] = []  # held, so that no other tensor gets their storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and memory_key(args[0]) in self.own:
            self.own.add(memory_key(result))
            self.made.append(result)
        return result


class _Call:
    """One call of a module, and the tensors that it has saved so far."""

    def __init__(self, saved: list[SavedTensor]) -> None:
        self.found = saved
        self.turns: dict[str, int] = {}
        self.first: dict[tuple[object, ...], tuple[Turn, object]] = {}

    def note(self, site: str, tensor: Tensor) -> None:
        """Record one more saved tensor."""
        self.turns[site] = self.turns.get(site, 0) + 1
        own_turn, reference = (site, self.turns[site]), reference_to(tensor)  # holds no memory
        key = (reference.cdata, tensor._version, tensor.dtype, *element_key(tensor))
        first_turn, _ = self.first.setdefault(key, (own_turn, reference))
        earlier = first_turn if first_turn != own_turn else None
        self.found.append(SavedTensor(site, tuple(tensor.shape), own_turn[1], earlier))
