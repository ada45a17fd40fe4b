"""What modules save for backward in a forward on the meta device: where, and of what shape.

Of the original and of its sharded copy, one beside the other, this tells how the ranks split what
each module saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from schedlang.runtime.following.trace import Stack
from schedlang.runtime.storage.fewer import is_uncoded, keeping
from schedlang.runtime.storage.own import given_whole, is_candidate, places


class Saved(NamedTuple):
    """One tensor: the innermost module that saved it, and its shape."""

    site: str
    shape: tuple[int, ...]


SavedBy = dict[str, list[Saved]]  # by module, in order


def watch_saved(model: nn.Module, modules: Iterable[str], stack: Stack) -> SavedBy:
    """Wrap the forwards of some modules of a throwaway copy, so that what they save is noted.

    Only what may be coded counts: floats that are neither weights nor given without a gradient.
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
            whole = given_whole((args, kwargs)) | set(places(module))

        def pack(tensor: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():
                if not is_uncoded() and is_candidate(tensor, whole):
                    found.append(Saved(stack.frames[-1][0], tuple(tensor.shape)))
            return tensor

        with keeping(pack), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return inner(*args, **kwargs)

    return forward
