"""Weights in 8 or 4 bits: codes of a fixed book of levels, and a scale for each block.

A block is a run along the inputs of one output. Its scale is its largest absolute value, in the
dtype of the weight, and each element is the nearest level times the scale:

    int8  k / 127 for k of -127..127    vector-wise absmax, LLM.int8 (Dettmers et al. 2022)
    int4  k / 7 for k of -7..7
    nf4   the quantiles of a normal distribution, QLoRA (Dettmers et al. 2023, appendix E)

A tie goes to the even level. The greatest level is 1, so the largest value of a block is exact:
rounding a rounded weight again gives the same scales and codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

STEPS = {"int8": 127, "int4": 7}
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_NIBBLE = 15


@dataclass(frozen=True)
class Codebook:
    """A kind of codes, and the number of elements along a row that share a scale."""

    kind: str
    block: int

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.kind == "int8" else 4

    @property
    def levels(self) -> tuple[float, ...]:
        """All levels, from -1 to 1."""
        if self.kind == "nf4":
            return NF4
        steps = STEPS[self.kind]
        return tuple(k / steps for k in range(-steps, steps + 1))

    def bytes(self, outputs: int, inputs: int, itemsize: int) -> int:
        """Return the bytes of codes and scales of a matrix whose elements have `itemsize` bytes."""
        codes = -(-inputs * self.bits // 8)
        return outputs * (codes + self._blocks(inputs)[0] * itemsize)

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes [out, in] (two to a byte if of 4 bits) and scales [out, blocks]."""
        rows = rows.detach()
        count, block = self._blocks(rows.shape[1])
        padded = F.pad(rows, (0, count * block - rows.shape[1])).view(len(rows), count, block)
        scales = padded.abs().amax(-1)
        # with a subnormal scale, a product with a level may have too few digits to be encoded again
        scales = scales.masked_fill(scales < torch.finfo(rows.dtype).tiny, 0)
        compute = _compute_dtype(rows.dtype)
        ratio = padded.to(compute) / scales.masked_fill(scales == 0, 1).to(compute)[..., None]
        if self.kind == "nf4":
            codes = torch.bucketize(ratio, _midpoints(compute, rows.device)).to(torch.uint8)
        else:
            steps = STEPS[self.kind]
            codes = (ratio * steps).round_().clamp_(-steps, steps).to(torch.int8)
        codes = codes.flatten(1)[:, : rows.shape[1]]
        if self.bits == 8:
            return codes.contiguous(), scales
        if self.kind == "int4":
            codes = (codes + STEPS["int4"]).to(torch.uint8)
        pairs = F.pad(codes, (0, rows.shape[1] % 2))
        return pairs[:, ::2] | pairs[:, 1::2] << 4, scales

    def decode(self, codes: Tensor, scales: Tensor, inputs: int) -> Tensor:
        """Return the matrix [out, inputs] of codes, in the dtype of the scales."""
        compute, outputs = _compute_dtype(scales.dtype), len(codes)
        if self.bits == 4:
            codes = torch.stack([codes & _NIBBLE, codes >> 4], -1).flatten(1)[:, :inputs]
        if self.kind == "nf4":
            levels = _nf4(compute, codes.device)[codes.int()]
        else:
            steps = STEPS[self.kind]
            levels = codes.to(compute).sub_(0 if self.bits == 8 else steps).div_(steps)
        count, block = self._blocks(inputs)
        padded = F.pad(levels, (0, count * block - inputs)).view(outputs, count, block)
        values = (padded * scales.to(compute)[..., None]).to(scales.dtype)
        return values.flatten(1)[:, :inputs].contiguous()

    def round_rows(self, rows: Tensor) -> Tensor:
        """Return a matrix [out, in], encoded and decoded."""
        if rows.is_meta:
            return torch.empty_like(rows)
        return self.decode(*self.encode(rows), rows.shape[1])

    def _blocks(self, inputs: int) -> tuple[int, int]:
        """Return the number of blocks of a row, and of elements of a block."""
        block = max(1, min(self.block, inputs))
        return -(-inputs // block), block

    def __str__(self) -> str:
        return f"{self.kind}, block={self.block}"


@dataclass(frozen=True)
class WeightQuantization:
    """The codebook of a weight, and whether the weight is [in, out]."""

    book: Codebook
    transposed: bool

    @property
    def input_dim(self) -> int:
        """The dim of the weight along which blocks run."""
        return 0 if self.transposed else 1

    def round_weight(self, weight: Tensor) -> Tensor:
        """Return the weight, encoded and decoded."""
        rounded = self.book.round_rows(weight.detach().t() if self.transposed else weight.detach())
        return rounded.t().contiguous() if self.transposed else rounded

    def bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Return the bytes of a shard of this shape."""
        return self.book.bytes(shape[1 - self.input_dim], shape[self.input_dim], itemsize)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the computation."""
    return torch.promote_types(dtype, torch.float32)


@cache
def _nf4(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(NF4, dtype=dtype, device=device)


def _midpoints(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the midpoints between levels."""
    levels = _nf4(dtype, device)
    return (levels[1:] + levels[:-1]) / 2
