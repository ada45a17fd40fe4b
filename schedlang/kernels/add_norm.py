"""A sum and the norm of it, RMSNorm or LayerNorm: one Triton kernel forward and one backward.

Of a residual connection both are needed: total = a + b, and y = norm(total).  The sum is rounded to
its type before it is normalised, as eager does.  Backward adds the gradient that comes along the
total to that through the norm; it is the gradient of both, a and b.  Arithmetic, offset, rounding
and references are those of kernels/rms_norm.py and kernels/layer_norm.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from schedlang.kernels import layer_norm, rms_norm
from schedlang.kernels.device import count, runs_kernel, tl, triton, wide
from schedlang.kernels.rows import backward, forward

if triton is not None:
    from schedlang.kernels.layer_norm import normal_of as centred_of
    from schedlang.kernels.layer_norm import scale_and_shift
    from schedlang.kernels.layer_norm import through as through_centred
    from schedlang.kernels.rms_norm import normal_of, through
    from schedlang.kernels.rows import load_rows, load_vector, rounded, store_rows, tile_of

LONGEST = 8192  # elements of a row; of twice as many in float32 some spill


@dataclass(frozen=True)
class Form:
    """The norm: LayerNorm where `centred`, else RMSNorm; the rest as in kernels/rms_norm.py."""

    centred: bool = False
    eps: float = 1e-6
    offset: float = 0.0
    rounding: str = "late"


def add_norm(
    a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None, form: Form
) -> tuple[Tensor, Tensor]:
    """(a + b, its norm) of two tensors of one shape; an RMSNorm has no bias.

    The sum has the type of the one that holds the other's numbers (`fits`).  Differentiable once,
    in all four.
    """
    assert form.centred or bias is None, "an RMSNorm with a bias"
    if torch.promote_types(a.dtype, b.dtype) != a.dtype:
        a, b = b, a
    total, y, _, _ = add_norm_forward(
        a, b, weight, bias, form.centred, form.eps, form.offset, form.rounding
    )
    return total, y


def fits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape, and their sum the type of one of them."""
    alike = a.dim() == b.dim() and all(n == m for n, m in zip(a.shape, b.shape))
    return alike and torch.promote_types(a.dtype, b.dtype) in (a.dtype, b.dtype)


def reference(
    a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None, form: Form
) -> tuple[Tensor, Tensor]:
    """The same in plain torch operations."""
    total = a + b
    return total, _norm(total, weight, bias, form)[0]


def _norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, 1 / deviation); a mean of zero where nothing is centred."""
    if form.centred:
        return layer_norm.forward_of(x, weight, bias, form.eps, form.offset, form.rounding)
    y, rstd = rms_norm.forward_of(x, weight, form.eps, form.offset, form.rounding)
    return y, torch.zeros_like(rstd), rstd


def _result(x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> torch.dtype:
    if form.centred:
        return layer_norm.result_of(x, weight, bias, form.rounding)
    return rms_norm.result_of(x, weight, form.rounding)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def forward_kernel(  # type: ignore[no-untyped-def]
        a,
        b,
        weight,
        bias,
        total,
        y,
        mean,
        rstd,
        rows,
        size,
        a_stride,
        b_stride,
        eps,
        offset,
        CENTRED: tl.constexpr,
        BIAS: tl.constexpr,
        EARLY: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Write total, y, the mean and 1/deviation of ROWS rows."""
        number = tl.program_id(0).to(tl.int64)
        row, column, inside = tile_of(number, rows, size, ROWS, BLOCK)
        value = load_rows(a, row, column, a_stride, inside)
        value += load_rows(b, row, column, b_stride, inside)
        value = rounded(value, total)
        store_rows(total, row, column, size, inside, value)
        if CENTRED:
            normal, middle, inverse = centred_of(value, inside, size, eps)
            tl.store(mean + row, middle, mask=row < rows)
        else:
            normal, inverse = normal_of(value, size, eps)
        tl.store(rstd + row, inverse, mask=row < rows)
        if EARLY:
            normal = rounded(normal, total)
        if CENTRED:
            result = scale_and_shift(normal, weight, bias, y, column, size, offset, BIAS, EARLY)
        else:
            scale = load_vector(weight, column, size) + offset
            if EARLY:
                scale = rounded(scale, weight)
            result = normal * scale[None, :]
        store_rows(y, row, column, size, inside, result)

    @triton.jit  # type: ignore[untyped-decorator]
    def backward_kernel(  # type: ignore[no-untyped-def]
        dtotal,
        dy,
        total,
        weight,
        mean,
        rstd,
        dx,
        partial,
        rows,
        size,
        dtotal_stride,
        dy_stride,
        total_stride,
        tiles,
        offset,
        CENTRED: tl.constexpr,
        EARLY: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Write the gradient of the sum of some tiles of rows, and their part of the others."""
        program = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        scale = load_vector(weight, columns, size) + offset
        if CENTRED:
            scale = rounded(scale, weight)
        by_weight = tl.zeros((BLOCK,), tl.float32)
        by_bias = tl.zeros((BLOCK,), tl.float32)
        for tile in range(tiles):
            number = program + tile * tl.num_programs(0)
            row, column, inside = tile_of(number, rows, size, ROWS, BLOCK)
            grad = load_rows(dy, row, column, dy_stride, inside)
            inverse = tl.load(rstd + row, mask=row < rows, other=0.0)
            value = load_rows(total, row, column, total_stride, inside)
            if CENTRED:
                value -= tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
            normal = value * inverse[:, None]
            if CENTRED:
                result = through_centred(grad * scale[None, :], normal, inverse, size)
                by_bias += tl.sum(grad, 0)
            else:
                result = through(grad * scale[None, :], normal, inverse, size)
            result += load_rows(dtotal, row, column, dtotal_stride, inside)
            store_rows(dx, row, column, size, inside, result)
            if EARLY:
                normal = rounded(normal, total)
            by_weight += tl.sum(grad * normal, 0)
        SUMS: tl.constexpr = 2 if CENTRED else 1
        tl.store(partial + SUMS * program * size + columns, by_weight, mask=columns < size)
        if CENTRED:
            place = partial + (SUMS * program + 1) * size + columns
            tl.store(place, by_bias, mask=columns < size)


@torch.library.custom_op("schedlang::add_norm_forward", mutates_args=())
def add_norm_forward(
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    centred: bool,
    eps: float,
    offset: float,
    rounding: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(a + b, its norm, mean, 1 / deviation); contiguous, the last two in float32 at least."""
    form = Form(centred, eps, offset, rounding)
    if not runs_kernel(a, b, weight, bias, longest=LONGEST):
        count(False)
        total = a + b
        y, mean, rstd = (t.contiguous() for t in _norm(total, weight, bias, form))
        return total.contiguous(), y, mean, rstd
    scale = weight.contiguous()
    given = scale, scale if bias is None else bias.contiguous()
    kinds = a.dtype, _result(a, weight, bias, form)
    total, y, mean, rstd = forward(
        forward_kernel,
        (a, b),
        given,
        kinds,
        2,
        eps,
        offset,
        CENTRED=centred,
        BIAS=bias is not None,
        EARLY=rounding == "early",
    )
    return total, y, mean, rstd


@torch.library.custom_op("schedlang::add_norm_backward", mutates_args=())
def add_norm_backward(
    dtotal: Tensor,
    dy: Tensor,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    centred: bool,
    offset: float,
    rounding: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the sum, of the weight, of the bias); the last is empty without a mean."""
    if not runs_kernel(total, dtotal, dy, weight, rstd, longest=LONGEST):
        count(False)
        if centred:
            dx, dweight, dbias = layer_norm.backward_of(
                dy, total, weight, mean, rstd, offset, rounding
            )
        else:
            dx, dweight = rms_norm.backward_of(dy, total, weight, rstd, offset, rounding)
            dbias = weight.new_empty(0)
        return (dx + dtotal).contiguous(), dweight.contiguous(), dbias.contiguous()
    given = (weight.contiguous(), mean.contiguous(), rstd.contiguous())
    dx, dweight, *more = backward(
        backward_kernel,
        (dtotal, dy, total),
        given,
        (total.dtype,),
        1 + centred,
        offset,
        CENTRED=centred,
        EARLY=rounding == "early",
    )
    dbias = more[0].to(weight.dtype) if more else weight.new_empty(0)
    return dx, dweight.to(weight.dtype), dbias


@add_norm_forward.register_fake
def _(
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    centred: bool,
    eps: float,
    offset: float,
    rounding: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    form = Form(centred, eps, offset, rounding)
    y = a.new_empty(a.shape, dtype=_result(a, weight, bias, form))
    mean = a.new_empty(a.shape[:-1], dtype=wide(a, weight, bias))
    return a.new_empty(a.shape), y, mean, torch.empty_like(mean)


@add_norm_backward.register_fake
def _(
    dtotal: Tensor,
    dy: Tensor,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    centred: bool,
    offset: float,
    rounding: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = weight.new_empty(weight.shape if centred else (0,))
    return total.new_empty(total.shape), weight.new_empty(weight.shape), dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a, b, weight, bias, ctx.centred, _, *ctx.form = inputs
    ctx.kinds = a.dtype, b.dtype
    ctx.bias = None if bias is None else bias.dtype
    total, _, mean, rstd = output
    ctx.save_for_backward(total, weight, mean, rstd)


def _differentiate(ctx: Any, dtotal: Tensor, dy: Tensor, *_: Tensor) -> tuple[Any, ...]:
    total, weight, mean, rstd = ctx.saved_tensors
    dx, dweight, dbias = add_norm_backward(
        dtotal, dy, total, weight, mean, rstd, ctx.centred, *ctx.form
    )
    by_bias = None if ctx.bias is None else dbias.to(ctx.bias)
    left, right = ctx.kinds
    return dx.to(left), dx.to(right), dweight, by_bias, None, None, None, None


add_norm_forward.register_autograd(_differentiate, setup_context=_save)


@dataclass(frozen=True)
class Case:
    """One sum with its norm; the fields are those of an RMSNorm's case (kernels/rms_norm.py)."""

    kernel: ClassVar[str] = "add_norm"
    shape: tuple[int, ...]
    dtype: str = "float32"
    form: Form = Form()
    bias: bool = False
    scale: float = 1.0
    seed: int = 0
    strided: bool = False
    right: str = ""  # the type of the second, if another

    def draw(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        """The tensors that it is differentiated by, in float32."""
        found = {name: (normal(*self.shape) + 0.3) * self.scale for name in ("left", "right")}
        if self.right:
            found["right"] = found["right"].to(getattr(torch, self.right)).float()
        found["weight"] = normal(self.shape[-1]) * 0.2 + 1.0
        return found | ({"bias": normal(self.shape[-1])} if self.bias else {})

    def run(self, given: dict[str, Tensor], kernel: bool) -> Tensor:
        """What the kernel gives, total above norm, or its reference."""
        call = add_norm if kernel else reference
        a, b, weight = given["left"], given["right"], given["weight"]
        if self.right and b.dtype != torch.float64:
            b = b.to(getattr(torch, self.right))
        return torch.stack(call(a, b, weight, given.get("bias"), self.form))
