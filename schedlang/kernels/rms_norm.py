"""RMSNorm, forward and backward: one Triton kernel each, beside its torch reference.

y = x / sqrt(mean(x^2) + eps) * (weight + offset), after Zhang and Sennrich, "Root Mean Square Layer
Normalization" (2019).  `rounding` says where a low-precision input is rounded: "early" rounds the
normalised value and multiplies by the weight after (Llama), "late" multiplies in float32 and rounds
once (Gemma, torch.nn.RMSNorm).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from schedlang.kernels.device import count, runs_kernel, tl, triton, wide
from schedlang.kernels.rows import backward, forward

if triton is not None:
    from schedlang.kernels.rows import load_rows, load_vector, rounded, store_rows, tile_of


def rms_norm(
    x: Tensor, weight: Tensor, eps: float | None, offset: float = 0.0, rounding: str = "late"
) -> Tensor:
    """RMSNorm over the last dim of `x` (any leading shape); `weight` has that dim's size.

    `eps=None` is torch's default, the spacing of the type it computes in.  Differentiable once, in
    `x` and `weight`.
    """
    if eps is None:
        eps = torch.finfo(wide(x, weight)).eps
    y: Tensor = rms_norm_forward(x, weight, eps, offset, rounding)[0]
    return y


def reference(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, rounding: str = "late"
) -> Tensor:
    """The same in plain torch operations, in the input's own precision or float32 at least."""
    y, _ = forward_of(x, weight, eps, offset, rounding)
    return y


def result_of(x: Tensor, weight: Tensor, rounding: str) -> torch.dtype:
    """Early rounding multiplies by the weight last, so a wider weight makes the result wider."""
    return torch.promote_types(x.dtype, weight.dtype) if rounding == "early" else x.dtype


def forward_of(
    x: Tensor, weight: Tensor, eps: float, offset: float, rounding: str
) -> tuple[Tensor, Tensor]:
    """(y, 1 / root mean square of each row), in plain torch operations."""
    value = x.to(wide(x, weight))
    rstd = torch.rsqrt(value.square().mean(-1) + eps)
    y = scaled(value * rstd.unsqueeze(-1), x.dtype, weight, offset, rounding)
    return y.to(result_of(x, weight, rounding)), rstd


def scaled(
    normal: Tensor, kind: torch.dtype, weight: Tensor, offset: float, rounding: str
) -> Tensor:
    """The normalised value of an input of type `kind` times its weight; late: not yet rounded."""
    if rounding == "early":
        return normal.to(kind) * (weight + offset if offset else weight)
    return normal * (weight.to(normal.dtype) + offset)


def backward_of(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, rounding: str
) -> tuple[Tensor, Tensor]:
    """(gradient of x, of weight), in plain torch operations."""
    kind = wide(x, weight)
    normal = x.to(kind) * rstd.unsqueeze(-1)
    scaled = dy.to(kind) * (weight.to(kind) + offset)
    along = (scaled * normal).mean(-1, keepdim=True)
    dx = rstd.unsqueeze(-1) * (scaled - normal * along)
    factor = normal.to(x.dtype).to(kind) if rounding == "early" else normal
    dweight = (dy.to(kind) * factor).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dweight.to(weight.dtype)


if triton is not None:

    @triton.jit
    def normal_of(value, size, eps):  # type: ignore[no-untyped-def]
        """(the rows divided by their root mean square, what they were multiplied by)."""
        inverse = tl.rsqrt(tl.sum(value * value, 1) / size + eps)
        return value * inverse[:, None], inverse

    @triton.jit
    def through(scaled, normal, inverse, size):  # type: ignore[no-untyped-def]
        """The gradient of the rows, from that of the normalised ones."""
        along = tl.sum(scaled * normal, 1) / size
        return inverse[:, None] * (scaled - normal * along[:, None])

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
        number = tl.program_id(0).to(tl.int64)
        row, column, inside = tile_of(number, rows, size, ROWS, BLOCK)
        normal, inverse = normal_of(load_rows(x, row, column, stride, inside), size, eps)
        scale = load_vector(weight, column, size) + offset
        if EARLY:
            scale = rounded(scale, weight)
            normal = rounded(normal, x)
        store_rows(y, row, column, size, inside, normal * scale[None, :])
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
        program = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        scale = load_vector(weight, columns, size) + offset
        total = tl.zeros((BLOCK,), tl.float32)
        for tile in range(tiles):
            number = program + tile * tl.num_programs(0)
            row, column, inside = tile_of(number, rows, size, ROWS, BLOCK)
            grad = load_rows(dy, row, column, dy_stride, inside)
            inverse = tl.load(rstd + row, mask=row < rows, other=0.0)
            normal = load_rows(x, row, column, x_stride, inside) * inverse[:, None]
            result = through(grad * scale[None, :], normal, inverse, size)
            store_rows(dx, row, column, size, inside, result)
            if EARLY:
                normal = rounded(normal, x)
            total += tl.sum(grad * normal, 0)
        tl.store(partial + program * size + columns, total, mask=columns < size)


@torch.library.custom_op("schedlang::rms_norm_forward", mutates_args=())
def rms_norm_forward(
    x: Tensor, weight: Tensor, eps: float, offset: float, rounding: str
) -> tuple[Tensor, Tensor]:
    """(y, 1 / root mean square of each row); both contiguous, the second in float32 at least."""
    if not runs_kernel(x, weight):
        count(False)
        y, rstd = forward_of(x, weight, eps, offset, rounding)
        return y.contiguous(), rstd.contiguous()
    kinds = (result_of(x, weight, rounding),)
    y, rstd = forward(
        forward_kernel,
        (x,),
        (weight.contiguous(),),
        kinds,
        1,
        eps,
        offset,
        EARLY=rounding == "early",
    )
    return y, rstd


@torch.library.custom_op("schedlang::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, rounding: str
) -> tuple[Tensor, Tensor]:
    """(gradient of x, gradient of weight), contiguous, in the types of x and weight."""
    if not runs_kernel(x, weight, dy):
        count(False)
        dx, dweight = backward_of(dy, x, weight, rstd, offset, rounding)
        return dx.contiguous(), dweight.contiguous()
    given = (weight.contiguous(), rstd.contiguous())
    dx, dweight = backward(
        backward_kernel, (dy, x), given, (x.dtype,), 1, offset, EARLY=rounding == "early"
    )
    return dx, dweight.to(weight.dtype)


@rms_norm_forward.register_fake
def _(x: Tensor, weight: Tensor, eps: float, offset: float, rounding: str) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=result_of(x, weight, rounding))
    return y, x.new_empty(x.shape[:-1], dtype=wide(x, weight))


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


@dataclass(frozen=True)
class Case:
    """One RMSNorm to run: shape of the input (last dim is normalised), type and form of the norm.

    The input is `scale` times standard normal; small scales expose eps.  `strided`: the elements of
    a row do not lie side by side.
    """

    kernel: ClassVar[str] = "rms_norm"
    shape: tuple[int, ...]
    dtype: str = "float32"
    eps: float = 1e-6
    offset: float = 0.0
    rounding: str = "late"
    scale: float = 1.0
    seed: int = 0
    strided: bool = False

    def draw(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        """The tensors that it is differentiated by, in float32."""
        x = normal(*self.shape) * self.scale
        return {"input": x, "weight": normal(self.shape[-1]) * 0.2 + 1.0}

    def run(self, given: dict[str, Tensor], kernel: bool) -> Tensor:
        """What the kernel gives, or its reference."""
        call = rms_norm if kernel else reference
        return call(given["input"], given["weight"], self.eps, self.offset, self.rounding)
