"""RMSNorm and LayerNorm, of a tensor, of a residual sum or with a gate: one kernel each way.

RMSNorm: y = x / sqrt(mean(x^2) + eps) * (weight + offset), after Zhang and Sennrich, "Root Mean
Square Layer Normalization" (2019). LayerNorm: the same of x - mean(x), plus an optional bias, after
Ba, Kiros and Hinton, "Layer Normalization" (2016). `rounding` says where a low-precision input is
rounded: "early" rounds the normalised value, the product and the sum (Llama, Cohere); "late"
computes in float32 and rounds once (Gemma, torch.nn.RMSNorm, torch.nn.LayerNorm). The offset of a
LayerNorm is added in the dtype of its weight, as in Nemotron.

A residual connection needs both total = a + b and y = norm(total): the sum is rounded to its dtype
before it is normalised, as in eager mode, and backward adds the gradient of the total to the
gradient through the norm.

A gate multiplies the input of an RMSNorm, norm(x * act(gate)), as in Mamba-2 (Dao and Gu,
"Transformers are SSMs", 2024), or its output, norm(x) * act(gate), as in gated linear attention
(Yang et al., 2023); the norm is over the full row or over each of `groups` groups of it. The
activation is one of kernels/gated.py, never rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from schedlang.kernels import check
from schedlang.kernels.gated import ACTIVATIONS, BACKWARD
from schedlang.kernels.kernel_device import (
    MAX_ROW,
    can_run_kernel,
    compute_dtype,
    count_kernel_run,
    launch_backward,
    launch_forward,
    tl,
    triton,
)

if triton is not None:
    from schedlang.kernels.gated import activation
    from schedlang.kernels.kernel_device import load_rows, load_vector, rounded, store_rows, tile_of

# elements of a group with a mean, sum or gate; with twice as many some registers spill
MAX_ROW_WITH_EXTRAS = 8192


@dataclass(frozen=True)
class Form:
    """The form of a norm: a LayerNorm if `centred`, else an RMSNorm; see the module.

    eps     None: the spacing of the dtype that is computed in, as in torch.nn.RMSNorm
    act     the activation of a gate, in gated.ACTIVATIONS; "": no gate
    first   the gate comes before the norm, else after it
    groups  1 except for an RMSNorm with a gate
    """

    centred: bool = False
    eps: float | None = 1e-6
    offset: float = 0.0
    rounding: str = "late"
    act: str = ""
    first: bool = False
    groups: int = 1

    @property
    def values(self) -> tuple[int, float | None, float, str, str, bool, int]:
        """The fields in order, as arguments of operators."""
        gating = self.act, self.first, self.groups
        return int(self.centred), self.eps, self.offset, self.rounding, *gating

    @property
    def longest(self) -> int:
        """The largest row that the kernel supports without a residual sum."""
        return (MAX_ROW_WITH_EXTRAS if self.centred or self.act else MAX_ROW) * self.groups


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, form: Form, gate: Tensor | None = None
) -> Tensor:
    """Normalise the last dim of `x` (any leading shape); `weight` and `bias` have its size.

    An RMSNorm has no bias; `gate` has the shape of `x`, if the form has one. The result has the
    dtype of `x`; it is wider only if the weight is wider, applied last and rounded early.
    Differentiable once, in all four.
    """
    y: Tensor = norm_forward(x, None, gate, weight, bias, *form.values)[1]
    return y


def add_norm(
    a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None, form: Form
) -> tuple[Tensor, Tensor]:
    """Return (a + b, its norm) of two tensors of one shape.

    The sum has the wider of the two dtypes (see `can_add`). Differentiable once, in all four.
    """
    if torch.promote_types(a.dtype, b.dtype) != a.dtype:
        a, b = b, a
    total, y, _, _ = norm_forward(a, b, None, weight, bias, *form.values)
    return total, y


def can_add(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have one shape, and their sum has the dtype of one of them."""
    broadcastable = a.dim() == b.dim() and all(n == m for n, m in zip(a.shape, b.shape))
    return broadcastable and torch.promote_types(a.dtype, b.dtype) in (a.dtype, b.dtype)


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, form: Form, gate: Tensor | None = None
) -> Tensor:
    """Compute `norm` by plain torch operations, in float32 or the input's wider dtype."""
    return reference_forward(x, gate, weight, bias, form)[0]


def add_reference(
    a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None, form: Form
) -> tuple[Tensor, Tensor]:
    """Compute `add_norm` by plain torch operations."""
    total = a + b
    return total, reference(total, weight, bias, form)


def result_dtype(x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> torch.dtype:
    """Return the dtype of a norm's result.

    Rounded early, a wider weight or bias makes it wider, unless a gate comes after it.
    """
    if form.rounding == "late" or (form.act and not form.first):
        return x.dtype
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return dtype if bias is None else torch.promote_types(dtype, bias.dtype)


def split_groups(value: Tensor, groups: int) -> Tensor:
    """Split the last dim into groups of one size: [..., groups, size of a group]."""
    return value.reshape(*value.shape[:-1], groups, value.shape[-1] // groups)


def reference_forward(
    x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor | None, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, 1 / deviation of each group of a row) by plain torch operations.

    The mean of an RMSNorm is zero.
    """
    kind = compute_dtype(x, gate, weight, bias)
    lever = None if gate is None else ACTIVATIONS[form.act](gate.to(kind))
    value = x.to(kind) * lever if lever is not None and form.first else x.to(kind)
    parts = split_groups(value, form.groups)
    mean = parts.mean(-1) if form.centred else parts.new_zeros(parts.shape[:-1])
    parts = parts - mean.unsqueeze(-1) if form.centred else parts
    rstd = torch.rsqrt(parts.square().mean(-1) + _eps(form, kind))
    y = apply_weight((parts * rstd.unsqueeze(-1)).flatten(-2), x.dtype, weight, form)
    if bias is not None:
        y = y + (bias.to(kind) if form.rounding == "late" else bias)
    y = y * lever if lever is not None and not form.first else y
    return y.to(result_dtype(x, weight, bias, form)), mean, rstd


def apply_weight(normal: Tensor, kind: torch.dtype, weight: Tensor, form: Form) -> Tensor:
    """Multiply the normalised value of an input of dtype `kind` by its weight.

    Early rounding gives `kind`; late rounding keeps the dtype of `normal`.
    """
    if form.rounding == "late" and not form.centred:
        return normal * (weight.to(normal.dtype) + form.offset)
    scale = weight + form.offset if form.offset else weight
    return normal.to(kind) * scale if form.rounding == "early" else normal * scale.to(normal.dtype)


def reference_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    form: Form,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of (x, weight, bias, gate) by plain torch operations.

    The gradient of the bias has the dtype of the weight, and is empty for an RMSNorm; the gradient
    of the gate is empty without one.
    """
    kind = torch.promote_types(compute_dtype(x, gate, weight), rstd.dtype)
    value, grad, size = x.to(kind), dy.to(kind), x.shape[-1]
    lever = None if gate is None else ACTIVATIONS[form.act](gate.to(kind))
    by_lever = value
    parts = split_groups(value * lever if lever is not None and form.first else value, form.groups)
    parts = parts if mean is None else parts - mean.unsqueeze(-1)
    normal = (parts * rstd.unsqueeze(-1)).flatten(-2)
    if lever is not None and not form.first:
        by_lever = grad * apply_weight(normal, x.dtype, weight, form).to(kind)
        grad = grad * lever
    factor = normal.to(x.dtype).to(kind) if form.rounding == "early" else normal
    dweight = (grad * factor).reshape(-1, size).sum(0)
    dbias = grad.reshape(-1, size).sum(0) if form.centred else grad.new_empty(0)
    inner = apply_weight(grad, kind, weight, replace(form, rounding="late"))
    inner, normal = split_groups(inner, form.groups), split_groups(normal, form.groups)
    dparts = inner - normal * (inner * normal).mean(-1, keepdim=True)
    dparts = dparts - inner.mean(-1, keepdim=True) if form.centred else dparts
    dx = (rstd.unsqueeze(-1) * dparts).flatten(-2)
    if lever is not None and form.first:
        by_lever, dx = dx * value, dx * lever
    dgate = grad.new_empty(0)
    if gate is not None:
        dgate = BACKWARD[form.act](by_lever, gate.to(kind)).to(gate.dtype)
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype), dgate


def _eps(form: Form, kind: torch.dtype) -> float:
    return torch.finfo(kind).eps if form.eps is None else form.eps


if triton is not None:
    HELD = tl.constexpr(4096)  # for longer rows with a gate the weight is loaded for each tile

    @triton.jit  # type: ignore[untyped-decorator]
    def normal_of(value, inside, size, eps, CENTRED: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return (the rows divided by their deviations, their means, 1 / deviations)."""
        middle = tl.sum(value, 1) / size
        if CENTRED:
            value = tl.where(inside, value - middle[:, None], 0.0)
        inverse = tl.rsqrt(tl.sum(value * value, 1) / size + eps)
        return value * inverse[:, None], middle, inverse

    @triton.jit  # type: ignore[untyped-decorator]
    def through(scaled, normal, inverse, size, CENTRED: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the gradient of the rows, from that of the normalised rows."""
        along = tl.sum(scaled * normal, 1) / size
        if CENTRED:
            shift = tl.sum(scaled, 1) / size  # before any difference, else long rows spill
            result = scaled - normal * along[:, None] - shift[:, None]
        else:
            result = scaled - normal * along[:, None]
        return inverse[:, None] * result

    @triton.jit
    def through_gate(scaled, normal, value, lever, slope, inverse, size):  # type: ignore[no-untyped-def]
        """Return (the gradient of the rows before their gate, the gradient of the gate)."""
        along = tl.sum(scaled * normal, 1) / size
        # the normalised value in another order of products: it need not be kept in registers
        gated = lever * inverse[:, None] * value
        result = inverse[:, None] * (scaled - gated * along[:, None])
        return result * lever, value * result * slope

    @triton.jit  # type: ignore[untyped-decorator]
    def rounded_if(value, like, ROUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the value, rounded to the dtype of the pointer `like` if ROUNDED."""
        if ROUNDED:
            value = rounded(value, like)
        return value

    @triton.jit  # type: ignore[untyped-decorator]
    def scale_of(weight, column, size, offset, ROUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the factors of a row's elements."""
        return rounded_if(load_vector(weight, column, size) + offset, weight, ROUNDED)

    @triton.jit  # type: ignore[untyped-decorator]
    def forward_kernel(  # type: ignore[no-untyped-def]
        x,
        other,
        gate,
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
        gate_stride,
        eps,
        offset,
        ADD: tl.constexpr,
        CENTRED: tl.constexpr,
        BIAS: tl.constexpr,
        EARLY: tl.constexpr,
        GATE: tl.constexpr,
        ACT: tl.constexpr,
        SAME: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Write y, 1/deviation, (CENTRED) the mean and (ADD) the total of ROWS rows.

        With a GATE ("before" or "after"): of one group of these rows.
        """
        number = tl.program_id(0).to(tl.int64)
        row, column, inside = tile_of(number, rows, size, ROWS, BLOCK)
        start, width, index = 0, size, row
        if GATE != "":
            group, groups = tl.program_id(1), tl.num_programs(1)
            start, width, index = group * size, size * groups, row * groups + group
        value = load_rows(x + start, row, column, x_stride, inside)
        if ADD:
            value += load_rows(other, row, column, other_stride, inside)
            value = rounded(value, total)
            store_rows(total, row, column, size, inside, value)
        if GATE != "":
            lever, _ = activation(load_rows(gate + start, row, column, gate_stride, inside), ACT)
        if GATE == "before":
            value = value * lever
        normal, middle, inverse = normal_of(value, inside, size, eps, CENTRED)
        if CENTRED:
            tl.store(mean + index, middle, mask=row < rows)
        tl.store(rstd + index, inverse, mask=row < rows)
        scale = scale_of(weight + start, column, size, offset, EARLY or CENTRED)
        result = rounded_if(normal, x, EARLY) * scale[None, :]
        if BIAS:
            result = rounded_if(result, y, EARLY) + load_vector(bias, column, size)[None, :]
        if GATE == "after":
            result = rounded_if(result, x, EARLY and SAME) * lever
        store_rows(y + start, row, column, width, inside, result)

    @triton.jit  # type: ignore[untyped-decorator]
    def backward_kernel(  # type: ignore[no-untyped-def]
        dy,
        x,
        dtotal,
        gate,
        weight,
        mean,
        rstd,
        dx,
        dgate,
        partial,
        rows,
        size,
        dy_stride,
        x_stride,
        dtotal_stride,
        gate_stride,
        tiles,
        offset,
        ADD: tl.constexpr,
        CENTRED: tl.constexpr,
        EARLY: tl.constexpr,
        GATE: tl.constexpr,
        ACT: tl.constexpr,
        SAME: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Write the gradients of some tiles of rows, and their partial sums for the vectors'
        gradients."""
        program = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        start, width = 0, size
        if GATE != "":
            group, groups = tl.program_id(1), tl.num_programs(1)
            start, width = group * size, size * groups
        ROUNDED: tl.constexpr = EARLY if GATE != "" else CENTRED
        if GATE == "" or BLOCK <= HELD:
            base_scale = scale_of(weight + start, columns, size, offset, ROUNDED)
        by_weight = tl.zeros((BLOCK,), tl.float32)
        by_bias = tl.zeros((BLOCK,), tl.float32)
        for tile in range(tiles):
            number = program + tile * tl.num_programs(0)
            row, column, inside = tile_of(number, rows, size, ROWS, BLOCK)
            slot = row
            if GATE != "":
                slot = row * groups + group
            grad = load_rows(dy + start, row, column, dy_stride, inside)
            if CENTRED:
                middle = tl.load(mean + slot, mask=row < rows, other=0.0)
            value = load_rows(x + start, row, column, x_stride, inside)
            if GATE != "":
                raw = load_rows(gate + start, row, column, gate_stride, inside)
                lever, slope = activation(raw, ACT)
            inverse = tl.load(rstd + slot, mask=row < rows, other=0.0)
            if GATE == "" or BLOCK <= HELD:
                scale = base_scale
            else:
                scale = scale_of(weight + start, columns, size, offset, ROUNDED)
            if CENTRED:
                value -= middle[:, None]
            normal = value * inverse[:, None]
            if GATE == "before":
                normal = normal * lever
            if GATE != "":
                factor = rounded_if(normal, x, EARLY)
                if GATE == "after":
                    weighted = rounded_if(factor * scale[None, :], x, EARLY and SAME)
                    by_gate = weighted * grad * slope
                    store_rows(dgate + start, row, column, width, inside, by_gate)
                    grad = grad * lever
                by_weight += tl.sum(grad * factor, 0)
            scaled = grad * scale[None, :]
            if GATE == "before":
                result, by_gate = through_gate(scaled, normal, value, lever, slope, inverse, size)
                store_rows(dgate + start, row, column, width, inside, by_gate)
            else:
                result = through(scaled, normal, inverse, size, CENTRED)
            if ADD:
                result += load_rows(dtotal, row, column, dtotal_stride, inside)
            store_rows(dx + start, row, column, width, inside, result)
            if GATE == "":  # last, else long rows spill
                by_weight += tl.sum(grad * rounded_if(normal, x, EARLY), 0)
            if CENTRED:
                by_bias += tl.sum(grad, 0)
        SUMS: tl.constexpr = 2 if CENTRED else 1
        slot = partial + SUMS * program * width + start + columns
        tl.store(slot, by_weight, mask=columns < size)
        if CENTRED:
            tl.store(slot + width, by_bias, mask=columns < size)


def _constants(x: Tensor, weight: Tensor, added: Tensor | None, form: Form) -> dict[str, Any]:
    return {
        "groups": form.groups,
        "ADD": added is not None,
        "CENTRED": form.centred,
        "EARLY": form.rounding == "early",
        "GATE": ("before" if form.first else "after") if form.act else "",
        "ACT": form.act,
        "SAME": x.dtype == weight.dtype,
    }


@torch.library.custom_op("schedlang::norm_forward", mutates_args=())
def norm_forward(
    x: Tensor,
    other: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    centred: int,
    eps: float | None,
    offset: float,
    rounding: str,
    act: str,
    first: bool,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (x + other, its norm, mean, 1 / deviation of each group of a row), contiguous.

    Without `other` the first is empty. The last two are in float32 at least.
    """
    form = Form(bool(centred), eps, offset, rounding, act, first, groups)
    assert centred or bias is None, "an RMSNorm with a bias"
    assert bool(act) == (gate is not None), "an activation, and a gate"
    longest = form.longest if other is None else MAX_ROW_WITH_EXTRAS
    if not can_run_kernel(x, other, gate, weight, bias, longest=longest):
        count_kernel_run(False)
        return _by_torch(x, other, gate, weight, bias, form)
    total, y, mean, rstd = launch_forward(
        forward_kernel,
        (x, other, gate),
        (weight, bias),
        (None if other is None else x.dtype, result_dtype(x, weight, bias, form)),
        2,
        _eps(form, compute_dtype(x, weight)),
        offset,
        BIAS=bias is not None,
        **_constants(x, weight, other, form),
    )
    return total, y, mean, rstd


@norm_forward.register_fake
def _(x: Tensor, other: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _by_torch(x, other, *args[:3], Form(bool(args[3]), *args[4:]))


def _by_torch(x: Tensor, other: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x if other is None else x + other
    y, mean, rstd = (t.contiguous() for t in reference_forward(total, *args))
    return x.new_empty(0) if other is None else total.contiguous(), y, mean, rstd


@torch.library.custom_op("schedlang::norm_backward", mutates_args=())
def norm_backward(
    dy: Tensor,
    x: Tensor,
    dtotal: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    centred: int,
    offset: float,
    rounding: str,
    act: str,
    first: bool,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of (the normalised tensor, plus `dtotal`; weight; bias; gate),
    contiguous.

    The gradient of the bias has the dtype of the weight, and is empty for an RMSNorm; the gradient
    of the gate is empty without one. An RMSNorm needs no `mean`.
    """
    form = Form(bool(centred), None, offset, rounding, act, first, groups)
    longest = form.longest if dtotal is None else MAX_ROW_WITH_EXTRAS
    if not can_run_kernel(x, dtotal, dy, gate, weight, rstd, longest=longest):
        count_kernel_run(False)
        return _backward_by_torch(dy, x, dtotal, gate, weight, mean, rstd, form)
    dx, dgate, dweight, *bias_sums = launch_backward(
        backward_kernel,
        (dy, x, dtotal, gate),
        (weight, mean, rstd),
        (x.dtype, None if gate is None else gate.dtype),
        1 + centred,
        offset,
        **_constants(x, weight, dtotal, form),
    )
    dbias = bias_sums[0].to(weight.dtype) if bias_sums else weight.new_empty(0)
    return dx, dweight.to(weight.dtype), dbias, dgate


@norm_backward.register_fake
def _(dy: Tensor, x: Tensor, dtotal: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    form = Form(bool(args[4]), None, *args[5:])
    return _backward_by_torch(dy, x, dtotal, *args[:4], form)


def _backward_by_torch(
    dy: Tensor, x: Tensor, dtotal: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, dweight, dbias, dgate = reference_backward(dy, x, *args)
    dx = dx if dtotal is None else dx + dtotal
    return dx.contiguous(), dweight.contiguous(), dbias.contiguous(), dgate.contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, other, gate, weight, bias, ctx.centred, _, *ctx.form = inputs
    ctx.kinds = [None if t is None else t.dtype for t in (x, other, bias)]
    total, _, mean, rstd = output
    kept = x if other is None else total
    ctx.save_for_backward(kept, gate, weight, mean if ctx.centred else None, rstd)


def _differentiate(ctx: Any, dtotal: Tensor, dy: Tensor, *_: Tensor) -> tuple[Any, ...]:
    x, *saved = ctx.saved_tensors
    kind, other, bias = ctx.kinds
    dtotal_ = None if other is None else dtotal
    dx, dweight, dbias, dgate = norm_backward(dy, x, dtotal_, *saved, ctx.centred, *ctx.form)
    by_other = None if other is None else dx.to(other)
    by_bias = None if bias is None else dbias.to(bias)
    by_gate = None if saved[0] is None else dgate
    return dx.to(kind), by_other, by_gate, dweight, by_bias, *[None] * 7


norm_forward.register_autograd(_differentiate, setup_context=_save)


@dataclass(frozen=True)
class Case(check.Case):
    """A test case of a norm: of a tensor of this shape, of a sum of two (`add`), or with a gate.

    The input is `scale` times standard normal; small scales expose eps. `other` is the dtype of the
    second tensor of a sum, or of gate and weight, if it differs.
    """

    kernel: ClassVar[str] = "norm"
    form: Form = Form()
    bias: bool = False
    add: bool = False
    scale: float = 1.0
    other: str = ""

    @property
    def name(self) -> str:
        """The name of the kernel in `replace_kernel`, or "gated_norm"."""
        kind = "layer_norm" if self.form.centred else "rms_norm"
        return "add_norm" if self.add else "gated_norm" if self.form.act else kind

    def draw(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        """Return the differentiated tensors, in float32."""
        shift = 0.3 if self.add or self.form.centred else 0.0
        names = ("left", "right") if self.add else ("input",)
        tensors = {name: (normal(*self.shape) + shift) * self.scale for name in names}
        tensors |= {"gate": normal(*self.shape)} if self.form.act else {}
        tensors["weight"] = normal(self.shape[-1]) * 0.2 + 1.0
        tensors |= {"bias": normal(self.shape[-1])} if self.bias else {}
        return {name: t.float() for name, t in self._cast(tensors).items()}

    def _cast(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors, with those of the other dtype cast."""
        others = ("gate", "weight") if self.form.act else ("right",)
        kinds = {name: getattr(torch, self.other) for name in others if self.other}
        return {name: t.to(kinds.get(name, t.dtype)) for name, t in tensors.items()}

    def run(self, tensors: dict[str, Tensor], kernel: bool) -> Tensor:
        """Run the kernel, or its reference; for a sum, the total is stacked on its norm."""
        tensors = tensors if tensors["weight"].dtype == torch.float64 else self._cast(tensors)
        vectors = tensors["weight"], tensors.get("bias"), self.form
        if self.add:
            call = add_norm if kernel else add_reference
            return torch.stack(call(tensors["left"], tensors["right"], *vectors))
        return (norm if kernel else reference)(tensors["input"], *vectors, tensors.get("gate"))
