"""Tensors as whole numbers of 8, 4 or 2 bits: a least value and a step for each block of elements.

Stochastically rounded, so that the mean over draws is the tensor itself (Chen et al., ActNN, 2021;
Pan et al., Mesa, 2021; Liu et al., GACT, 2022).  The draws are a hash of a stream and of the place
of an element, so that the same call rounds alike wherever, and however often, it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from schedlang.runtime.drawing.random import mixed
from schedlang.runtime.keeping.tipped import drawn

AT_ONCE = 2**20  # elements that are worked on at a time: what that needs is not saved
_DRAWN = 53  # bits of a draw
_PACKED = {2: 4, 4: 2}  # bits -> numbers in a byte


@dataclass(frozen=True)
class Coding:
    """How tensors are kept: numbers of `bits` bits, in blocks of `block` elements.

    Above 8 bits a number has 64 to itself: then next to nothing is lost, and nothing is saved.
    """

    bits: int
    block: int = 256

    @property
    def levels(self) -> int:
        """The largest number."""
        return int(2**self.bits - 1)

    def kept(self, count: int, item: int) -> int:
        """The bytes that `count` elements of `item` bytes are kept in."""
        blocks = -(-count // self.block)
        each = 8 if self.bits > 8 else self.bits / 8
        return round(blocks * self.block * each) + 2 * blocks * max(item, 4)


@dataclass(frozen=True)
class Rounded:
    """A tensor in whole numbers: `least + step * number`, with a `least` and `step` per block."""

    coding: Coding
    codes: Tensor
    least: Tensor
    step: Tensor
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return sum(t.untyped_storage().nbytes() for t in (self.codes, self.least, self.step))

    def tensor(self) -> Tensor:
        """The tensor that is meant; equal at each call."""
        made = torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=self.codes.device
        )
        plain = made.is_contiguous()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            flat = made.view(-1) if plain else made.new_empty(made.numel())
            for blocks, elements in _pieces(self.coding, flat):
                numbers = _unpacked(self.codes[blocks], self.coding).to(self.least.dtype)
                numbers.mul_(self.step[blocks, None]).add_(self.least[blocks, None])
                flat[elements] = numbers.view(-1)[: elements.stop - elements.start]
            return made if plain else made.copy_(flat.view(self.shape))


def rounded(tensor: Tensor, coding: Coding, stream: int) -> Rounded:
    """A tensor of floats in whole numbers, drawn from `stream` (a signed 64-bit number)."""
    work = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    blocks = -(-tensor.numel() // coding.block)
    stride = torch.empty_like(tensor, device="meta").stride()  # as dense as it can be
    new = tensor.detach().new_empty
    with torch._C.DisableTorchFunction(), torch.no_grad():
        width = coding.block // _PACKED.get(coding.bits, 1)
        codes = new((blocks, width), dtype=torch.uint8 if coding.bits <= 8 else torch.int64)
        least, step = new(blocks, dtype=work), new(blocks, dtype=work)
        _fill(tensor.detach().reshape(-1), coding, stream, (codes, least, step))
    return Rounded(coding, codes, least, step, tensor.dtype, tensor.shape, stride)


def _fill(flat: Tensor, coding: Coding, stream: int, into: tuple[Tensor, Tensor, Tensor]) -> None:
    """Write the numbers of some elements, piece by piece."""
    codes, least, step = into
    for blocks, elements in _pieces(coding, flat):
        rows = _rows(flat[elements], coding.block).to(least.dtype)
        low = rows.amin(1)
        size = (rows.amax(1) - low) / coding.levels
        least[blocks], step[blocks] = low, size
        exact = (rows - low[:, None]) / torch.where(size > 0, size, 1.0)[:, None]
        moved = exact + _draws(exact, elements.start, stream)
        drawn(stream, elements.start, moved, coding.levels)
        codes[blocks] = _packed(moved.floor_().clamp_(0, coding.levels), coding)


def _pieces(coding: Coding, flat: Tensor) -> Iterator[tuple[slice, slice]]:
    """Runs of blocks, and their elements; without values the first stands for all."""
    often, count = max(1, AT_ONCE // coding.block), flat.numel()
    for first in range(0, -(-count // coding.block), often)[: 1 if flat.is_meta else None]:
        last = first + often
        yield (
            slice(first, min(last, -(-count // coding.block))),
            slice(first * coding.block, min(last * coding.block, count)),
        )


def _rows(flat: Tensor, block: int) -> Tensor:
    """A row for each block; the last is filled up with its own last element."""
    missing = -flat.numel() % block
    if missing:
        flat = torch.cat([flat, flat[-1:].expand(missing)])
    return flat.view(-1, block)


def _draws(like: Tensor, first: int, stream: int) -> Tensor:
    """Numbers in [0, 1) for elements from place `first` on, with as many digits as fit."""
    places = torch.arange(1, like.numel() + 1, device=like.device).add_(first)
    digits = 1 - round(math.log2(torch.finfo(like.dtype).eps))
    bits = mixed(places, places.new_full((), stream)) >> (_DRAWN - digits)
    return bits.to(like.dtype).div_(2**digits).view_as(like)


def _packed(numbers: Tensor, coding: Coding) -> Tensor:
    """Numbers as bytes, several in one where they are small; the first in its lowest bits."""
    if coding.bits > 8:
        return numbers.to(torch.int64)
    whole = numbers.to(torch.uint8)
    each = _PACKED.get(coding.bits, 1)
    out = whole[:, ::each].clone()
    for place in range(1, each):
        out |= whole[:, place::each] << (coding.bits * place)
    return out


def _unpacked(codes: Tensor, coding: Coding) -> Tensor:
    """Back to one number for each element."""
    each = _PACKED.get(coding.bits, 1)
    if each == 1:
        return codes
    some = [(codes >> (coding.bits * place)) & coding.levels for place in range(each)]
    return torch.stack(some, -1).flatten(1)
