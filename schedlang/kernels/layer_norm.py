"""LayerNorm, forward and backward: one Triton kernel each, beside its torch reference.

y = (x - mean(x)) / sqrt(var(x) + eps) * (weight + offset) + bias, after Ba, Kiros and Hinton,
"Layer Normalization" (2016); without bias where there is none (Cohere), offset 1 in Nemotron.
`rounding` says where a low-precision input is rounded: "early" rounds the normalised value, the
product and the sum; "late" computes in float32 and rounds once, as torch does.  The offset is added
in the type of the weight.
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

LONGEST = 8192  # elements of a row; of twice as many in float32 some spill in backward


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float = 0.0,
    rounding: str = "late",
) -> Tensor:
    """LayerNorm over the last dim of `x` (any leading shape), which `weight` and `bias` have.

    Differentiable once, in `x`, `weight` and `bias`.
    """
    y: Tensor = layer_norm_forward(x, weight, bias, eps, offset, rounding)[0]
    return y


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float = 0.0,
    rounding: str = "late",
) -> Tensor:
    """The same in plain torch operations, in the input's own precision or float32 at least."""
    y, _, _ = forward_of(x, weight, bias, eps, offset, rounding)
    return y


def result_of(x: Tensor, weight: Tensor, bias: Tensor | None, rounding: str) -> torch.dtype:
    """Early rounding multiplies by the weight last, so a wider weight makes the result wider."""
    if rounding == "late":
        return x.dtype
    found = torch.promote_types(x.dtype, weight.dtype)
    return found if bias is None else torch.promote_types(found, bias.dtype)


def forward_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, 1 / deviation of each row), in plain torch operations."""
    kind = wide(x, weight, bias)
    value = x.to(kind)
    mean = value.mean(-1)
    centred = value - mean.unsqueeze(-1)
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    normal = centred * rstd.unsqueeze(-1)
    scale = weight + offset if offset else weight
    if rounding == "early":
        y = normal.to(x.dtype) * scale
        return (y if bias is None else y + bias), mean, rstd
    y = normal * scale.to(kind)
    return (y if bias is None else y + bias.to(kind)).to(x.dtype), mean, rstd


def backward_of(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, offset: float, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of x, of weight, of bias), in plain torch operations."""
    kind = torch.promote_types(wide(x, weight), rstd.dtype)
    normal = (x.to(kind) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    grad = dy.to(kind)
    scaled = grad * (weight + offset if offset else weight).to(kind)
    along = (scaled * normal).mean(-1, keepdim=True)
    dx = rstd.unsqueeze(-1) * (scaled - normal * along - scaled.mean(-1, keepdim=True))
    factor = normal.to(x.dtype).to(kind) if rounding == "early" else normal
    dweight = (grad * factor).reshape(-1, x.shape[-1]).sum(0)
    dbias = grad.reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)


if triton is not None:

    @triton.jit
    def normal_of(value, inside, size, eps):  # type: ignore[no-untyped-def]
        """(the rows with mean 0 and deviation 1, their means, what they were multiplied by)."""
        middle = tl.sum(value, 1) / size
        centred = tl.where(inside, value - middle[:, None], 0.0)
        inverse = tl.rsqrt(tl.sum(centred * centred, 1) / size + eps)
        return centred * inverse[:, None], middle, inverse

    @triton.jit
    def through(scaled, normal, inverse, size):  # type: ignore[no-untyped-def]
        """The gradient of the rows, from that of the normalised ones."""
        along = tl.sum(scaled * normal, 1) / size
        shift = tl.sum(scaled, 1) / size
        return inverse[:, None] * (scaled - normal * along[:, None] - shift[:, None])

    @triton.jit
    def scale_and_shift(normal, weight, bias, y, column, size, offset, BIAS, EARLY):  # type: ignore[no-untyped-def]
        """The normalised rows times the weight plus the bias, rounded where eager rounds."""
        scale = rounded(load_vector(weight, column, size) + offset, weight)
        result = normal * scale[None, :]
        if BIAS:
            if EARLY:
                result = rounded(result, y)
            result += load_vector(bias, column, size)[None, :]
        return result

    @triton.jit  # type: ignore[untyped-decorator]
    def forward_kernel(  # type: ignore[no-untyped-def]
        x,
        weight,
        bias,
        y,
        mean,
        rstd,
        rows,
        size,
        stride,
        eps,
        offset,
        BIAS: tl.constexpr,
        EARLY: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Write y, the mean and 1/deviation of ROWS rows."""
        number = tl.program_id(0).to(tl.int64)
        row, column, inside = tile_of(number, rows, size, ROWS, BLOCK)
        value = load_rows(x, row, column, stride, inside)
        normal, middle, inverse = normal_of(value, inside, size, eps)
        if EARLY:
            normal = rounded(normal, x)
        result = scale_and_shift(normal, weight, bias, y, column, size, offset, BIAS, EARLY)
        store_rows(y, row, column, size, inside, result)
        tl.store(mean + row, middle, mask=row < rows)
        tl.store(rstd + row, inverse, mask=row < rows)

    @triton.jit  # type: ignore[untyped-decorator]
    def backward_kernel(  # type: ignore[no-untyped-def]
        dy,
        x,
        weight,
        mean,
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
        """Write dx of some tiles of rows, and their part of the gradients of weight and bias."""
        program = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        scale = rounded(load_vector(weight, columns, size) + offset, weight)
        by_weight = tl.zeros((BLOCK,), tl.float32)
        by_bias = tl.zeros((BLOCK,), tl.float32)
        for tile in range(tiles):
            number = program + tile * tl.num_programs(0)
            row, column, inside = tile_of(number, rows, size, ROWS, BLOCK)
            grad = load_rows(dy, row, column, dy_stride, inside)
            middle = tl.load(mean + row, mask=row < rows, other=0.0)
            inverse = tl.load(rstd + row, mask=row < rows, other=0.0)
            value = load_rows(x, row, column, x_stride, inside)
            normal = (value - middle[:, None]) * inverse[:, None]
            result = through(grad * scale[None, :], normal, inverse, size)
            store_rows(dx, row, column, size, inside, result)
            if EARLY:
                normal = rounded(normal, x)
            by_weight += tl.sum(grad * normal, 0)
            by_bias += tl.sum(grad, 0)
        tl.store(partial + 2 * program * size + columns, by_weight, mask=columns < size)
        tl.store(partial + (2 * program + 1) * size + columns, by_bias, mask=columns < size)


@torch.library.custom_op("schedlang::layer_norm_forward", mutates_args=())
def layer_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, 1 / deviation of each row); contiguous, the last two in float32 at least."""
    if not runs_kernel(x, weight, bias, longest=LONGEST):
        count(False)
        y, mean, rstd = forward_of(x, weight, bias, eps, offset, rounding)
        return y.contiguous(), mean.contiguous(), rstd.contiguous()
    scale = weight.contiguous()
    given = scale, scale if bias is None else bias.contiguous()
    kinds = (result_of(x, weight, bias, rounding),)
    y, mean, rstd = forward(
        forward_kernel,
        (x,),
        given,
        kinds,
        2,
        eps,
        offset,
        BIAS=bias is not None,
        EARLY=rounding == "early",
    )
    return y, mean, rstd


@torch.library.custom_op("schedlang::layer_norm_backward", mutates_args=())
def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, offset: float, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of x, of weight, of bias), contiguous; the last two in the type of the weight."""
    if not runs_kernel(x, weight, dy, rstd, longest=LONGEST):
        count(False)
        found = backward_of(dy, x, weight, mean, rstd, offset, rounding)
        return found[0].contiguous(), found[1].contiguous(), found[2].contiguous()
    given = (weight.contiguous(), mean.contiguous(), rstd.contiguous())
    dx, dweight, dbias = backward(
        backward_kernel, (dy, x), given, (x.dtype,), 2, offset, EARLY=rounding == "early"
    )
    return dx, dweight.to(weight.dtype), dbias.to(weight.dtype)


@layer_norm_forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=result_of(x, weight, bias, rounding))
    mean = x.new_empty(x.shape[:-1], dtype=wide(x, weight, bias))
    return y, mean, torch.empty_like(mean)


@layer_norm_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, offset: float, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    dweight = weight.new_empty(weight.shape)
    return x.new_empty(x.shape), dweight, torch.empty_like(dweight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, ctx.offset, ctx.rounding = inputs
    ctx.bias = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, *output[1:])


def _differentiate(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    dx, dweight, dbias = layer_norm_backward(dy, x, weight, mean, rstd, ctx.offset, ctx.rounding)
    return dx, dweight, None if ctx.bias is None else dbias.to(ctx.bias), None, None, None


layer_norm_forward.register_autograd(_differentiate, setup_context=_save)


@dataclass(frozen=True)
class Case:
    """One LayerNorm to run; the fields are those of an RMSNorm's case (kernels/rms_norm.py)."""

    kernel: ClassVar[str] = "layer_norm"
    shape: tuple[int, ...]
    dtype: str = "float32"
    eps: float = 1e-5
    offset: float = 0.0
    rounding: str = "late"
    scale: float = 1.0
    seed: int = 0
    strided: bool = False
    bias: bool = True

    def draw(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        """The tensors that it is differentiated by, in float32."""
        found = {
            "input": (normal(*self.shape) + 0.5) * self.scale,
            "weight": normal(self.shape[-1]) * 0.2 + 1.0,
        }
        return found | ({"bias": normal(self.shape[-1])} if self.bias else {})

    def run(self, given: dict[str, Tensor], kernel: bool) -> Tensor:
        """What the kernel gives, or its reference."""
        call = layer_norm if kernel else reference
        x, weight, bias = given["input"], given["weight"], given.get("bias")
        return call(x, weight, bias, self.eps, self.offset, self.rounding)
