"""Cross-entropy statistics of rows of logits, and the gradient written over the logits.

Three numbers of each row are enough for every loss that sums over tokens: the logarithm of the sum
of exponentials, the target's logit, and the sum of all logits (for smoothed labels). A Triton
kernel reads each logit once for them (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018); another one overwrites the logits with their gradient. `scale` and `cap` are the
model's transformation of logits before the loss: cap * tanh(scale * z), or scale * z if cap is 0.

These are steps of other operators (kernels/linear_cross_entropy.py), not differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from schedlang.kernels.kernel_device import can_run_kernel, compute_dtype, launch_kernel, tl, triton

_BLOCK = 4096  # logits that a program holds at a time
_AT_ONCE = 4 * 2**20  # bytes of a copy in plain torch operations, which is in float32 at least


def statistics(
    z: Tensor, target: Tensor, scale: float, cap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log-sum-exp, the target's logit, the sum) of each row; negative targets mean none."""
    if not _fits(z):
        parts = [_statistics(z[part], target[part], scale, cap) for part in _parts(z)]
        lse, picked, total = (torch.cat(columns) for columns in zip(*parts))
        return lse, picked, total
    results = torch.empty((3, z.shape[0]), dtype=torch.float32, device=z.device)
    lse, picked, total = results.unbind()
    _launch(statistics_kernel, z, (target.contiguous(), lse, picked, total), scale, cap)
    return lse, picked, total


def gradient_(
    z: Tensor,
    target: Tensor,
    lse: Tensor,
    by: tuple[Tensor, Tensor, Tensor],
    scale: float,
    cap: float,
) -> Tensor:
    """Overwrite rows `z` with their gradient; `by` are the gradients of the three statistics."""
    if not _fits(z):
        for part in _parts(z):
            part_by = by[0][part], by[1][part], by[2][part]
            z[part].copy_(_gradient(z[part], target[part], lse[part], part_by, scale, cap))
        return z
    _launch(gradient_kernel, z, [t.contiguous() for t in (target, lse, *by)], scale, cap)
    return z


def _launch(kernel: Any, z: Tensor, rows: Sequence[Tensor], scale: float, cap: float) -> None:
    """Launch one program for each row of `z`, with the row's numbers."""
    block, warps = _tile(z)
    launch_kernel(
        kernel,
        (z.shape[0],),
        z,
        *rows,
        z.shape[1],
        z.stride(0),
        scale,
        cap,
        CAPPED=cap != 0,
        BLOCK=block,
        warps=warps,
    )


def _fits(z: Tensor) -> bool:
    return can_run_kernel(z, longest=None) and z.stride(1) == 1


def _tile(z: Tensor) -> tuple[int, int]:
    block = min(_BLOCK, 1 << max(z.shape[1] - 1, 0).bit_length())
    return block, max(4, min(8, block // 512))


def _parts(z: Tensor) -> list[slice]:
    """Return chunks of rows: a float32 copy of all would be as large as the logits."""
    rows = max(1, _AT_ONCE // max(1, z.shape[1] * compute_dtype(z).itemsize))
    return [slice(start, start + rows) for start in range(0, max(1, z.shape[0]), rows)]


def _statistics(
    z: Tensor, target: Tensor, scale: float, cap: float
) -> tuple[Tensor, Tensor, Tensor]:
    value = z.to(compute_dtype(z)) * scale if scale != 1 else z.to(compute_dtype(z))
    value = torch.tanh(value) * cap if cap else value
    valid = target >= 0
    picked = value.gather(1, target.clamp_min(0)[:, None])[:, 0] * valid
    return value.logsumexp(1), picked, value.sum(1)


def _gradient(
    z: Tensor,
    target: Tensor,
    lse: Tensor,
    by: tuple[Tensor, Tensor, Tensor],
    scale: float,
    cap: float,
) -> Tensor:
    value = z.to(compute_dtype(z))  # `z` itself if it is wide enough: it is overwritten anyway
    value = value.mul_(scale) if scale != 1 else value
    slope: Tensor | float = scale
    if cap:
        curve = torch.tanh(value)
        value, slope = curve * cap, (1 - curve.square()).mul_(cap * scale)
    grad = value.sub_(lse[:, None]).exp_().mul_(by[0][:, None]).add_(by[2][:, None])
    picked_grad = (by[1] * (target >= 0)).to(grad.dtype)
    return grad.scatter_add_(1, target.clamp_min(0)[:, None], picked_grad[:, None]).mul_(slope)


if triton is not None:

    @triton.jit
    def _curve(value):  # type: ignore[no-untyped-def]
        """Return tanh, by the exponential: exact at both ends."""
        return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * value))

    @triton.jit  # type: ignore[untyped-decorator]
    def _logits(z, row, start, stride, size, scale, cap, CAPPED, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load a block of one row: (pointers, columns, mask, logits, derivatives)."""
        column = start + tl.arange(0, BLOCK)
        inside = column < size
        pointer = z + row * stride + column
        value = tl.load(pointer, mask=inside, other=0.0).to(tl.float32) * scale
        slope = scale
        if CAPPED:
            curve = _curve(value)
            value = curve * cap
            slope = (1.0 - curve * curve) * (cap * scale)
        return pointer, column, inside, value, slope

    @triton.jit  # type: ignore[untyped-decorator]
    def statistics_kernel(  # type: ignore[no-untyped-def]
        z,
        target,
        lse,
        picked,
        total,
        size,
        stride,
        scale,
        cap,
        CAPPED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Read one row, block by block, and write its three numbers."""
        row = tl.program_id(0).to(tl.int64)
        label = tl.load(target + row)
        largest = -float("inf")
        norm = 0.0
        picked_logit = 0.0
        added = 0.0
        for start in range(0, size, BLOCK):
            _, column, inside, value, _ = _logits(
                z, row, start, stride, size, scale, cap, CAPPED, BLOCK
            )
            added += tl.sum(tl.where(inside, value, 0.0), 0)
            picked_logit += tl.sum(tl.where(column == label, value, 0.0), 0)
            value = tl.where(inside, value, -float("inf"))
            top = tl.maximum(largest, tl.max(value, 0))
            norm = norm * tl.exp(largest - top) + tl.sum(tl.exp(value - top), 0)
            largest = top
        tl.store(lse + row, tl.log(norm) + largest)
        tl.store(picked + row, picked_logit)
        tl.store(total + row, added)

    @triton.jit  # type: ignore[untyped-decorator]
    def gradient_kernel(  # type: ignore[no-untyped-def]
        z,
        target,
        lse,
        by_lse,
        by_picked,
        by_total,
        size,
        stride,
        scale,
        cap,
        CAPPED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Overwrite one row with its gradient."""
        row = tl.program_id(0).to(tl.int64)
        label = tl.load(target + row)
        level = tl.load(lse + row)
        first = tl.load(by_lse + row).to(tl.float32)
        second = tl.load(by_picked + row).to(tl.float32)
        third = tl.load(by_total + row).to(tl.float32)
        for start in range(0, size, BLOCK):
            pointer, column, inside, value, slope = _logits(
                z, row, start, stride, size, scale, cap, CAPPED, BLOCK
            )
            grad = tl.exp(value - level) * first + third
            grad += tl.where(column == label, second, 0.0)
            tl.store(pointer, (grad * slope).to(z.dtype.element_ty), mask=inside)
