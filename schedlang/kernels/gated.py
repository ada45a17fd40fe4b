"""The middle of a gated MLP, act(gate) * up: one Triton kernel forward and one backward.

Shazeer, "GLU variants improve Transformer" (2020): SwiGLU with SiLU, GeGLU with GELU, by its error
function or by tanh; "relu2" is the square of ReLU (So et al., "Primer", 2021). Only gate and up are
saved for backward, which recomputes the activation. Both may be halves of one tensor, as a packed
projection returns them: its gradient is then one tensor too. The activation is rounded to the dtype
of its input, and so is the product, as in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from schedlang.kernels import check
from schedlang.kernels.kernel_device import (
    as_rows,
    can_run_kernel,
    compute_dtype,
    count_kernel_run,
    launch_kernel,
    tl,
    triton,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}
_aten = torch.ops.aten
BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": _aten.silu_backward.default,
    "gelu": _aten.gelu_backward.default,
    "gelu_tanh": lambda grad, x: _aten.gelu_backward.default(grad, x, approximate="tanh"),
    "relu": lambda grad, x: grad * (x > 0),
    "relu2": lambda grad, x: grad * (2 * F.relu(x)),
    "sigmoid": lambda grad, x: _aten.sigmoid_backward.default(grad, torch.sigmoid(x)),
}
_BLOCK = 1024


def gated_product(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """Return act(gate) * up, of two tensors of one shape and dtype; `act` is one of ACTIVATIONS.

    Differentiable once, in both.
    """
    y: Tensor = gated_forward(gate, up, act, 1)
    return y


def packed_gated_product(packed: Tensor, act: str, gate_first: bool = True) -> Tensor:
    """Return act(gate) * up for a tensor with gate and up (or up first) as halves of its last
    dim."""
    y: Tensor = gated_forward(packed, None, act, int(gate_first))
    return y


def reference(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """Compute `gated_product` by plain torch operations."""
    return ACTIVATIONS[act](gate) * up


def _reference_backward(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    kind = compute_dtype(gate, up)
    value, grad = gate.to(kind), dy.to(kind)
    by_up = grad * ACTIVATIONS[act](value).to(gate.dtype).to(kind)
    return BACKWARD[act](grad * up.to(kind), value).to(gate.dtype), by_up.to(up.dtype)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def activation(value, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the activation and its derivative."""
        if ACT == "silu":
            gate = 1.0 / (1.0 + tl.exp(-value))
            result = value * gate
            slope = gate * (1.0 + value * (1.0 - gate))
        elif ACT == "sigmoid":
            result = 1.0 / (1.0 + tl.exp(-value))
            slope = result * (1.0 - result)
        elif ACT == "relu":
            result = tl.maximum(value, 0.0)
            slope = tl.where(value > 0.0, 1.0, 0.0)
        elif ACT == "relu2":
            slope = 2.0 * tl.maximum(value, 0.0)
            result = 0.25 * slope * slope
        elif ACT == "gelu":
            normal = 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
            result = value * normal
            slope = normal + value * 0.3989422804014327 * tl.exp(-0.5 * value * value)
        else:
            inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
            curve = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * inner))
            result = 0.5 * value * (1.0 + curve)
            inner = 0.7978845608028654 * (1.0 + 0.134145 * value * value)
            slope = 0.5 * (1.0 + curve) + 0.5 * value * (1.0 - curve * curve) * inner
        return result, slope

    @triton.jit
    def _load_block(gate, up, size, gate_stride, up_stride, ACT, BLOCK):  # type: ignore[no-untyped-def]
        """Load a block of one row: (row, columns, mask, up, act(gate) rounded, its derivative)."""
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < size
        left = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        value, slope = activation(left, ACT)
        return row, column, inside, right, value.to(gate.dtype.element_ty).to(tl.float32), slope

    @triton.jit  # type: ignore[untyped-decorator]
    def forward_kernel(  # type: ignore[no-untyped-def]
        gate, up, y, size, gate_stride, up_stride, ACT: tl.constexpr, BLOCK: tl.constexpr
    ):
        """Write a block of one row of the product."""
        row, column, inside, right, value, _ = _load_block(
            gate, up, size, gate_stride, up_stride, ACT, BLOCK
        )
        result = (value * right).to(y.dtype.element_ty)
        tl.store(y + row * size + column, result, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def backward_kernel(  # type: ignore[no-untyped-def]
        dy,
        gate,
        up,
        dgate,
        dup,
        size,
        dy_stride,
        gate_stride,
        up_stride,
        dgate_stride,
        dup_stride,
        ACT: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Write a block of one row of both gradients."""
        row, column, inside, right, value, slope = _load_block(
            gate, up, size, gate_stride, up_stride, ACT, BLOCK
        )
        grad = tl.load(dy + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        by_gate = (grad * right * slope).to(dgate.dtype.element_ty)
        tl.store(dgate + row * dgate_stride + column, by_gate, mask=inside)
        by_up = (grad * value).to(dup.dtype.element_ty)
        tl.store(dup + row * dup_stride + column, by_up, mask=inside)


def tile(size: int) -> tuple[int, int]:
    """Return (elements of a block, warps) for rows of `size` elements."""
    block = min(_BLOCK, 1 << max(size - 1, 0).bit_length())
    return block, max(1, min(4, block // 256))


def _launch(kernel: Any, act: str, tensors: list[Tensor], strides: list[int]) -> None:
    """Launch a kernel once for all rows; `tensors` are matrices with rows of one size."""
    rows, size = tensors[0].shape
    block, warps = tile(size)
    grid = (rows, triton.cdiv(size, block))
    launch_kernel(kernel, grid, *tensors, size, *strides, ACT=act, BLOCK=block, warps=warps)
    count_kernel_run(True)


def _flat(tensor: Tensor) -> Tensor:
    """View a tensor as rows without a copy, in order to write it."""
    size = tensor.shape[-1]
    return tensor.view(-1, size) if tensor.is_contiguous() else tensor.flatten(0, -2)


def _pair(first: Tensor, second: Tensor | None, gate_first: int) -> tuple[Tensor, Tensor]:
    """Return (gate, up), from two tensors or from the halves of one."""
    if second is not None:
        return first, second
    left, right = first.chunk(2, -1)
    return (left, right) if gate_first else (right, left)


@torch.library.custom_op("schedlang::gated_forward", mutates_args=())
def gated_forward(first: Tensor, second: Tensor | None, act: str, gate_first: int) -> Tensor:
    """Return act(gate) * up, contiguous; without `second` both are halves of `first`'s last dim."""
    gate, up = _pair(first, second, gate_first)
    if not can_run_kernel(gate, up, longest=None):
        count_kernel_run(False)
        return reference(gate, up, act).contiguous()
    left, right = as_rows(gate), as_rows(up)
    y = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)
    _launch(forward_kernel, act, [left, right, y], [left.stride(0), right.stride(0)])
    return y


@torch.library.custom_op("schedlang::gated_backward", mutates_args=())
def gated_backward(
    dy: Tensor, first: Tensor, second: Tensor | None, act: str, gate_first: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `first` and `second`, contiguous, in their dtypes.

    The second is empty if there is no `second`.
    """
    dfirst, dsecond = _gradients(first, second)
    gate, up = _pair(first, second, gate_first)
    dgate, dup = _pair(dfirst, None if second is None else dsecond, gate_first)
    if not can_run_kernel(gate, up, dy, longest=None):
        count_kernel_run(False)
        for grad, target in zip(_reference_backward(dy, gate, up, act), (dgate, dup)):
            target.copy_(grad)
        return dfirst, dsecond
    tensors = [as_rows(dy), as_rows(gate), as_rows(up), *(_flat(t) for t in (dgate, dup))]
    _launch(backward_kernel, act, tensors, [t.stride(0) for t in tensors])
    return dfirst, dsecond


def _gradients(first: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor]:
    """Allocate both gradients."""
    dsecond = first.new_empty(0) if second is None else second.new_empty(second.shape)
    return first.new_empty(first.shape), dsecond


@gated_forward.register_fake
def _(first: Tensor, second: Tensor | None, act: str, gate_first: int) -> Tensor:
    gate, up = _pair(first, second, gate_first)
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


@gated_backward.register_fake
def _(dy: Tensor, first: Tensor, second: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return _gradients(first, second)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.act, ctx.gate_first = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    first, second = ctx.saved_tensors
    dfirst, dsecond = gated_backward(dy, first, second, ctx.act, ctx.gate_first)
    return dfirst, None if second is None else dsecond, None, None


gated_forward.register_autograd(_differentiate, setup_context=_save)


@dataclass(frozen=True)
class Case(check.Case):
    """A test case of a gated product: `shape` is that of gate and of up."""

    kernel: ClassVar[str] = "gated"
    act: str = "silu"
    pack: str = ""  # "gate first" or "up first": halves of one tensor
    scale: float = 1.0

    def draw(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        """Return the differentiated tensors, in float32."""
        if self.pack:
            return {"input": normal(*self.shape[:-1], 2 * self.shape[-1]) * self.scale}
        return {"gate": normal(*self.shape) * self.scale, "up": normal(*self.shape)}

    def run(self, tensors: dict[str, Tensor], kernel: bool) -> Tensor:
        """Run the kernel, or its reference."""
        if self.pack and kernel:
            return packed_gated_product(tensors["input"], self.act, self.pack == "gate first")
        first, second = tensors["input" if self.pack else "gate"], tensors.get("up")
        pair = _pair(first, second, self.pack == "gate first")
        return (gated_product if kernel else reference)(*pair, self.act)
