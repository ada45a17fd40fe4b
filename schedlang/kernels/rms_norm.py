"""RMSNorm, forward and backward: one Triton kernel each, beside its torch reference.

y = x / sqrt(mean(x^2) + eps) * (weight + offset), after Zhang and Sennrich, "Root Mean Square Layer
Normalization" (2019).  `rounding` says where a low-precision input is rounded: "early" rounds the
normalised value and multiplies by the weight after (Llama), "late" multiplies in float32 and rounds
once (Gemma, torch.nn.RMSNorm).

The kernel runs on a GPU, or in Triton's interpreter where TRITON_INTERPRET=1 was set before triton
was imported; otherwise, for float64, and for rows longer than `LONGEST`, the reference runs inside
the same operator.  `runs` says which of them did.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from schedlang.kernels import interpreter

try:
    import triton
    import triton.language as tl
except ImportError:  # triton is published for Linux on x86-64 only
    triton = None

LONGEST = 16384  # elements of a row that one program holds in registers; twice as many spill
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    interpreter.install()

_runs: Counter[str] = Counter()


def runs() -> dict[str, int]:
    """How often each backend ran in this process: "triton", "interpreter" and "reference".

    Forward and backward count one each.
    """
    return dict(_runs)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float | None, offset: float = 0.0, rounding: str = "late"
) -> Tensor:
    """RMSNorm over the last dim of `x` (any leading shape); `weight` has that dim's size.

    `eps=None` is torch's default, the spacing of the type it computes in.  Differentiable once, in
    `x` and `weight`.
    """
    if eps is None:
        eps = torch.finfo(_wide(x, weight)).eps
    y: Tensor = rms_norm_forward(x, weight, eps, offset, rounding)[0]
    return y


def reference(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, rounding: str = "late"
) -> Tensor:
    """The same in plain torch operations, in the input's own precision or float32 at least."""
    y, _ = _reference_forward(x, weight, eps, offset, rounding)
    return y


def _wide(x: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


def _result(x: Tensor, weight: Tensor, rounding: str) -> torch.dtype:
    """Early rounding multiplies by the weight last, so a wider weight makes the result wider."""
    return torch.promote_types(x.dtype, weight.dtype) if rounding == "early" else x.dtype


def _reference_forward(
    x: Tensor, weight: Tensor, eps: float, offset: float, rounding: str
) -> tuple[Tensor, Tensor]:
    value = x.to(_wide(x, weight))
    rstd = torch.rsqrt(value.square().mean(-1) + eps)
    normal = value * rstd.unsqueeze(-1)
    if rounding == "early":
        return normal.to(x.dtype) * (weight + offset if offset else weight), rstd
    return (normal * (weight.to(value.dtype) + offset)).to(x.dtype), rstd


def _reference_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, rounding: str
) -> tuple[Tensor, Tensor]:
    wide = _wide(x, weight)
    normal = x.to(wide) * rstd.unsqueeze(-1)
    scaled = dy.to(wide) * (weight.to(wide) + offset)
    along = (scaled * normal).mean(-1, keepdim=True)
    dx = rstd.unsqueeze(-1) * (scaled - normal * along)
    factor = normal.to(x.dtype).to(wide) if rounding == "early" else normal
    dweight = (dy.to(wide) * factor).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dweight.to(weight.dtype)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def forward_kernel(  # type: ignore[no-untyped-def]
        x,
        weight,
        y,
        rstd,
        rows,
        size,
        stride,
        eps,
        offset,
        EARLY: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Write y and 1/rms of ROWS rows."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, BLOCK)
        inside = (row[:, None] < rows) & (column[None, :] < size)
        value = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
        value = value.to(tl.float32)
        scale = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32) + offset
        inverse = tl.rsqrt(tl.sum(value * value, 1) / size + eps)
        normal = value * inverse[:, None]
        if EARLY:
            scale = scale.to(weight.dtype.element_ty).to(tl.float32)
            normal = normal.to(x.dtype.element_ty).to(tl.float32)
        result = (normal * scale[None, :]).to(y.dtype.element_ty)
        tl.store(y + row[:, None] * size + column[None, :], result, mask=inside)
        tl.store(rstd + row, inverse, mask=row < rows)

    @triton.jit  # type: ignore[untyped-decorator]
    def backward_kernel(  # type: ignore[no-untyped-def]
        dy,
        x,
        weight,
        rstd,
        dx,
        partial,
        rows,
        size,
        dy_stride,
        x_stride,
        tiles,
        offset,
        EARLY: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Write dx of some tiles of rows, and their part of the gradient of the weight."""
        # each program takes every so many tiles of rows and keeps its own sum for the weight
        program = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        scale = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32) + offset
        total = tl.zeros((BLOCK,), tl.float32)
        for tile in range(tiles):
            row = (program + tile * tl.num_programs(0)) * ROWS + tl.arange(0, ROWS)
            inside = (row[:, None] < rows) & (column[None, :] < size)
            grad = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0)
            grad = grad.to(tl.float32)
            value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
            inverse = tl.load(rstd + row, mask=row < rows, other=0.0)
            normal = value.to(tl.float32) * inverse[:, None]
            scaled = grad * scale[None, :]
            along = tl.sum(scaled * normal, 1) / size
            result = inverse[:, None] * (scaled - normal * along[:, None])
            place = row[:, None] * size + column[None, :]
            tl.store(dx + place, result.to(dx.dtype.element_ty), mask=inside)
            if EARLY:
                normal = normal.to(x.dtype.element_ty).to(tl.float32)
            total += tl.sum(grad * normal, 0)
        tl.store(partial + program * size + column, total, mask=column < size)


def tile(size: int) -> tuple[int, int, int]:
    """(rows of a tile, padded row, warps) for rows of `size` elements."""
    block = 1 << max(size - 1, 0).bit_length()
    rows = max(1, 1024 // block)
    return rows, block, min(32, max(4, rows * block // 512))


def _runs_kernel(x: Tensor, *others: Tensor) -> bool:
    return (
        triton is not None
        and 0 < x.shape[-1] <= LONGEST
        and x.numel() > 0
        and all(t.dtype in (torch.float32, torch.bfloat16, torch.float16) for t in (x, *others))
        and (x.is_cuda or (INTERPRETED and x.device.type == "cpu"))
    )


def _matrix(x: Tensor) -> Tensor:
    """As rows whose elements lie side by side; copied only where they do not."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _count() -> None:
    _runs["interpreter" if INTERPRETED else "triton"] += 1


@torch.library.custom_op("schedlang::rms_norm_forward", mutates_args=())
def rms_norm_forward(
    x: Tensor, weight: Tensor, eps: float, offset: float, rounding: str
) -> tuple[Tensor, Tensor]:
    """(y, 1 / root mean square of each row); both contiguous, the second in float32 at least."""
    if not _runs_kernel(x, weight):
        _runs["reference"] += 1
        y, rstd = _reference_forward(x, weight, eps, offset, rounding)
        return y.contiguous(), rstd.contiguous()
    rows, scale = _matrix(x), weight.contiguous()
    y = torch.empty(x.shape, dtype=_result(x, weight, rounding), device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    count, size = rows.shape
    height, block, warps = tile(size)
    forward_kernel[(triton.cdiv(count, height),)](
        rows,
        scale,
        y,
        rstd,
        count,
        size,
        rows.stride(0),
        eps,
        offset,
        EARLY=rounding == "early",
        ROWS=height,
        BLOCK=block,
        num_warps=warps,
        enable_fp_fusion=True,
    )
    _count()
    return y, rstd


@torch.library.custom_op("schedlang::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, rounding: str
) -> tuple[Tensor, Tensor]:
    """(gradient of x, gradient of weight), contiguous, in the types of x and weight."""
    if not _runs_kernel(x, weight, dy):
        _runs["reference"] += 1
        dx, dweight = _reference_backward(dy, x, weight, rstd, offset, rounding)
        return dx.contiguous(), dweight.contiguous()
    grads, rows, scale = _matrix(dy), _matrix(x), weight.contiguous()
    count, size = rows.shape
    height, block, warps = tile(size)
    programs = min(triton.cdiv(count, height), _programs(x))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty((programs, size), dtype=torch.float32, device=x.device)
    backward_kernel[(programs,)](
        grads,
        rows,
        scale,
        rstd.contiguous(),
        dx,
        partial,
        count,
        size,
        grads.stride(0),
        rows.stride(0),
        triton.cdiv(triton.cdiv(count, height), programs),
        offset,
        EARLY=rounding == "early",
        ROWS=height,
        BLOCK=block,
        num_warps=warps,
        enable_fp_fusion=True,
    )
    _count()
    return dx, partial.sum(0).to(weight.dtype)


def _programs(x: Tensor) -> int:
    """Programs of the backward kernel: enough to fill the device, few enough partial sums."""
    if not x.is_cuda:
        return 4
    return 2 * torch.cuda.get_device_properties(x.device).multi_processor_count


@rms_norm_forward.register_fake
def _(x: Tensor, weight: Tensor, eps: float, offset: float, rounding: str) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=_result(x, weight, rounding))
    return y, x.new_empty(x.shape[:-1], dtype=_wide(x, weight))


@rms_norm_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, rounding: str
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.offset, ctx.rounding = inputs
    ctx.save_for_backward(x, weight, output[1])


def _differentiate(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, rstd = ctx.saved_tensors
    dx, dweight = rms_norm_backward(dy, x, weight, rstd, ctx.offset, ctx.rounding)
    return dx, dweight, None, None, None


rms_norm_forward.register_autograd(_differentiate, setup_context=_save)
