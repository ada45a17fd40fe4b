"""Quantized activations: the saved tensors of a module as integers of 8, 4 or 2 bits.

`quantize_saved` wraps a module; `quantize` quantizes a tensor; `record_near_ties` records values
near a rounding tie, for a comparison with other orders of the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime import scope
from schedlang.runtime.comm import world
from schedlang.runtime.device import on_accelerator
from schedlang.runtime.forward import wrap
from schedlang.runtime.rng.logical_dropout import stream_numbers, stream_of
from schedlang.runtime.sharding.sharded_layer import mark_coded
from schedlang.runtime.storage.saved_tensors_slot import (
    HALVES,
    ModuleAddresses,
    Pack,
    SavedTensorPolicy,
    element_key,
    is_candidate,
    is_cast_copy,
    local_tensors_of,
    memory_key,
    pack_hooks,
    pack_unchanged,
    policies,
    set_policies,
    ungraded_inputs,
    unpack,
)
from schedlang.runtime.storage.tiers import reference_to

# ---- Values near a rounding tie, in quantized activations.
# A float32 that is off by its last digit may be rounded to the other integer. Both are right; a
# comparison with another order of the same sums must know which one a program took.


_SHARE = 2.0**-14  # of a block's range: far above the differences of orders of float32 sums

NearTieMap = Mapping[int, tuple[Tensor, Tensor]]  # stream -> places, values before rounding


@dataclass
class NearTies:
    """The values near a tie, by stream of draws: their places, and the values before rounding."""

    found: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def note(self, stream: int, first: int, moved: Tensor, levels: int) -> None:
        """Record ties in `moved`, values to be rounded down to 0..`levels`, of elements from
        `first`."""
        flat = moved.detach().reshape(-1)
        ties = ((flat - flat.round()).abs() <= tie_margin(levels)).nonzero()[:, 0]
        places, values = (ties + first).cpu(), flat[ties].double().cpu()
        if stream in self.found:
            known = self.found[stream]
            places, values = torch.cat([known[0], places]), torch.cat([known[1], values])
        self.found[stream] = places, values

    def gather(self) -> NearTieMap:
        """Return the ties of all ranks; ranks with one stream draw alike for their own parts."""
        if world.size() == 1:
            return self.found
        out: dict[int, tuple[Tensor, Tensor]] = {}
        for found in world.all_gather_object(self.found):
            for draws, (places, values) in found.items():
                known = out.get(draws, (places[:0], values[:0]))
                out[draws] = torch.cat([known[0], places]), torch.cat([known[1], values])
        return out


def tie_margin(levels: int) -> float:
    """Return the distance from the next integer, in steps, within which rounding may differ."""
    return levels * _SHARE


_near_ties: ContextVar[NearTies | None] = ContextVar("tipped", default=None)


@contextmanager
def record_near_ties() -> Iterator[NearTies]:
    """Record near ties in float32 in this thread, within a block."""
    tipped = NearTies()
    token = _near_ties.set(tipped)
    try:
        yield tipped
    finally:
        _near_ties.reset(token)


def note_near_ties(stream: int, first: int, moved: Tensor, levels: int) -> None:
    """Record near ties of values that are about to be rounded down, if `record_near_ties` is
    active."""
    tipped = _near_ties.get()
    if tipped is not None and moved.dtype == torch.float32 and not moved.is_meta:
        tipped.note(stream, first, moved, levels)


# ---- Tensors as integers of 8, 4 or 2 bits: a least value and a step for each block of elements.
# Stochastically rounded, so that the mean over draws is the tensor itself (Chen et al., ActNN,
# 2021; Pan et al., Mesa, 2021; Liu et al., GACT, 2022). The draws are a hash of a stream and of
# the place of an element, so that the same call rounds alike wherever, and however often, it runs.
# If the host has not looked at the values, values without a finite size (masked scores) get an
# integer of their own: they come back unchanged, and the others of their block use one level less.


PIECE_SIZE = 2**20  # elements that are quantized at a time, which bounds temporary memory
_DRAWN = 53  # bits of a draw
_PACKED = {2: 4, 4: 2}  # bits -> integers in a byte


@dataclass(frozen=True)
class Quantization:
    """The quantization of tensors: integers of `bits` bits, in blocks of `block` elements.

    Above 8 bits each integer takes 64 bits: almost nothing is lost, and no memory is saved.
    """

    bits: int
    block: int = 256

    @property
    def levels(self) -> int:
        """The largest integer."""
        return int(2**self.bits - 1)

    @property
    def reserved_code(self) -> int:
        """The integer for values without a finite size, in a block that has such values."""
        return self.levels if self.bits <= 8 else -1

    def stored_bytes(self, count: int, item: int) -> int:
        """Return the bytes in which `count` elements of `item` bytes are stored."""
        blocks = -(-count // self.block)
        each = 8 if self.bits > 8 else self.bits / 8
        return round(blocks * self.block * each) + 2 * blocks * max(item, 4)


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized tensor: `least + step * integer`, with `least` and `step` per block."""

    coding: Quantization
    codes: Tensor
    least: Tensor
    step: Tensor
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    far: Tensor | None = None  # for `reserved_code` in blocks whose step is below zero

    @property
    def nbytes(self) -> int:
        """Bytes of the quantized tensor."""
        return sum(t.untyped_storage().nbytes() for t in (self.codes, self.least, self.step))

    def tensor(self) -> Tensor:
        """Return the dequantized tensor; equal at each call."""
        made = torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=self.codes.device
        )
        plain = made.is_contiguous()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            flat = made.view(-1) if plain else made.new_empty(made.numel())
            for blocks, some in _pieces(self.coding, flat):
                codes, step = _unpack_bits(self.codes[blocks], self.coding), self.step[blocks, None]
                numbers = codes.to(self.least.dtype).mul_(step.abs()).add_(self.least[blocks, None])
                if self.far is not None:
                    is_extreme = (codes == self.coding.reserved_code) & step.signbit()
                    numbers = torch.where(is_extreme, self.far, numbers)
                flat[some] = numbers.view(-1)[: some.stop - some.start]
            return made if plain else made.copy_(flat.view(self.shape))


def quantize(
    tensor: Tensor, coding: Quantization, stream: int, unseen: bool = False
) -> QuantizedTensor:
    """Quantize a tensor of floats, with draws from `stream` (a signed 64-bit number).

    `unseen`: the tensor may hold values without a finite size; they come back as one value (of
    several, the farthest).
    """
    work = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    blocks = -(-tensor.numel() // coding.block)
    stride = torch.empty_like(tensor, device="meta").stride()  # dense
    new = tensor.detach().new_empty
    with torch._C.DisableTorchFunction(), torch.no_grad():
        width = coding.block // _PACKED.get(coding.bits, 1)
        codes = new((blocks, width), dtype=torch.uint8 if coding.bits <= 8 else torch.int64)
        least, step = new(blocks, dtype=work), new(blocks, dtype=work)
        flat = tensor.detach().reshape(-1)
        ends = ExtremeValues(flat, work) if unseen else None
        _quantize_pieces(flat, coding, stream, (codes, least, step), ends)
        far = None if ends is None else ends.common_value()
    return QuantizedTensor(coding, codes, least, step, tensor.dtype, tensor.shape, stride, far)


def _quantize_pieces(
    flat: Tensor,
    coding: Quantization,
    stream: int,
    into: tuple[Tensor, Tensor, Tensor],
    ends: ExtremeValues | None,
) -> None:
    """Write the integers of all elements, piece by piece."""
    codes, least, step = into
    for blocks, some in _pieces(coding, flat):
        rows = _rows(flat[some], coding.block).to(least.dtype)
        is_extreme = None if ends is None else ends.note(rows)
        if is_extreme is None:
            low, levels = rows.amin(1), coding.levels
            size = (rows.amax(1) - low) / levels
            least[blocks], step[blocks] = low, size
        else:
            low, high = _finite_range(rows, is_extreme)
            has_extreme = is_extreme.any(1)
            size = (high - low) / (coding.levels - has_extreme.to(low.dtype))
            least[blocks], step[blocks] = low, torch.where(has_extreme, -size, size)
        exact = (rows - low[:, None]) / torch.where(size > 0, size, 1.0)[:, None]
        moved = exact + _random_numbers(exact, some.start, stream)
        note_near_ties(stream, some.start, moved, coding.levels)
        numbers = moved.floor_().clamp_(0, coding.levels)
        if is_extreme is not None:
            most = (coding.levels - is_extreme.any(1).to(low.dtype))[:, None]
            numbers = torch.where(is_extreme, coding.reserved_code, torch.minimum(numbers, most))
        codes[blocks] = _pack_bits(numbers, coding)


def _finite_range(rows: Tensor, is_extreme: Tensor) -> tuple[Tensor, Tensor]:
    """Return least and largest of each row, without `is_extreme` elements; zeros if all are."""
    low, high = (
        rows.masked_fill(is_extreme, torch.inf).amin(1),
        rows.masked_fill(is_extreme, -torch.inf),
    )
    none = is_extreme.all(1)
    return low.masked_fill(none, 0.0), high.amax(1).masked_fill(none, 0.0)


def size_bound(dtype: torch.dtype) -> float:
    """Return the size from which a value has no finite size; float16 has real values near its
    end."""
    most = torch.finfo(dtype).max
    return most * 0.9 if dtype == torch.float16 else most / 4


class ExtremeValues:
    """The farthest value without a finite size in a tensor, kept on the device."""

    def __init__(self, flat: Tensor, work: torch.dtype) -> None:
        self.bound = size_bound(flat.dtype)
        self.least = flat.new_full((), torch.inf, dtype=work)
        self.most = flat.new_full((), -torch.inf, dtype=work)

    def note(self, rows: Tensor) -> Tensor:
        """Return a mask of elements without a finite size: infinite, near the dtype's end, or
        NaN."""
        is_extreme = ~(rows.abs() < self.bound)
        self.least = torch.minimum(self.least, rows.masked_fill(~is_extreme, torch.inf).amin())
        self.most = torch.maximum(self.most, rows.masked_fill(~is_extreme, -torch.inf).amax())
        return is_extreme

    def common_value(self) -> Tensor:
        """Return the value that replaces all of them; NaN if there are some on both sides."""
        above = torch.where(self.least > 0, self.most, torch.nan)
        return torch.where(self.most < 0, self.least, above)


def _pieces(coding: Quantization, flat: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield runs of blocks and their elements; on the meta device only the first."""
    often, count = max(1, PIECE_SIZE // coding.block), flat.numel()
    for first in range(0, -(-count // coding.block), often)[: 1 if flat.is_meta else None]:
        last = first + often
        yield (
            slice(first, min(last, -(-count // coding.block))),
            slice(first * coding.block, min(last * coding.block, count)),
        )


def _rows(flat: Tensor, block: int) -> Tensor:
    """Return one row for each block; the last is padded with its own last element."""
    missing = -flat.numel() % block
    if missing:
        flat = torch.cat([flat, flat[-1:].expand(missing)])
    return flat.view(-1, block)


def _random_numbers(like: Tensor, first: int, stream: int) -> Tensor:
    """Return numbers in [0, 1) for elements from `first` on, with as many digits as fit."""
    places = torch.arange(1, like.numel() + 1, device=like.device).add_(first)
    digits = 1 - round(math.log2(torch.finfo(like.dtype).eps))
    bits = stream_numbers(places, places.new_full((), stream)) >> (_DRAWN - digits)
    return bits.to(like.dtype).div_(2**digits).view_as(like)


def _pack_bits(numbers: Tensor, coding: Quantization) -> Tensor:
    """Return integers as bytes, several in one byte if small; the first in the lowest bits."""
    if coding.bits > 8:
        return numbers.to(torch.int64)
    whole = numbers.to(torch.uint8)
    each = _PACKED.get(coding.bits, 1)
    out = whole[:, ::each].clone()
    for turn in range(1, each):
        out |= whole[:, turn::each] << (coding.bits * turn)
    return out


def _unpack_bits(codes: Tensor, coding: Quantization) -> Tensor:
    """Return one integer for each element."""
    each = _PACKED.get(coding.bits, 1)
    if each == 1:
        return codes
    some = [(codes >> (coding.bits * turn)) & coding.levels for turn in range(each)]
    return torch.stack(some, -1).flatten(1)


# ---- Quantized saved activations of a module between forward and backward.
# Saved-tensor hooks around the forward of one module instance, as in `offload`. Not quantized are:
# parameters and buffers, also cast to another dtype; inputs of the module without a gradient
# (masks, tables of positions); tensors that are no floats; tensors too small to gain anything.
# Draws depend on step, samples, module, call and the number of the tensor among the floats that the
# call saves, so that a tensor is rounded alike in every layout that splits the batch into the same
# parts. Ranks that split a tensor draw alike for their parts: so replicated tensors stay equal.
# Inside an offloaded module the integers move. Results that a recomputation saves, beside those of
# autograd, come here by `policies.code`. Experts that are sharded over ranks compute tokens of
# other ranks, in an order that no single process has: their saved tensors are not quantized.
#
# On an accelerator the host looks at values once: the facts that the first call has shown of a
# saved tensor, by its number in the call, hold for all later calls, and if such a tensor later has
# masked scores, its integers represent them (`quantize`).


@dataclass
class QuantizationCounts:
    """Counts of the quantized modules of one program: bytes before and after, tensors."""

    before: int = 0
    after: int = 0
    tensors: int = 0

    def add(self, tensor: Tensor, made: QuantizedTensor) -> None:
        """Count one tensor."""
        self.tensors += 1
        self.before += tensor.numel() * tensor.element_size()
        self.after += made.nbytes


def quantize_saved(
    module: nn.Module,
    fqn: str,
    coding: Quantization,
    tally: QuantizationCounts | None = None,
    bits: Mapping[int, int] | None = None,
) -> None:
    """Quantize the tensors that `module`, named `fqn`, saves for backward, in place.

    `bits` are those of single tensors, by their number, from 1, among the floats that a call saves.
    """
    mark_coded(module)
    wrap(
        module,
        "code",
        QuantizedActivations(module, fqn, coding, tally or QuantizationCounts(), bits or {}),
    )


@dataclass(eq=False)
class QuantizedActivations(SavedTensorPolicy):
    """The policy that saves tensors as integers of few bits."""

    module: nn.Module
    fqn: str
    coding: Quantization
    tally: QuantizationCounts = field(default_factory=QuantizationCounts)
    bits: Mapping[int, int] = field(default_factory=dict)
    loose: int = 0  # calls outside any scope
    looked: dict[tuple[object, ...], bool] = field(
        default_factory=dict
    )  # answers about values on a device

    def run_recorded(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `inner`; integers and unquantized tensors go to the offload around it."""
        excluded, move = ungraded_inputs((args, kwargs)), policies.offload or pack_unchanged
        call = _Call(self, _call_identity(self), excluded, move, ModuleAddresses(self.module))
        try:
            with set_policies(code=call.pack), pack_hooks(call.pack):
                return inner(*args, **kwargs)
        finally:
            call.known.clear()

    def coding_of(self, number: int) -> Quantization | None:
        """Return the coding of a tensor by its number in a call; None: the tensor is not
        quantized."""
        return replace(self.coding, bits=self.bits.get(number, self.coding.bits))

    def note(self, number: int, tensor: Tensor, made: QuantizedTensor) -> None:
        """Count a quantized tensor."""
        self.tally.add(tensor, made)

    def is_cast_of_own(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a cast of a parameter or buffer of the module."""
        return any(is_cast_copy(tensor, one) for one in local_tensors_of(self.module))

    def look_at(self, predicate: Callable[[Tensor], bool], tensor: Tensor, *turn: object) -> bool:
        """Ask about the values of a tensor; on an accelerator, answer as at the first call."""
        if not on_accelerator(tensor):
            return predicate(tensor)
        key = predicate.__name__, tensor.dtype, *turn
        if key not in self.looked:
            self.looked[key] = predicate(tensor)
        return self.looked[key]


def _call_identity(layer: QuantizedActivations) -> tuple[object, ...]:
    """Return values that identify one call of a module in a training."""
    here = scope.current()
    if here is None:
        layer.loose += 1
        return (layer.fqn, layer.loose)
    return (layer.fqn, scope.count_call(f"{layer.fqn} coded"), here.step, here.samples)


@dataclass(frozen=True)
class MovedTensor:
    """A quantized tensor whose integers were moved off the device."""

    rest: QuantizedTensor
    codes: Any

    def tensor(self) -> Tensor:
        """Return the dequantized values on the device."""
        return replace(self.rest, codes=unpack(self.codes)).tensor()


@dataclass
class _Call:
    """One call of a quantized module: the tensors that it has saved so far."""

    layer: QuantizedActivations
    words: tuple[object, ...]
    excluded: frozenset[int]
    move: Pack
    own: ModuleAddresses
    candidates: int = 0  # candidates so far; `saved`: those that have numbers
    saved: int = 0
    rows: set[tuple[int, ...]] = field(
        default_factory=set
    )  # shapes of saved tensors without the last dim
    known: dict[tuple[object, ...], tuple[Any, QuantizedTensor | MovedTensor]] = field(
        default_factory=dict
    )

    def pack(self, tensor: Tensor) -> Any:
        """Save a tensor for autograd; one that is saved twice is stored once."""
        if policies.uncoded or not is_candidate(tensor, self.excluded):
            return self.move(tensor)
        if memory_key(tensor) in self.own:
            return self.move(tensor)
        self.candidates += 1
        layer, turn = self.layer, (self.candidates, tensor.dim())
        if tensor.dtype in HALVES and layer.look_at(
            layer.is_cast_of_own, tensor, *turn, tensor.shape
        ):
            return self.move(tensor)
        reference = reference_to(tensor)  # reserves the address, not the memory
        key = (reference.cdata, tensor._version, tensor.dtype, *element_key(tensor))
        if key not in self.known and layer.look_at(has_extremes, tensor, *turn):
            return self.move(tensor)  # uncounted: not every layout saves a mask of scores
        self.saved += 1
        if key not in self.known:
            coding = self.layer.coding_of(self.saved)
            stays = coding is None or self.stays(tensor, coding)
            self.rows.add(tuple(tensor.shape[:-1]))
            if stays or coding is None:
                return self.move(tensor)
            self.known[key] = reference, self.coded(tensor, coding)
        made = self.known[key][1]
        if isinstance(made, QuantizedTensor):
            return _reshaped(made, tensor.shape)
        return replace(made, rest=_reshaped(made.rest, tensor.shape))

    def coded(self, tensor: Tensor, coding: Quantization) -> QuantizedTensor | MovedTensor:
        """Quantize a tensor; its integers move if the module is offloaded."""
        unseen = on_accelerator(tensor)
        made = quantize(tensor, coding, stream_of(*self.words, self.saved), unseen)
        self.layer.note(self.saved, tensor, made)
        codes = self.move(made.codes)
        return made if codes is made.codes else MovedTensor(replace(made, codes=_NO_CODES), codes)

    def stays(self, tensor: Tensor, coding: Quantization) -> bool:
        """Return whether a tensor that could be quantized is saved unquantized."""
        if tensor.numel() < coding.block or tensor.shape[-1] == 1:
            return True
        if tensor.is_neg() or tensor.is_inference():
            return True
        if (
            tensor.dim() > 2 and tuple(tensor.shape) in self.rows
        ):  # per-row statistics, as of attention
            return True
        takes = coding.stored_bytes(tensor.numel(), tensor.element_size())
        return takes >= tensor.untyped_storage().nbytes()  # expanded tensors take less


_NO_CODES = torch.empty(0, dtype=torch.uint8)


def _reshaped(made: QuantizedTensor, shape: torch.Size) -> QuantizedTensor:
    """Return the same elements in another shape."""
    if made.shape == shape:
        return made
    return replace(made, shape=shape, stride=torch.empty(shape, device="meta").stride())


def has_extremes(tensor: Tensor) -> bool:
    """Return whether a tensor holds values without a finite size, as masked scores.

    Quantization would lose other values of their blocks.
    """
    if tensor.is_meta:
        return False
    with torch._C.DisableTorchFunction():
        low, high = torch.aminmax(tensor.detach())
        most = torch.finfo(tensor.dtype).max / 4
        return not bool((low > -most) & (high < most))  # one synchronisation for both
