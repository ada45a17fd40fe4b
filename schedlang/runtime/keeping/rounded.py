"""Tensors as whole numbers of 8, 4 or 2 bits: a least value and a step for each block of elements.

Stochastically rounded, so that the mean over draws is the tensor itself (Chen et al., ActNN, 2021;
Pan et al., Mesa, 2021; Liu et al., GACT, 2022).  The draws are a hash of a stream and of the place
of an element, so that the same call rounds alike wherever, and however often, it runs.  Where
nobody has looked at the values, those that have no size (masked scores) keep a number for
themselves: they come back as they were, and the others of their block as fine as one number less
lets them.
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

    @property
    def last(self) -> int:
        """The number that stands for what has no size, in a block that has such."""
        return self.levels if self.bits <= 8 else -1

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
    far: Tensor | None = None  # for the largest number of blocks whose step is below zero

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
                codes, step = _unpacked(self.codes[blocks], self.coding), self.step[blocks, None]
                numbers = codes.to(self.least.dtype).mul_(step.abs()).add_(self.least[blocks, None])
                if self.far is not None:
                    away = (codes == self.coding.last) & step.signbit()
                    numbers = torch.where(away, self.far, numbers)
                flat[elements] = numbers.view(-1)[: elements.stop - elements.start]
            return made if plain else made.copy_(flat.view(self.shape))


def rounded(tensor: Tensor, coding: Coding, stream: int, unseen: bool = False) -> Rounded:
    """A tensor of floats in whole numbers, drawn from `stream` (a signed 64-bit number).

    `unseen`: it may hold what has no size, of one value (of several, the farthest stands for all).
    """
    work = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    blocks = -(-tensor.numel() // coding.block)
    stride = torch.empty_like(tensor, device="meta").stride()  # as dense as it can be
    new = tensor.detach().new_empty
    with torch._C.DisableTorchFunction(), torch.no_grad():
        width = coding.block // _PACKED.get(coding.bits, 1)
        codes = new((blocks, width), dtype=torch.uint8 if coding.bits <= 8 else torch.int64)
        least, step = new(blocks, dtype=work), new(blocks, dtype=work)
        flat = tensor.detach().reshape(-1)
        ends = Ends(flat, work) if unseen else None
        _fill(flat, coding, stream, (codes, least, step), ends)
        far = None if ends is None else ends.one()
    return Rounded(coding, codes, least, step, tensor.dtype, tensor.shape, stride, far)


def _fill(
    flat: Tensor, coding: Coding, stream: int, into: tuple[Tensor, Tensor, Tensor],
    ends: Ends | None,
) -> None:  # fmt: skip
    """Write the numbers of some elements, piece by piece."""
    codes, least, step = into
    for blocks, elements in _pieces(coding, flat):
        rows = _rows(flat[elements], coding.block).to(least.dtype)
        away = None if ends is None else ends.note(rows)
        if away is None:
            low, levels = rows.amin(1), coding.levels
            size = (rows.amax(1) - low) / levels
            least[blocks], step[blocks] = low, size
        else:
            low, high = _within(rows, away)
            some = away.any(1)
            size = (high - low) / (coding.levels - some.to(low.dtype))
            least[blocks], step[blocks] = low, torch.where(some, -size, size)
        exact = (rows - low[:, None]) / torch.where(size > 0, size, 1.0)[:, None]
        moved = exact + _draws(exact, elements.start, stream)
        drawn(stream, elements.start, moved, coding.levels)
        numbers = moved.floor_().clamp_(0, coding.levels)
        if away is not None:
            most = (coding.levels - away.any(1).to(low.dtype))[:, None]
            numbers = torch.where(away, coding.last, torch.minimum(numbers, most))
        codes[blocks] = _packed(numbers, coding)


def _within(rows: Tensor, away: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest of each row, without what is away; of nothing else, zeros."""
    low, high = rows.masked_fill(away, torch.inf).amin(1), rows.masked_fill(away, -torch.inf)
    none = away.all(1)
    return low.masked_fill(none, 0.0), high.amax(1).masked_fill(none, 0.0)


def bound(dtype: torch.dtype) -> float:
    """From which size on a value stands for none; float16 has real ones near its end."""
    most = torch.finfo(dtype).max
    return most * 0.9 if dtype == torch.float16 else most / 4


class Ends:
    """The farthest of what has no size in a tensor; the host knows neither it nor whether."""

    def __init__(self, flat: Tensor, work: torch.dtype) -> None:
        self.bound = bound(flat.dtype)
        self.least = flat.new_full((), torch.inf, dtype=work)
        self.most = flat.new_full((), -torch.inf, dtype=work)

    def note(self, rows: Tensor) -> Tensor:
        """Which elements have no size: infinite ones, those near the end, what is no number."""
        away = ~(rows.abs() < self.bound)
        self.least = torch.minimum(self.least, rows.masked_fill(~away, torch.inf).amin())
        self.most = torch.maximum(self.most, rows.masked_fill(~away, -torch.inf).amax())
        return away

    def one(self) -> Tensor:
        """What stands for all of them; no number where there are some on both sides."""
        above = torch.where(self.least > 0, self.most, torch.nan)
        return torch.where(self.most < 0, self.least, above)


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
