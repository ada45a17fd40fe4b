"""Keep a module's saved activations as small whole numbers between forward and backward.

Saved-tensor hooks around the forward of one module instance, as `offload` puts them.  What is kept
as it is: parameters and buffers, what the module is given without a gradient (masks, tables of
positions), whatever is no float, and what is too small to gain anything.  Draws follow from step,
samples, module, call and the place among the tensors that the call saves, so that a tensor is
rounded alike in every layout that cuts the batch in the same parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedlang.runtime import scope
from schedlang.runtime.forward import wrap
from schedlang.runtime.keeping.rounded import Coding, Rounded, rounded
from schedlang.runtime.storage.tiers import reference_to

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Tally:
    """What the coded modules of one program have kept so far: bytes before and after, tensors."""

    before: int = 0
    after: int = 0
    tensors: int = 0

    def note(self, tensor: Tensor, made: Rounded) -> None:
        """One more."""
        self.tensors += 1
        self.before += tensor.numel() * tensor.element_size()
        self.after += made.nbytes


def code(module: nn.Module, fqn: str, coding: Coding, tally: Tally | None = None) -> None:
    """Keep what `module`, called `fqn`, saves for backward in whole numbers, in place."""
    wrap(module, "code", Code(module, fqn, coding, tally or Tally()))


@dataclass(eq=False)
class Code:
    """The layer around a module's forward."""

    module: nn.Module
    fqn: str
    coding: Coding
    tally: Tally
    loose: int = 0  # calls outside of any scope

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner` with the hooks on; plainly where no gradient is recorded."""
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        call = _Call(self, _words(self), given_whole((args, kwargs)))
        try:
            with torch.autograd.graph.saved_tensors_hooks(call.pack, unpack):
                return inner(*args, **kwargs)
        finally:
            call.known.clear()

    def own(self) -> Iterator[int]:
        """Where parameters and buffers lie now: FSDP gathers them during forward."""
        for group in (self.module.parameters(), self.module.buffers()):
            for each in group:
                with torch.no_grad():
                    local = each.to_local() if hasattr(each, "to_local") else each
                yield place(local)


def _words(layer: Code) -> tuple[object, ...]:
    """What tells one call of a module from all others of a training."""
    here = scope.current()
    if here is None:
        layer.loose += 1
        return (layer.fqn, layer.loose)
    return (layer.fqn, scope.next_call(f"{layer.fqn} coded"), here.step, here.samples)


def given_whole(arguments: Any) -> frozenset[int]:
    """Where the tensors lie that a module is given as they are: without a gradient, or weights."""
    tensors = (t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor))
    return frozenset(
        place(t) for t in tensors if not t.requires_grad or isinstance(t, nn.Parameter)
    )


@dataclass
class _Call:
    """One call of a coded module: what it has saved so far."""

    layer: Code
    words: tuple[object, ...]
    given: frozenset[int]
    saved: int = 0
    rows: set[tuple[int, ...]] = field(default_factory=set)  # of what was saved, less the last dim
    known: dict[tuple[object, ...], tuple[Any, Rounded]] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> Tensor | Rounded:
        """What autograd keeps of a tensor; one that is saved twice is kept once."""
        self.saved += 1
        reference = reference_to(tensor)  # keeps the place, not the memory
        key = (reference.cdata, tensor._version, tensor.dtype, *_view(tensor))
        if key not in self.known:
            stays = self.stays(tensor)
            self.rows.add(tuple(tensor.shape[:-1]))
            if stays:
                return tensor
            made = rounded(tensor, self.layer.coding, stream(*self.words, self.saved))
            self.known[key] = reference, made
            self.layer.tally.note(tensor, made)
        made = self.known[key][1]
        if made.shape == tensor.shape:
            return made
        dense = torch.empty(tensor.shape, device="meta").stride()
        return replace(made, shape=tensor.shape, stride=dense)

    def stays(self, tensor: Tensor) -> bool:
        """Is a tensor kept as it is?"""
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            return True
        if tensor.dtype not in _FLOATS or tensor.numel() < self.layer.coding.block:
            return True
        if tensor.is_neg() or tensor.is_inference() or tensor.shape[-1] == 1:
            return True
        if tensor.dim() > 2 and tuple(tensor.shape) in self.rows:  # sums of rows, as attention's
            return True
        size = tensor.untyped_storage().nbytes()
        if tensor.numel() * tensor.element_size() > size:  # expanded from something smaller
            return True
        where = place(tensor)
        return where in self.given or where in set(self.layer.own()) or extreme(tensor)


def unpack(packed: Tensor | Rounded) -> Tensor:
    """What backward is given."""
    return packed.tensor() if isinstance(packed, Rounded) else packed


def extreme(tensor: Tensor) -> bool:
    """Does a tensor hold what has no size, as masked scores do?  Its other values would be lost."""
    if tensor.is_meta:
        return False
    with torch._C.DisableTorchFunction():
        low, high = torch.aminmax(tensor.detach())
    bound = torch.finfo(tensor.dtype).max / 4
    return not (-bound < float(low) and float(high) < bound)


def stream(*words: object) -> int:
    """The stream of draws of one saved tensor, as a signed 64-bit number."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def place(tensor: Tensor) -> int:
    """Equal for tensors in the same memory, or in the same that is not there."""
    storage = tensor.untyped_storage()
    return int(storage._cdata) if tensor.is_meta else int(storage.data_ptr())


def _view(tensor: Tensor) -> tuple[object, ...]:
    """Equal for views of one storage that have the same elements in the same order."""
    if tensor.is_contiguous():
        return tensor.storage_offset(), tensor.numel()
    return tensor.storage_offset(), tensor.size(), tensor.stride()
