"""RMSNorm and LayerNorm, of one tensor or of a residual sum: one Triton kernel each way.

RMSNorm: y = x / sqrt(mean(x^2) + eps) * (weight + offset), after Zhang and Sennrich, "Root Mean
Square Layer Normalization" (2019).  LayerNorm: the same of x - mean(x), plus a bias where there is
one, after Ba, Kiros and Hinton, "Layer Normalization" (2016).  `rounding` says where a
low-precision input is rounded: "early" rounds the normalised value, the product and the sum (Llama,
Cohere); "late" computes in float32 and rounds once (Gemma, torch.nn.RMSNorm, torch.nn.LayerNorm).
The offset of a LayerNorm is added in the type of its weight, as Nemotron does.

Of a residual connection total = a + b and y = norm(total) are both needed: the sum is rounded to
its type before it is normalised, as eager does, and backward adds the gradient of the total to the
one that comes through the norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from schedlang.kernels.device import LONGEST, count, runs_kernel, tl, triton, wide
from schedlang.kernels.rows import backward, forward

if triton is not None:
    from schedlang.kernels.rows import load_rows, load_vector, rounded, store_rows, tile_of

LONGEST_CENTRED = 8192  # elements of a row with a mean or a sum; of twice as many some spill


@dataclass(frozen=True)
class Form:
    """The form of a norm: a LayerNorm where `centred`, else an RMSNorm; see the file.

    `eps` None is the spacing of the type that is computed in, as of torch.nn.RMSNorm.
    """

    centred: bool = False
    eps: float | None = 1e-6
    offset: float = 0.0
    rounding: str = "late"

    @property
    def values(self) -> tuple[int, float | None, float, str]:
        """The fields in order, as operators take them."""
        return int(self.centred), self.eps, self.offset, self.rounding

    @property
    def longest(self) -> int:
        """The most elements of a row that the kernel takes where nothing is added before."""
        return LONGEST_CENTRED if self.centred else LONGEST


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Tensor:
    """Normalise the last dim of `x` (any leading shape); `weight` and `bias` have its size.

    An RMSNorm has no bias.  Differentiable once, in all three.
    """
    y: Tensor = norm_forward(x, None, weight, bias, *form.values)[1]
    return y


def add_norm(
    a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None, form: Form
) -> tuple[Tensor, Tensor]:
    """Return (a + b, its norm) of two tensors of one shape.

    The sum has the type of the one that holds the other's numbers (`fits`).  Differentiable once,
    in all four.
    """
    if torch.promote_types(a.dtype, b.dtype) != a.dtype:
        a, b = b, a
    total, y, _, _ = norm_forward(a, b, weight, bias, *form.values)
    return total, y


def fits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors have one shape, and their sum the type of one of them."""
    alike = a.dim() == b.dim() and all(n == m for n, m in zip(a.shape, b.shape))
    return alike and torch.promote_types(a.dtype, b.dtype) in (a.dtype, b.dtype)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Tensor:
    """Compute `norm` in plain torch operations, in float32 or the input's wider type."""
    return forward_of(x, weight, bias, form)[0]


def add_reference(
    a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None, form: Form
) -> tuple[Tensor, Tensor]:
    """Compute `add_norm` in plain torch operations."""
    total = a + b
    return total, reference(total, weight, bias, form)


def result_of(x: Tensor, weight: Tensor, bias: Tensor | None, rounding: str) -> torch.dtype:
    """The type of a norm: rounded early, a wider weight makes it wider."""
    if rounding == "late":
        return x.dtype
    found = torch.promote_types(x.dtype, weight.dtype)
    return found if bias is None else torch.promote_types(found, bias.dtype)


def forward_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, 1 / deviation of each row) in plain torch operations.

    The mean of an RMSNorm is zero.
    """
    kind = wide(x, weight, bias)
    value = x.to(kind)
    mean = value.mean(-1) if form.centred else value.new_zeros(value.shape[:-1])
    value = value - mean.unsqueeze(-1) if form.centred else value
    rstd = torch.rsqrt(value.square().mean(-1) + _eps(form, kind))
    normal = value * rstd.unsqueeze(-1)
    y = scaled(normal, x.dtype, weight, form.offset, form.rounding, form.centred)
    if bias is not None:
        y = y + (bias.to(kind) if form.rounding == "late" else bias)
    return y.to(result_of(x, weight, bias, form.rounding)), mean, rstd


def scaled(
    normal: Tensor,
    kind: torch.dtype,
    weight: Tensor,
    offset: float,
    rounding: str,
    centred: bool = False,
) -> Tensor:
    """Multiply the normalised value of an input of type `kind` by its weight.

    Rounded early to `kind`; late, the product is still as wide as `normal`.
    """
    if rounding == "late" and not centred:
        return normal * (weight.to(normal.dtype) + offset)
    scale = weight + offset if offset else weight
    return normal.to(kind) * scale if rounding == "early" else normal * scale.to(normal.dtype)


def backward_of(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of (x, weight, bias) in plain torch operations.

    That of the bias is in the type of the weight, and empty for an RMSNorm.
    """
    kind = torch.promote_types(wide(x, weight), rstd.dtype)
    value, grad = x.to(kind), dy.to(kind)
    value = value - mean.unsqueeze(-1) if form.centred else value
    normal = value * rstd.unsqueeze(-1)
    inner = scaled(grad, kind, weight, form.offset, "late", form.centred)
    dx = inner - normal * (inner * normal).mean(-1, keepdim=True)
    if form.centred:
        dx = dx - inner.mean(-1, keepdim=True)
    factor = normal.to(x.dtype).to(kind) if form.rounding == "early" else normal
    dweight = (grad * factor).reshape(-1, x.shape[-1]).sum(0)
    dbias = grad.reshape(-1, x.shape[-1]).sum(0) if form.centred else grad.new_empty(0)
    dx = rstd.unsqueeze(-1) * dx
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)


def _eps(form: Form, kind: torch.dtype) -> float:
    return torch.finfo(kind).eps if form.eps is None else form.eps


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def normal_of(value, inside, size, eps, CENTRED: tl.constexpr):  # type: ignore[no-untyped-def]
        """(the rows over their deviation, their means, what they were multiplied by)."""
        middle = tl.sum(value, 1) / size
        if CENTRED:
            value = tl.where(inside, value - middle[:, None], 0.0)
        inverse = tl.rsqrt(tl.sum(value * value, 1) / size + eps)
        return value * inverse[:, None], middle, inverse

    @triton.jit  # type: ignore[untyped-decorator]
    def through(scaled, normal, inverse, size, CENTRED: tl.constexpr):  # type: ignore[no-untyped-def]
        """The gradient of the rows, from that of the normalised ones."""
        along = tl.sum(scaled * normal, 1) / size
        if CENTRED:
            shift = tl.sum(scaled, 1) / size  # before any difference, or long rows spill
            result = scaled - normal * along[:, None] - shift[:, None]
        else:
            result = scaled - normal * along[:, None]
        return inverse[:, None] * result

    @triton.jit  # type: ignore[untyped-decorator]
    def forward_kernel(  # type: ignore[no-untyped-def]
        x,
        other,
        weight,
        bias,
        total,
        y,
        mean,
        rstd,
        rows,
        size,
        x_stride,
        other_stride,
        eps,
        offset,
        ADD: tl.constexpr,
        CENTRED: tl.constexpr,
        BIAS: tl.constexpr,
        EARLY: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Write y, 1/deviation, (CENTRED) the mean and (ADD) the total of ROWS rows."""
        number = tl.program_id(0).to(tl.int64)
        row, column, inside = tile_of(number, rows, size, ROWS, BLOCK)
        value = load_rows(x, row, column, x_stride, inside)
        if ADD:
            value += load_rows(other, row, column, other_stride, inside)
            value = rounded(value, total)
            store_rows(total, row, column, size, inside, value)
        normal, middle, inverse = normal_of(value, inside, size, eps, CENTRED)
        if CENTRED:
            tl.store(mean + row, middle, mask=row < rows)
        tl.store(rstd + row, inverse, mask=row < rows)
        scale = load_vector(weight, column, size) + offset
        if EARLY or CENTRED:
            scale = rounded(scale, weight)
        if EARLY:
            normal = rounded(normal, x)
        result = normal * scale[None, :]
        if BIAS:
            if EARLY:
                result = rounded(result, y)
            result += load_vector(bias, column, size)[None, :]
        store_rows(y, row, column, size, inside, result)

    @triton.jit  # type: ignore[untyped-decorator]
    def backward_kernel(  # type: ignore[no-untyped-def]
        dy,
        x,
        dtotal,
        weight,
        mean,
        rstd,
        dx,
        partial,
        rows,
        size,
        dy_stride,
        x_stride,
        dtotal_stride,
        tiles,
        offset,
        ADD: tl.constexpr,
        CENTRED: tl.constexpr,
        EARLY: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Write dx of some tiles of rows, and their part of the gradients of weight and bias."""
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
            if CENTRED:
                middle = tl.load(mean + row, mask=row < rows, other=0.0)
            inverse = tl.load(rstd + row, mask=row < rows, other=0.0)
            value = load_rows(x, row, column, x_stride, inside)
            if CENTRED:
                value -= middle[:, None]
            normal = value * inverse[:, None]
            result = through(grad * scale[None, :], normal, inverse, size, CENTRED)
            if ADD:
                result += load_rows(dtotal, row, column, dtotal_stride, inside)
            store_rows(dx, row, column, size, inside, result)
            if EARLY:
                normal = rounded(normal, x)
            by_weight += tl.sum(grad * normal, 0)
            if CENTRED:
                by_bias += tl.sum(grad, 0)
        SUMS: tl.constexpr = 2 if CENTRED else 1
        tl.store(partial + SUMS * program * size + columns, by_weight, mask=columns < size)
        if CENTRED:
            place = partial + (SUMS * program + 1) * size + columns
            tl.store(place, by_bias, mask=columns < size)


@torch.library.custom_op("schedlang::norm_forward", mutates_args=())
def norm_forward(
    x: Tensor,
    other: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    centred: int,
    eps: float | None,
    offset: float,
    rounding: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x + other, its norm, mean, 1 / deviation of each row), contiguous.

    Without `other` the first is empty.  The last two are in float32 at least.
    """
    assert centred or bias is None, "an RMSNorm with a bias"
    form = Form(bool(centred), eps, offset, rounding)
    longest = form.longest if other is None else LONGEST_CENTRED
    if not runs_kernel(x, other, weight, bias, longest=longest):
        count(False)
        return _by_torch(x, other, weight, bias, form)
    shape = (0,) if other is None else x.shape
    total = torch.empty(shape, dtype=x.dtype, device=x.device)
    y, mean, rstd = forward(
        forward_kernel,
        (x, x if other is None else other),
        (*_vectors(weight, bias), total),
        (result_of(x, weight, bias, rounding),),
        2,
        _eps(form, wide(x, weight)),
        offset,
        ADD=other is not None,
        CENTRED=bool(centred),
        BIAS=bias is not None,
        EARLY=rounding == "early",
    )
    return total, y, mean, rstd


@norm_forward.register_fake
def _(
    x: Tensor, other: Tensor | None, weight: Tensor, bias: Tensor | None, *form: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _by_torch(x, other, weight, bias, Form(*form))


def _by_torch(
    x: Tensor, other: Tensor | None, weight: Tensor, bias: Tensor | None, form: Form
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x if other is None else x + other
    y, mean, rstd = (t.contiguous() for t in forward_of(total, weight, bias, form))
    return x.new_empty(0) if other is None else total.contiguous(), y, mean, rstd


@torch.library.custom_op("schedlang::norm_backward", mutates_args=())
def norm_backward(
    dy: Tensor,
    x: Tensor,
    dtotal: Tensor | None,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    centred: int,
    offset: float,
    rounding: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (what is normalised, with `dtotal` added; weight; bias), contiguous.

    That of the bias is in the type of the weight, and empty for an RMSNorm.
    """
    longest = LONGEST_CENTRED if centred or dtotal is not None else LONGEST
    if not runs_kernel(x, dtotal, dy, weight, rstd, longest=longest):
        count(False)
        form = Form(bool(centred), None, offset, rounding)
        return _back_by_torch(dy, x, dtotal, weight, mean, rstd, form)
    dx, dweight, *more = backward(
        backward_kernel,
        (dy, x, dy if dtotal is None else dtotal),
        (weight.contiguous(), mean.contiguous(), rstd.contiguous()),
        (x.dtype,),
        1 + centred,
        offset,
        ADD=dtotal is not None,
        CENTRED=bool(centred),
        EARLY=rounding == "early",
    )
    dbias = more[0].to(weight.dtype) if more else weight.new_empty(0)
    return dx, dweight.to(weight.dtype), dbias


@norm_backward.register_fake
def _(dy: Tensor, x: Tensor, dtotal: Tensor | None, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    weight, mean, rstd, centred, *rest = given
    return _back_by_torch(dy, x, dtotal, weight, mean, rstd, Form(bool(centred), None, *rest))


def _back_by_torch(
    dy: Tensor,
    x: Tensor,
    dtotal: Tensor | None,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    form: Form,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = backward_of(dy, x, weight, mean, rstd, form)
    dx = dx if dtotal is None else dx + dtotal
    return dx.contiguous(), dweight.contiguous(), dbias.contiguous()


def _vectors(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both contiguous; for no bias the kernel is given what it does not read."""
    scale = weight.contiguous()
    return scale, scale if bias is None else bias.contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, other, weight, bias, ctx.centred, _, *ctx.form = inputs
    ctx.kinds = [None if t is None else t.dtype for t in (x, other, bias)]
    total, _, mean, rstd = output
    # of an RMSNorm there is no mean: what stands in its place costs nothing
    mean = mean if ctx.centred else rstd
    ctx.save_for_backward(x if other is None else total, weight, mean, rstd)


def _differentiate(ctx: Any, dtotal: Tensor, dy: Tensor, *_: Tensor) -> tuple[Any, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    kind, other, bias = ctx.kinds
    dx, dweight, dbias = norm_backward(
        dy, x, None if other is None else dtotal, weight, mean, rstd, ctx.centred, *ctx.form
    )
    by_other = None if other is None else dx.to(other)
    by_bias = None if bias is None else dbias.to(bias)
    return dx.to(kind), by_other, dweight, by_bias, None, None, None, None


norm_forward.register_autograd(_differentiate, setup_context=_save)


@dataclass(frozen=True)
class Case:
    """One norm to run, of a tensor of this shape, or (`add`) of a sum of two.

    The input is `scale` times standard normal; small scales expose eps.  `strided`: the elements of
    a row do not lie side by side.  `right` is the type of the second tensor of a sum, if another.
    """

    kernel: ClassVar[str] = "norm"
    shape: tuple[int, ...]
    dtype: str = "float32"
    form: Form = Form()
    bias: bool = False
    add: bool = False
    scale: float = 1.0
    seed: int = 0
    strided: bool = False
    right: str = ""

    @property
    def name(self) -> str:
        """The name of the kernel in `replace_kernel`."""
        kind = "layer_norm" if self.form.centred else "rms_norm"
        return "add_norm" if self.add else kind

    def draw(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        """Draw the tensors that it is differentiated by, in float32."""
        names = ("left", "right") if self.add else ("input",)
        shift = 0.3 if self.add or self.form.centred else 0.0
        found = {name: (normal(*self.shape) + shift) * self.scale for name in names}
        if self.right:
            found["right"] = found["right"].to(getattr(torch, self.right)).float()
        found["weight"] = normal(self.shape[-1]) * 0.2 + 1.0
        return found | ({"bias": normal(self.shape[-1])} if self.bias else {})

    def run(self, given: dict[str, Tensor], kernel: bool) -> Tensor:
        """Run the kernel, or its reference; of a sum the total comes above its norm."""
        vectors = given["weight"], given.get("bias")
        if not self.add:
            return (norm if kernel else reference)(given["input"], *vectors, self.form)
        a, b = given["left"], given["right"]
        if self.right and b.dtype != torch.float64:
            b = b.to(getattr(torch, self.right))
        return torch.stack((add_norm if kernel else add_reference)(a, b, *vectors, self.form))
