"""Make bfloat16 correct in Triton's interpreter: compute in float32 and round to nearest even.

The interpreter stores a bfloat16 as a uint16 and computes on the bit patterns: sums and products
are silently wrong, and a cast from float32 truncates. Triton documents that bfloat16 is not
supported there. `patch_interpreter` wraps the few methods through which every such value passes,
and makes loop counts of triton 3.6 work with NumPy 2.4. Only this file patches
`triton.runtime.interpreter`; it is written for triton 3.6 and 3.7, and has been run with both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def bfloat16_to_float32(bits: Array) -> Array:
    """Return the float32 values of bfloat16 bit patterns (uint16); exact."""
    values: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return values


def float32_to_bfloat16(values: Array) -> Array:
    """Return the bfloat16 bit patterns (uint16) nearest to float32 values, ties to even, NaN
    kept."""
    array = np.asarray(values, np.float32)  # ascontiguousarray would turn a scalar into a vector
    bits = array.copy().view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)


def patch_interpreter() -> None:
    """Patch the interpreter of this process, once; a second call does nothing."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "rounds_bfloat16", False):
        return
    builder.rounds_bfloat16 = True
    for name, operands in (
        ("binary_op", 2),
        ("unary_op", 1),
        ("create_fabs", 1),
        ("create_rsqrt", 1),
        ("create_erf", 1),
        ("create_fma", 3),
    ):
        setattr(builder, name, _widened(getattr(builder, name), operands))
    builder.ternary_op = _widened_select(builder.ternary_op)
    builder.create_dot = _widened_product(builder.create_dot)
    builder.cast_impl = _rounding_cast(builder.cast_impl)
    builder.create_fp_to_fp = _rounding_convert(builder.create_fp_to_fp, builder.cast_impl)
    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = _bfloat16_constant
    interpreter.ReduceOps.sum = _widened_sum(interpreter.ReduceOps.sum)
    interpreter.ReduceOps.min_max = _widened_min_max(interpreter.ReduceOps.min_max)
    interpreter._patch_lang_tensor = _indexed(interpreter._patch_lang_tensor)


def _indexed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let scalars, which the interpreter stores as arrays of one number, be the end of a `range`.

    NumPy 2.4 converts only 0-dim arrays to integers; triton 3.6 does not handle this, 3.7 squeezes.
    """

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    return patch


def _handle(data: Array, dtype: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(data, dtype)


def _is_bfloat16(handle: Any) -> bool:
    import triton.language as tl

    scalar = getattr(getattr(handle, "dtype", None), "scalar", None)
    return bool(scalar == tl.bfloat16)


def _to_float32(handle: Any) -> Any:
    import triton.language as tl

    return _handle(bfloat16_to_float32(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _to_bfloat16(handle: Any) -> Any:
    """Convert back to bfloat16; data that is no float (the result of a comparison) stays."""
    import triton.language as tl

    if handle.data.dtype != np.float32:
        return _handle(handle.data, tl.bfloat16)
    return _handle(float32_to_bfloat16(handle.data), tl.bfloat16)


def _bfloat16_constant(self: Any, value: float) -> Any:
    import triton.language as tl

    return _handle(float32_to_bfloat16(np.array([value], np.float32)), tl.bfloat16)


def _widened(original: Callable[..., Any], operands: int) -> Callable[..., Any]:
    """Wrap an operation whose first `operands` arguments are values."""

    def operate(self: Any, *args: Any) -> Any:
        if not any(_is_bfloat16(arg) for arg in args[:operands]):
            return original(self, *args)
        return _to_bfloat16(
            original(self, *(_to_float32(arg) for arg in args[:operands]), *args[operands:])
        )

    return operate


def _widened_select(original: Callable[..., Any]) -> Callable[..., Any]:
    def select(self: Any, left: Any, right: Any, other: Any, operation: Any) -> Any:
        # `where` moves bit patterns, which is correct; `clip` compares values
        if operation is np.where or not _is_bfloat16(other):
            return original(self, left, right, other, operation)
        return _to_bfloat16(
            original(self, _to_float32(left), _to_float32(right), _to_float32(other), operation)
        )

    return select


def _widened_product(original: Callable[..., Any]) -> Callable[..., Any]:
    def dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return original(self, _to_float32(left), _to_float32(right), *rest)

    return dot


def _rounding_cast(original: Callable[..., Any]) -> Callable[..., Any]:
    import triton.language as tl

    def cast(self: Any, source: Any, target: Any) -> Any:
        source_type, target_type = source.dtype.scalar, target.scalar
        if source_type == target_type:
            return original(self, source, target)
        source = _to_float32(source)
        if target_type == tl.bfloat16:
            return _handle(float32_to_bfloat16(source.data.astype(np.float32)), tl.bfloat16)
        return source if source.dtype.scalar == target_type else original(self, source, target)

    return cast


def _rounding_convert(original: Callable[..., Any], cast: Callable[..., Any]) -> Callable[..., Any]:
    import triton.language as tl

    def convert(self: Any, source: Any, target: Any, mode: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return cast(self, source, target)
        return original(self, source, target, mode)

    return convert


def _widened_sum(original: Callable[..., Any]) -> Callable[..., Any]:
    import triton.language as tl

    def total(self: Any, value: Any) -> Any:
        if value.dtype.scalar != tl.bfloat16:
            return original(self, value)
        widened = bfloat16_to_float32(value.handle.data)
        return self.to_tensor(
            float32_to_bfloat16(np.sum(widened, self.axis, keepdims=self.keep_dims)), tl.bfloat16
        )

    return total


def _widened_min_max(original: Callable[..., Any]) -> Callable[..., Any]:
    import triton.language as tl

    def extreme(self: Any, value: Any, *rest: Any, **kwargs: Any) -> Any:
        first = value[0] if isinstance(value, tuple) else value
        if first.dtype.scalar != tl.bfloat16:
            return original(self, value, *rest, **kwargs)
        widened = self.to_tensor(bfloat16_to_float32(first.handle.data), tl.float32)
        results = original(self, widened, *rest, **kwargs)
        pair = results if isinstance(results, tuple) else (results,)
        narrowed = tuple(
            self.to_tensor(float32_to_bfloat16(result.handle.data), tl.bfloat16)
            if result.dtype.scalar == tl.float32
            else result
            for result in pair
        )
        return narrowed if isinstance(results, tuple) else narrowed[0]

    return extreme
