"""Tensors that modules save for backward in a forward on the meta device: where, of what shape.

Of the original and of its sharded copy, one beside the other, this tells how the ranks split what
each module saves, and what of it is one tensor for some and two for the others: a rank that has
one head has nothing to transpose, and what the original copies is a view there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.runtime.storage.saved import (
    elements,
    given_whole,
    is_candidate,
    place,
    places,
    policies,
    slot,
    within,
)
from schedlang.runtime.storage.tiers import reference_to

if TYPE_CHECKING:
    from schedlang.runtime.propagation.trace import Stack

Turn = tuple[str, int]  # the innermost module that saves, and of what it saves in a call, from 1 on


class Saved(NamedTuple):
    """One tensor: the innermost module that saved it, its shape, and where it stands in a call.

    `same`: where in this call the same elements of the same memory were saved first, if they were.
    """

    site: str
    shape: tuple[int, ...]
    turn: int = 1
    same: Turn | None = None


SavedBy = dict[str, list[Saved]]  # by module, in order


def watch_saved(model: nn.Module, modules: Iterable[str], stack: Stack) -> SavedBy:
    """Wrap the forwards of some modules of a throwaway copy, so that what they save is noted.

    Only what may be coded counts: floats that are neither weights, nor casts of these, nor given
    without a gradient.
    """
    found: SavedBy = {}
    for fqn in modules:
        module = model.get_submodule(fqn)
        module.forward = _watched(module, stack, found.setdefault(fqn, []))
    return found


def _watched(module: nn.Module, stack: Stack, found: list[Saved]) -> Callable[..., Any]:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            casts, given = _Casts(module), given_whole((args, kwargs))
        call = _Call(found)

        def pack(tensor: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():
                if not policies.uncoded and is_candidate(tensor, given | casts.own):
                    call.note(stack.frames[-1][0], tensor)
            return tensor

        with within(code=pack), slot(pack), casts:
            return inner(*args, **kwargs)

    return forward


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The places of a module's own tensors, and of what they are cast to while it runs.

    Programs know a cast by its values, which are not there.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = set(places(module))
        self.made: list[Tensor] = []  # kept: nothing else may come to lie in their places

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and place(args[0]) in self.own:
            self.own.add(place(made))
            self.made.append(made)
        return made


class _Call:
    """One call: the tensors that it has saved so far."""

    def __init__(self, found: list[Saved]) -> None:
        self.found = found
        self.turns: dict[str, int] = {}
        self.first: dict[tuple[object, ...], tuple[Turn, object]] = {}

    def note(self, site: str, tensor: Tensor) -> None:
        """One tensor more."""
        self.turns[site] = self.turns.get(site, 0) + 1
        turn, reference = (site, self.turns[site]), reference_to(tensor)  # no memory is kept
        key = (reference.cdata, tensor._version, tensor.dtype, *elements(tensor))
        first, _ = self.first.setdefault(key, (turn, reference))
        same = first if first != turn else None
        self.found.append(Saved(site, tuple(tensor.shape), turn[1], same))
