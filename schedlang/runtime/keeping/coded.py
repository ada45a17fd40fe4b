"""Keep a module's saved activations as small whole numbers between forward and backward.

Saved-tensor hooks around the forward of one module instance, as `offload` puts them.  What is kept
as it is: parameters and buffers, in another dtype too, what the module is given without a gradient
(masks, tables of positions), whatever is no float, and what is too small to gain anything.  Draws
follow from step, samples, module, call and the place among the other floats that the call saves, so
that a tensor is rounded alike in every layout that cuts the batch in the same parts.  Ranks that
split a tensor draw alike for their parts of it: so copies of what they do not split stay alike.
Inside of an offloaded module the whole numbers move.  Results that a recomputation keeps beside
what autograd saves come here by `fewer.keeper`.  Experts that ranks share out compute rows of other
ranks, in an order that no single process has: what they save is kept as it is.

On an accelerator the host looks at values once: what the first call has shown of a saved tensor,
by its turn in the call, holds for all later ones, and if such a tensor then has masked scores in it
all the same, its numbers say them (`rounded`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime import scope
from schedlang.runtime.device import on_accelerator
from schedlang.runtime.forward import wrap
from schedlang.runtime.keeping.offload import Move, back, mover
from schedlang.runtime.keeping.rounded import Coding, Rounded, rounded
from schedlang.runtime.sharding.leaf import know_coded
from schedlang.runtime.storage.fewer import is_uncoded, keeping
from schedlang.runtime.storage.own import (
    HALVES,
    Addresses,
    given_whole,
    is_candidate,
    is_copy,
    own,
    place,
)
from schedlang.runtime.storage.tiers import reference_to


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


def code(
    module: nn.Module, fqn: str, coding: Coding, tally: Tally | None = None,
    bits: Mapping[int, int] | None = None,
) -> None:  # fmt: skip
    """Keep what `module`, called `fqn`, saves for backward in whole numbers, in place.

    `bits` of single tensors, by their number among the floats that a call saves, from 1 on.
    """
    know_coded(module)
    wrap(module, "code", Code(module, fqn, coding, tally or Tally(), bits or {}))


@dataclass(eq=False)
class Code:
    """The layer around a module's forward."""

    module: nn.Module
    fqn: str
    coding: Coding
    tally: Tally = field(default_factory=Tally)
    bits: Mapping[int, int] = field(default_factory=dict)
    loose: int = 0  # calls outside of any scope
    looked: dict[tuple[object, ...], bool] = field(default_factory=dict)  # at values of a device

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner` with the hooks on; plainly where no gradient is recorded."""
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        call = _Call(
            self, _words(self), given_whole((args, kwargs)), mover(), Addresses(self.module)
        )
        try:
            with keeping(call.pack), torch.autograd.graph.saved_tensors_hooks(call.pack, unpack):
                return inner(*args, **kwargs)
        finally:
            call.known.clear()

    def at(self, number: int) -> Coding | None:
        """How a tensor is kept, by its number in a call; None: as it is."""
        return replace(self.coding, bits=self.bits.get(number, self.coding.bits))

    def note(self, number: int, tensor: Tensor, made: Rounded) -> None:
        """A tensor is kept in whole numbers."""
        self.tally.note(tensor, made)

    def casts(self, tensor: Tensor) -> bool:
        """Is a tensor one of the module's own, cast?"""
        return any(is_copy(tensor, one) for one in own(self.module))

    def sees(self, asked: Callable[[Tensor], bool], tensor: Tensor, *turn: object) -> bool:
        """What is asked of a tensor's values; on an accelerator, what was found there before."""
        if not on_accelerator(tensor):
            return asked(tensor)
        key = asked.__name__, tensor.dtype, *turn
        if key not in self.looked:
            self.looked[key] = asked(tensor)
        return self.looked[key]


def _words(layer: Code) -> tuple[object, ...]:
    """What tells one call of a module from all others of a training."""
    here = scope.current()
    if here is None:
        layer.loose += 1
        return (layer.fqn, layer.loose)
    return (layer.fqn, scope.next_call(f"{layer.fqn} coded"), here.step, here.samples)


@dataclass(frozen=True)
class Moved:
    """A tensor in whole numbers that have left the device."""

    rest: Rounded
    codes: Any


@dataclass
class _Call:
    """One call of a coded module: what it has saved so far."""

    layer: Code
    words: tuple[object, ...]
    given: frozenset[int]
    move: Move
    own: Addresses
    asked: int = 0  # tensors that may be coded, so far; `saved`: those that have numbers
    saved: int = 0
    rows: set[tuple[int, ...]] = field(default_factory=set)  # of what was saved, less the last dim
    known: dict[tuple[object, ...], tuple[Any, Rounded | Moved]] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps of a tensor; one that is saved twice is kept once."""
        if is_uncoded() or not is_candidate(tensor, self.given):
            return self.move(tensor)
        if place(tensor) in self.own:
            return self.move(tensor)
        self.asked += 1
        layer, turn = self.layer, (self.asked, tensor.dim())
        if tensor.dtype in HALVES and layer.sees(layer.casts, tensor, *turn, tensor.shape):
            return self.move(tensor)
        reference = reference_to(tensor)  # keeps the place, not the memory
        key = (reference.cdata, tensor._version, tensor.dtype, *_view(tensor))
        if key not in self.known and layer.sees(extreme, tensor, *turn):
            return self.move(tensor)  # uncounted: of masks of scores not every layout keeps one
        self.saved += 1
        if key not in self.known:
            coding = self.layer.at(self.saved)
            stays = coding is None or self.stays(tensor, coding)
            self.rows.add(tuple(tensor.shape[:-1]))
            if stays or coding is None:
                return self.move(tensor)
            self.known[key] = reference, self.coded(tensor, coding)
        made = self.known[key][1]
        if isinstance(made, Rounded):
            return _shaped(made, tensor.shape)
        return replace(made, rest=_shaped(made.rest, tensor.shape))

    def coded(self, tensor: Tensor, coding: Coding) -> Rounded | Moved:
        """A tensor in whole numbers, which move where tensors do."""
        unseen = on_accelerator(tensor)
        made = rounded(tensor, coding, stream(*self.words, self.saved), unseen)
        self.layer.note(self.saved, tensor, made)
        codes = self.move(made.codes)
        return made if codes is made.codes else Moved(replace(made, codes=_NONE), codes)

    def stays(self, tensor: Tensor, coding: Coding) -> bool:
        """Is what could be coded kept as it is?"""
        if tensor.numel() < coding.block or tensor.shape[-1] == 1:
            return True
        if tensor.is_neg() or tensor.is_inference():
            return True
        if tensor.dim() > 2 and tuple(tensor.shape) in self.rows:  # sums of rows, as attention's
            return True
        takes = coding.kept(tensor.numel(), tensor.element_size())
        return takes >= tensor.untyped_storage().nbytes()  # if it is expanded


_NONE = torch.empty(0, dtype=torch.uint8)


def _shaped(made: Rounded, shape: torch.Size) -> Rounded:
    """The same elements in another shape."""
    if made.shape == shape:
        return made
    return replace(made, shape=shape, stride=torch.empty(shape, device="meta").stride())


def unpack(packed: Any) -> Tensor:
    """What backward is given."""
    if isinstance(packed, Rounded):
        return packed.tensor()
    if isinstance(packed, Moved):
        return replace(packed.rest, codes=back(packed.codes)).tensor()
    return back(packed)


def extreme(tensor: Tensor) -> bool:
    """Does a tensor hold what has no size, as masked scores do?  Its other values would be lost."""
    if tensor.is_meta:
        return False
    with torch._C.DisableTorchFunction():
        low, high = torch.aminmax(tensor.detach())
        most = torch.finfo(tensor.dtype).max / 4
        return not bool((low > -most) & (high < most))  # one wait for both


def stream(*words: object) -> int:
    """The stream of draws of one saved tensor, as a signed 64-bit number."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _view(tensor: Tensor) -> tuple[object, ...]:
    """Equal for views of one storage that have the same elements in the same order."""
    dims: list[tuple[int, int]] = []  # sizes and strides, with dims that follow on as one
    for size, stride in zip(tensor.shape, tensor.stride()):
        if dims and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride
        elif size > 1:
            dims.append((size, stride))
    return tensor.storage_offset(), *dims
