"""Codecs of gradients: a low-rank product, eight bits, one bit; each with what it leaves out.

Vogels et al., PowerSGD (2019); Dettmers, 8-bit approximations (2016), with stochastic rounding as
Alistarh et al., QSGD (2017); Seide et al., 1-bit SGD (2014).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from schedlang.runtime.device import sent


def drawn(shape: tuple[int, ...], like: Tensor, *words: object, normal: bool = True) -> Tensor:
    """Random numbers that depend on the words alone, equal wherever these are."""
    digest = hashlib.blake2b(" ".join(map(str, words)).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    draw = torch.randn if normal else torch.rand
    with torch._C.DisableTorchFunction():
        found = draw(shape, generator=generator, dtype=torch.float64)
    return sent(found.to(like.dtype), like.device)


# -- low rank ------------------------------------------------------------------------------------


def started(q: Tensor, *words: object) -> Tensor:
    """The start of a power iteration: columns that are zero are drawn."""
    fresh = drawn(tuple(q.shape), q, *words)
    return torch.where((q != 0).any(0), q, fresh)


def orthogonal(p: Tensor) -> Tensor:
    """Orthonormal columns by Gram and Schmidt, twice; one that the others span becomes zero.

    Else what is left of it, which is rounding, would be made as long as the others.
    """
    least = torch.finfo(p.dtype).eps ** 0.5
    columns: list[Tensor] = []
    for column in p.unbind(1):
        before = column.norm()
        for _ in range(2):
            for other in columns:
                column = column - other * (other @ column)
        after = column.norm()
        there = after > least * before
        columns.append(torch.where(there, column / torch.where(there, after, 1.0), 0.0))
    return torch.stack(columns, 1) if columns else p


# -- bits ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coded:
    """A tensor in few bits: bytes, and the numbers that scale each block of elements."""

    codes: Tensor
    scales: Tensor


def _blocks(flat: Tensor, block: int) -> Tensor:
    """Rows of one block each, the last filled with zeros."""
    count = -(-flat.numel() // block)
    filled = flat.new_zeros(count * block)
    filled[: flat.numel()] = flat
    return filled.view(count, block)


def to_int8(flat: Tensor, block: int, draw: Tensor) -> Coded:
    """Whole numbers from -127 to 127 per block, rounded up with the chance of what is beyond."""
    rows = _blocks(flat, block)
    scales = rows.abs().amax(1) / 127 if rows.numel() else flat.new_zeros(0)
    steps = rows / torch.where(scales > 0, scales, 1.0)[:, None]
    codes = (steps + _blocks(draw, block)).floor().clamp(-127, 127).to(torch.int8)
    return Coded(codes.view(-1), scales)


def from_int8(coded: Coded, count: int, block: int) -> Tensor:
    """The numbers that are meant."""
    rows = coded.codes.view(-1, block).to(coded.scales.dtype) * coded.scales[:, None]
    return rows.view(-1)[:count]


def to_bits(flat: Tensor, block: int) -> Coded:
    """One bit per element, and per block the means of those on either side of zero.

    What is zero but for rounding counts as above it, so that rounding decides nothing.
    """
    rows = _blocks(flat, block)
    least = torch.finfo(flat.dtype).eps ** 0.5
    limit = -least * (rows.abs().amax(1, keepdim=True) if rows.numel() else rows)
    above = rows >= limit
    there = _blocks(torch.ones_like(flat), block) > 0
    means = [_mean(rows, above & there), _mean(rows, ~above & there)]
    weights = 2 ** torch.arange(8, device=flat.device)
    codes = (above.view(-1, 8) * weights).sum(1).to(torch.uint8)
    return Coded(codes, torch.stack(means, 1).view(-1))


def from_bits(coded: Coded, count: int, block: int) -> Tensor:
    """The mean of its side, for each element."""
    shifts = torch.arange(8, device=coded.codes.device)
    above = (coded.codes[:, None].to(torch.int64) >> shifts) & 1
    means = coded.scales.view(-1, 2)
    rows = torch.where(above.view(-1, block) > 0, means[:, :1], means[:, 1:])
    return rows.reshape(-1)[:count]


def _mean(rows: Tensor, there: Tensor) -> Tensor:
    total = torch.where(there, rows, 0.0).sum(1)
    return total / there.sum(1).clamp(min=1)
