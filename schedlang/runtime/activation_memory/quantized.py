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

    def note(self, stream: int, offset: int, scaled: Tensor, levels: int) -> None:
        """Record ties in `scaled`, values to be rounded down to 0..`levels`, of elements from
        `offset`."""
        flat = scaled.detach().reshape(-1)
        ties = ((flat - flat.round()).abs() <= tie_margin(levels)).nonzero()[:, 0]
        positions, values = (ties + offset).cpu(), flat[ties].double().cpu()
        if stream in self.found:
            earlier = self.found[stream]
            positions, values = torch.cat([earlier[0], positions]), torch.cat([earlier[1], values])
        self.found[stream] = positions, values

    def gather(self) -> NearTieMap:
        """Return the ties of all ranks; ranks with one stream draw alike for their own parts."""
        if world.size() == 1:
            return self.found
        merged: dict[int, tuple[Tensor, Tensor]] = {}
        for rank_ties in world.all_gather_object(self.found):
            for draws, (positions, values) in rank_ties.items():
                earlier = merged.get(draws, (positions[:0], values[:0]))
                merged[draws] = torch.cat([earlier[0], positions]), torch.cat([earlier[1], values])
        return merged


def tie_margin(levels: int) -> float:
    """Return the distance from the next integer, in steps, within which rounding may differ."""
    return levels * _SHARE


_near_ties: ContextVar[NearTies | None] = ContextVar("tipped", default=None)


@contextmanager
def record_near_ties() -> Iterator[NearTies]:
    """Record near ties in float32 in this thread, within a block."""
    ties = NearTies()
    token = _near_ties.set(ties)
    try:
        yield ties
    finally:
        _near_ties.reset(token)


def note_near_ties(stream: int, offset: int, scaled: Tensor, levels: int) -> None:
    """Record near ties of values that are about to be rounded down, if `record_near_ties` is
    active."""
    ties = _near_ties.get()
    if ties is not None and scaled.dtype == torch.float32 and not scaled.is_meta:
        ties.note(stream, offset, scaled, levels)


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
        item_bytes = 8 if self.bits > 8 else self.bits / 8
        return round(blocks * self.block * item_bytes) + 2 * blocks * max(item, 4)


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
        result = torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=self.codes.device
        )
        contiguous = result.is_contiguous()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            flat = result.view(-1) if contiguous else result.new_empty(result.numel())
            for blocks, elements in _pieces(self.coding, flat):
                codes, step = _unpack_bits(self.codes[blocks], self.coding), self.step[blocks, None]
                numbers = codes.to(self.least.dtype).mul_(step.abs()).add_(self.least[blocks, None])
                if self.far is not None:
                    is_extreme = (codes == self.coding.reserved_code) & step.signbit()
                    numbers = torch.where(is_extreme, self.far, numbers)
                flat[elements] = numbers.view(-1)[: elements.stop - elements.start]
            return result if contiguous else result.copy_(flat.view(self.shape))


def quantize(
    tensor: Tensor, coding: Quantization, stream: int, on_device: bool = False
) -> QuantizedTensor:
    """Quantize a tensor of floats, with draws from `stream` (a signed 64-bit number).

    `on_device`: the tensor may hold values without a finite size; they come back as one value (of
    several, the farthest).
    """
    work_dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    blocks = -(-tensor.numel() // coding.block)
    stride = torch.empty_like(tensor, device="meta").stride()  # dense
    new_empty = tensor.detach().new_empty
    with torch._C.DisableTorchFunction(), torch.no_grad():
        width = coding.block // _PACKED.get(coding.bits, 1)
        codes = new_empty((blocks, width), dtype=torch.uint8 if coding.bits <= 8 else torch.int64)
        minima, step = new_empty(blocks, dtype=work_dtype), new_empty(blocks, dtype=work_dtype)
        flat = tensor.detach().reshape(-1)
        ends = ExtremeValues(flat, work_dtype) if on_device else None
        _quantize_pieces(flat, coding, stream, (codes, minima, step), ends)
        extreme = None if ends is None else ends.common_value()
    return QuantizedTensor(coding, codes, minima, step, tensor.dtype, tensor.shape, stride, extreme)


def _quantize_pieces(
    flat: Tensor,
    coding: Quantization,
    stream: int,
    outputs: tuple[Tensor, Tensor, Tensor],
    ends: ExtremeValues | None,
) -> None:
    """Write the integers of all elements, piece by piece."""
    codes, minima, step = outputs
    for blocks, elements in _pieces(coding, flat):
        rows = _rows(flat[elements], coding.block).to(minima.dtype)
        is_extreme = None if ends is None else ends.note(rows)
        if is_extreme is None:
            low, levels = rows.amin(1), coding.levels
            size = (rows.amax(1) - low) / levels
            minima[blocks], step[blocks] = low, size
        else:
            low, high = _finite_range(rows, is_extreme)
            has_extreme = is_extreme.any(1)
            size = (high - low) / (coding.levels - has_extreme.to(low.dtype))
            minima[blocks], step[blocks] = low, torch.where(has_extreme, -size, size)
        exact = (rows - low[:, None]) / torch.where(size > 0, size, 1.0)[:, None]
        noisy = exact + _random_numbers(exact, elements.start, stream)
        note_near_ties(stream, elements.start, noisy, coding.levels)
        numbers = noisy.floor_().clamp_(0, coding.levels)
        if is_extreme is not None:
            top = (coding.levels - is_extreme.any(1).to(low.dtype))[:, None]
            numbers = torch.where(is_extreme, coding.reserved_code, torch.minimum(numbers, top))
        codes[blocks] = _pack_bits(numbers, coding)


def _finite_range(rows: Tensor, is_extreme: Tensor) -> tuple[Tensor, Tensor]:
    """Return least and largest of each row, without `is_extreme` elements; zeros if all are."""
    low = rows.masked_fill(is_extreme, torch.inf).amin(1)
    high = rows.masked_fill(is_extreme, -torch.inf)
    all_extreme = is_extreme.all(1)
    return low.masked_fill(all_extreme, 0.0), high.amax(1).masked_fill(all_extreme, 0.0)


def size_bound(dtype: torch.dtype) -> float:
    """Return the size from which a value has no finite size; float16 has real values near its
    end."""
    limit = torch.finfo(dtype).max
    return limit * 0.9 if dtype == torch.float16 else limit / 4


class ExtremeValues:
    """The farthest value without a finite size in a tensor, kept on the device."""

    def __init__(self, flat: Tensor, dtype: torch.dtype) -> None:
        self.bound = size_bound(flat.dtype)
        self.least = flat.new_full((), torch.inf, dtype=dtype)
        self.most = flat.new_full((), -torch.inf, dtype=dtype)

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
    blocks_each, count = max(1, PIECE_SIZE // coding.block), flat.numel()
    for start in range(0, -(-count // coding.block), blocks_each)[: 1 if flat.is_meta else None]:
        end = start + blocks_each
        yield (
            slice(start, min(end, -(-count // coding.block))),
            slice(start * coding.block, min(end * coding.block, count)),
        )


def _rows(flat: Tensor, block: int) -> Tensor:
    """Return one row for each block; the last is padded with its own last element."""
    missing = -flat.numel() % block
    if missing:
        flat = torch.cat([flat, flat[-1:].expand(missing)])
    return flat.view(-1, block)


def _random_numbers(template: Tensor, offset: int, stream: int) -> Tensor:
    """Return numbers in [0, 1) for elements from `offset` on, with as many digits as fit."""
    positions = torch.arange(1, template.numel() + 1, device=template.device).add_(offset)
    digits = 1 - round(math.log2(torch.finfo(template.dtype).eps))
    integers = stream_numbers(positions, positions.new_full((), stream)) >> (_DRAWN - digits)
    return integers.to(template.dtype).div_(2**digits).view_as(template)


def _pack_bits(numbers: Tensor, coding: Quantization) -> Tensor:
    """Return integers as bytes, several in one byte if small; the first in the lowest bits."""
    if coding.bits > 8:
        return numbers.to(torch.int64)
    codes = numbers.to(torch.uint8)
    per_byte = _PACKED.get(coding.bits, 1)
    packed = codes[:, ::per_byte].clone()
    for offset in range(1, per_byte):
        packed |= codes[:, offset::per_byte] << (coding.bits * offset)
    return packed


def _unpack_bits(codes: Tensor, coding: Quantization) -> Tensor:
    """Return one integer for each element."""
    per_byte = _PACKED.get(coding.bits, 1)
    if per_byte == 1:
        return codes
    unpacked = [(codes >> (coding.bits * offset)) & coding.levels for offset in range(per_byte)]
    return torch.stack(unpacked, -1).flatten(1)


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

    def add(self, tensor: Tensor, quantized: QuantizedTensor) -> None:
        """Count one tensor."""
        self.tensors += 1
        self.before += tensor.numel() * tensor.element_size()
        self.after += quantized.nbytes


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
    # answers about values on a device
    looked: dict[tuple[object, ...], bool] = field(default_factory=dict)

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

    def note(self, number: int, tensor: Tensor, quantized: QuantizedTensor) -> None:
        """Count a quantized tensor."""
        self.tally.add(tensor, quantized)

    def is_cast_of_own(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a cast of a parameter or buffer of the module."""
        return any(is_cast_copy(tensor, local) for local in local_tensors_of(self.module))

    def look_at(self, predicate: Callable[[Tensor], bool], tensor: Tensor, *extra: object) -> bool:
        """Ask about the values of a tensor; on an accelerator, answer as at the first call."""
        if not on_accelerator(tensor):
            return predicate(tensor)
        key = predicate.__name__, tensor.dtype, *extra
        if key not in self.looked:
            self.looked[key] = predicate(tensor)
        return self.looked[key]


def _call_identity(layer: QuantizedActivations) -> tuple[object, ...]:
    """Return values that identify one call of a module in a training."""
    current = scope.current()
    if current is None:
        layer.loose += 1
        return (layer.fqn, layer.loose)
    return (layer.fqn, scope.count_call(f"{layer.fqn} coded"), current.step, current.samples)


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
    # shapes of saved tensors without the last dim
    rows: set[tuple[int, ...]] = field(default_factory=set)
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
        layer, call_key = self.layer, (self.candidates, tensor.dim())
        if tensor.dtype in HALVES and layer.look_at(
            layer.is_cast_of_own, tensor, *call_key, tensor.shape
        ):
            return self.move(tensor)
        reference = reference_to(tensor)  # reserves the address, not the memory
        key = (reference.cdata, tensor._version, tensor.dtype, *element_key(tensor))
        if key not in self.known and layer.look_at(has_extremes, tensor, *call_key):
            return self.move(tensor)  # uncounted: not every layout saves a mask of scores
        self.saved += 1
        if key not in self.known:
            coding = self.layer.coding_of(self.saved)
            unquantized = coding is None or self.stays(tensor, coding)
            self.rows.add(tuple(tensor.shape[:-1]))
            if unquantized or coding is None:
                return self.move(tensor)
            self.known[key] = reference, self.coded(tensor, coding)
        coded = self.known[key][1]
        if isinstance(coded, QuantizedTensor):
            return _reshaped(coded, tensor.shape)
        return replace(coded, rest=_reshaped(coded.rest, tensor.shape))

    def coded(self, tensor: Tensor, coding: Quantization) -> QuantizedTensor | MovedTensor:
        """Quantize a tensor; its integers move if the module is offloaded."""
        on_device = on_accelerator(tensor)
        coded = quantize(tensor, coding, stream_of(*self.words, self.saved), on_device)
        self.layer.note(self.saved, tensor, coded)
        codes = self.move(coded.codes)
        return (
            coded if codes is coded.codes else MovedTensor(replace(coded, codes=_NO_CODES), codes)
        )

    def stays(self, tensor: Tensor, coding: Quantization) -> bool:
        """Return whether a tensor that could be quantized is saved unquantized."""
        if tensor.numel() < coding.block or tensor.shape[-1] == 1:
            return True
        if tensor.is_neg() or tensor.is_inference():
            return True
        # per-row statistics, as of attention
        if tensor.dim() > 2 and tuple(tensor.shape) in self.rows:
            return True
        stored_size = coding.stored_bytes(tensor.numel(), tensor.element_size())
        return stored_size >= tensor.untyped_storage().nbytes()  # expanded tensors take less


_NO_CODES = torch.empty(0, dtype=torch.uint8)


def _reshaped(quantized: QuantizedTensor, shape: torch.Size) -> QuantizedTensor:
    """Return the same elements in another shape."""
    if quantized.shape == shape:
        return quantized
    return replace(quantized, shape=shape, stride=torch.empty(shape, device="meta").stride())


def has_extremes(tensor: Tensor) -> bool:
    """Return whether a tensor holds values without a finite size, as masked scores.

    Quantization would lose other values of their blocks.
    """
    if tensor.is_meta:
        return False
    with torch._C.DisableTorchFunction():
        low, high = torch.aminmax(tensor.detach())
        limit = torch.finfo(tensor.dtype).max / 4
        return not bool((low > -limit) & (high < limit))  # one synchronisation for both
