"""RMSNorm with a gate before or after it: one Triton kernel forward and one backward.

y = norm(x * act(gate)), as Mamba-2 has it (Dao and Gu, "Transformers are SSMs", 2024), or
y = norm(x) * act(gate), as gated linear attention does (Yang et al., 2023); the norm is that of
kernels/norm.py, over the whole row or over each of `groups` parts of it.  The gate's activation
is one of kernels/gated.py, never rounded.  Rounding "early" rounds the normalised value to the type
of the input, and its product with the weight before a gate that comes after.  Only the input, the
gate and a number for each group are kept for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from schedlang.kernels import norm
from schedlang.kernels.device import count, runs_kernel, tl, triton, wide
from schedlang.kernels.gated import ACTIVATIONS, BACKWARD
from schedlang.kernels.rows import backward, forward

if triton is not None:
    from schedlang.kernels.gated import activation
    from schedlang.kernels.norm import normal_of, through
    from schedlang.kernels.rows import load_rows, load_vector, rounded, store_rows, tile_of

LONGEST = 8192  # elements of a group; of twice as many some spill


@dataclass(frozen=True)
class Form:
    """The form of a norm with a gate: the norm as in kernels/norm.py, the gate and its place.

    `act` is one of gated.ACTIVATIONS; `first`: the gate comes before the norm, else after it.
    """

    eps: float = 1e-6
    offset: float = 0.0
    rounding: str = "late"
    act: str = "silu"
    first: bool = False
    groups: int = 1


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, form: Form) -> Tensor:
    """The norm of `x` over its last dim, with a gate of the same shape.

    `weight` has the size of the last dim, which `form.groups` divides.  The result has the type of
    x, and is wider only where the weight is, comes last and rounds early.  Differentiable once, in
    all three.
    """
    y: Tensor = gated_norm_forward(x, gate, weight, *astuple(form))[0]
    return y


def reference(x: Tensor, gate: Tensor, weight: Tensor, form: Form) -> Tensor:
    """The same in plain torch operations, in the input's own precision or float32 at least."""
    return forward_of(x, gate, weight, form)[0]


def result_of(x: Tensor, weight: Tensor, form: Form) -> torch.dtype:
    """A gate after the norm gives back the type of the input."""
    return norm.result_of(x, weight, None, form.rounding) if form.first else x.dtype


def forward_of(x: Tensor, gate: Tensor, weight: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """(y, 1 / root mean square of each group of a row), in plain torch operations."""
    kind = wide(x, gate, weight)
    lever = ACTIVATIONS[form.act](gate.to(kind))
    value = x.to(kind) * lever if form.first else x.to(kind)
    rstd = torch.rsqrt(parts_of(value, form.groups).square().mean(-1) + form.eps)
    y = _scaled(value, x.dtype, weight, rstd, form)
    return (y if form.first else y * lever).to(result_of(x, weight, form)), rstd


def parts_of(value: Tensor, groups: int) -> Tensor:
    """The last dim as so many parts of one size."""
    return value.reshape(*value.shape[:-1], groups, value.shape[-1] // groups)


def _normal(value: Tensor, rstd: Tensor) -> Tensor:
    """Each group of each row over its root mean square."""
    return (parts_of(value, rstd.shape[-1]) * rstd.unsqueeze(-1)).flatten(-2)


def _scaled(value: Tensor, kind: torch.dtype, weight: Tensor, rstd: Tensor, form: Form) -> Tensor:
    """The norm of a value that comes from an input of type `kind`."""
    normal = _normal(value, rstd)
    return norm.scaled(normal, kind, weight, form.offset, form.rounding)


def backward_of(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of x, of the gate, of the weight), in plain torch operations."""
    kind = wide(x, gate, weight)
    grad, value, raw = dy.to(kind), x.to(kind), gate.to(kind)
    lever = ACTIVATIONS[form.act](raw)
    inner = value * lever if form.first else value
    if form.first:
        dx, dweight = _through(grad, inner, x.dtype, weight, rstd, form)
        by_lever, dx = dx * value, dx * lever
    else:
        by_lever = grad * _scaled(inner, x.dtype, weight, rstd, form).to(kind)
        dx, dweight = _through(grad * lever, inner, x.dtype, weight, rstd, form)
    return dx.to(x.dtype), BACKWARD[form.act](by_lever, raw).to(gate.dtype), dweight


def _through(
    grad: Tensor, value: Tensor, kind: torch.dtype, weight: Tensor, rstd: Tensor, form: Form
) -> tuple[Tensor, Tensor]:
    """The gradients of what is normalised and of the weight, from that of the norm."""
    normal, size = _normal(value, rstd), value.shape[-1]
    factor = normal.to(kind).to(normal.dtype) if form.rounding == "early" else normal
    dweight = (grad * factor).reshape(-1, size).sum(0).to(weight.dtype)
    scaled = grad * (weight.to(grad.dtype) + form.offset)
    parts = parts_of(scaled * normal, form.groups)
    along = parts.mean(-1, keepdim=True).expand_as(parts).flatten(-2)
    return _normal(scaled - normal * along, rstd), dweight


if triton is not None:
    HELD = tl.constexpr(4096)  # of longer rows a program loads the weight again for each tile

    @triton.jit  # type: ignore[untyped-decorator]
    def scale_of(weight, column, size, offset, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
        """The factors of a row's elements."""
        scale = load_vector(weight, column, size) + offset
        if EARLY:
            scale = rounded(scale, weight)
        return scale

    @triton.jit  # type: ignore[untyped-decorator]
    def forward_kernel(  # type: ignore[no-untyped-def]
        x,
        gate,
        weight,
        y,
        rstd,
        rows,
        size,
        x_stride,
        gate_stride,
        eps,
        offset,
        ACT: tl.constexpr,
        FIRST: tl.constexpr,
        EARLY: tl.constexpr,
        SAME: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Write y and 1/rms of one group of ROWS rows."""
        number = tl.program_id(0).to(tl.int64)
        group, groups = tl.program_id(1), tl.num_programs(1)
        row, column, inside = tile_of(number, rows, size, ROWS, BLOCK)
        start = group * size
        value = load_rows(x + start, row, column, x_stride, inside)
        lever, _ = activation(load_rows(gate + start, row, column, gate_stride, inside), ACT)
        if FIRST:
            value = value * lever
        normal, _, inverse = normal_of(value, inside, size, eps, False)
        tl.store(rstd + row * groups + group, inverse, mask=row < rows)
        scale = scale_of(weight + start, column, size, offset, EARLY)
        if EARLY:
            normal = rounded(normal, x)
        result = normal * scale[None, :]
        if not FIRST:
            if EARLY and SAME:
                result = rounded(result, x)
            result = result * lever
        store_rows(y + start, row, column, size * groups, inside, result)

    @triton.jit  # type: ignore[untyped-decorator]
    def backward_kernel(  # type: ignore[no-untyped-def]
        dy,
        x,
        gate,
        weight,
        rstd,
        dx,
        dgate,
        partial,
        rows,
        size,
        dy_stride,
        x_stride,
        gate_stride,
        tiles,
        offset,
        ACT: tl.constexpr,
        FIRST: tl.constexpr,
        EARLY: tl.constexpr,
        SAME: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Write both gradients of one group of some tiles of rows, and their part of the
        weight's."""
        program = tl.program_id(0).to(tl.int64)
        group, groups = tl.program_id(1), tl.num_programs(1)
        columns = tl.arange(0, BLOCK)
        start = group * size
        if BLOCK <= HELD:
            held = scale_of(weight + start, columns, size, offset, EARLY)
        total = tl.zeros((BLOCK,), tl.float32)
        for tile in range(tiles):
            number = program + tile * tl.num_programs(0)
            row, column, inside = tile_of(number, rows, size, ROWS, BLOCK)
            grad = load_rows(dy + start, row, column, dy_stride, inside)
            value = load_rows(x + start, row, column, x_stride, inside)
            raw = load_rows(gate + start, row, column, gate_stride, inside)
            lever, slope = activation(raw, ACT)
            inverse = tl.load(rstd + row * groups + group, mask=row < rows, other=0.0)
            if BLOCK <= HELD:
                scale = held
            else:
                scale = scale_of(weight + start, columns, size, offset, EARLY)
            normal = value * inverse[:, None]
            if FIRST:
                normal = normal * lever
            factor = normal
            if EARLY:
                factor = rounded(normal, x)
            if not FIRST:
                made = factor * scale[None, :]
                if EARLY and SAME:
                    made = rounded(made, x)
                by_gate = made * grad * slope
                store_rows(dgate + start, row, column, size * groups, inside, by_gate)
                grad = grad * lever
            total += tl.sum(grad * factor, 0)
            scaled = grad * scale[None, :]
            if FIRST:
                along = tl.sum(scaled * normal, 1) / size
                # the normalised value in another order: it need not be held meanwhile
                again = lever * inverse[:, None] * value
                result = inverse[:, None] * (scaled - again * along[:, None])
                by_gate = value * result * slope
                store_rows(dgate + start, row, column, size * groups, inside, by_gate)
                result = result * lever
            else:
                result = through(scaled, normal, inverse, size, False)
            store_rows(dx + start, row, column, size * groups, inside, result)
        place = partial + program * size * groups + start + columns
        tl.store(place, total, mask=columns < size)


def _runs(form: Form, *tensors: Tensor) -> bool:
    """Tell whether the kernel takes these tensors: their groups fit a program."""
    return runs_kernel(*tensors, longest=LONGEST * form.groups)


def _constants(x: Tensor, weight: Tensor, form: Form) -> dict[str, Any]:
    return {
        "groups": form.groups,
        "ACT": form.act,
        "FIRST": form.first,
        "EARLY": form.rounding == "early",
        "SAME": x.dtype == weight.dtype,
    }


@torch.library.custom_op("schedlang::gated_norm_forward", mutates_args=())
def gated_norm_forward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    rounding: str,
    act: str,
    first: bool,
    groups: int,
) -> tuple[Tensor, Tensor]:
    """(y, 1 / root mean square of each group); contiguous, the second in float32 at least."""
    form = Form(eps, offset, rounding, act, first, groups)
    if not _runs(form, x, gate, weight):
        count(False)
        y, rstd = forward_of(x, gate, weight, form)
        return y.contiguous(), rstd.contiguous()
    y, rstd = forward(
        forward_kernel,
        (x, gate),
        (weight.contiguous(),),
        (result_of(x, weight, form),),
        1,
        eps,
        offset,
        **_constants(x, weight, form),
    )
    return y, rstd.view(*x.shape[:-1], groups)


@torch.library.custom_op("schedlang::gated_norm_backward", mutates_args=())
def gated_norm_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    rounding: str,
    act: str,
    first: bool,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of x, of the gate, of the weight), contiguous, in their types."""
    form = Form(0.0, offset, rounding, act, first, groups)
    if not _runs(form, x, gate, weight, dy):
        count(False)
        dx, dgate, dweight = backward_of(dy, x, gate, weight, rstd, form)
        return dx.contiguous(), dgate.contiguous(), dweight.contiguous()
    given = (weight.contiguous(), rstd.contiguous())
    dx, dgate, dweight = backward(
        backward_kernel,
        (dy, x, gate),
        given,
        (x.dtype, gate.dtype),
        1,
        offset,
        **_constants(x, weight, form),
    )
    return dx, dgate, dweight.to(weight.dtype)


@gated_norm_forward.register_fake
def _(x: Tensor, gate: Tensor, weight: Tensor, *form: Any) -> tuple[Tensor, Tensor]:
    y, rstd = forward_of(x, gate, weight, Form(*form))
    return y.contiguous(), rstd.contiguous()


@gated_norm_backward.register_fake
def _(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), gate.new_empty(gate.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gate, weight, _, *ctx.form = inputs
    ctx.save_for_backward(x, gate, weight, output[1])


def _differentiate(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *gated_norm_backward(dy, *ctx.saved_tensors, *ctx.form), *[None] * 6


gated_norm_forward.register_autograd(_differentiate, setup_context=_save)


@dataclass(frozen=True)
class Case:
    """One norm with a gate; the other fields are those of an RMSNorm's case (kernels/norm.py).

    `other` is the type of the gate and of the weight, if another.
    """

    kernel: ClassVar[str] = "gated_norm"
    shape: tuple[int, ...]
    dtype: str = "float32"
    form: Form = Form()
    scale: float = 1.0
    seed: int = 0
    strided: bool = False
    other: str = ""

    def draw(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        """The tensors that it is differentiated by, in float32."""
        x, gate = normal(*self.shape) * self.scale, normal(*self.shape)
        weight = normal(self.shape[-1]) * 0.2 + 1.0
        kind = getattr(torch, self.other or "float32")
        return {"input": x, "gate": gate.to(kind).float(), "weight": weight.to(kind).float()}

    def run(self, given: dict[str, Tensor], kernel: bool) -> Tensor:
        """Run the kernel, or its reference."""
        x, gate, weight = given["input"], given["gate"], given["weight"]
        if self.other and x.dtype != torch.float64:
            gate, weight = (t.to(getattr(torch, self.other)) for t in (gate, weight))
        return (gated_norm if kernel else reference)(x, gate, weight, self.form)
