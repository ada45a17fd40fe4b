"""Whether and where Triton kernels run here, counts of runs, and launches of kernels on rows.

A kernel runs on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1 was set before triton was
imported; otherwise, for float64, and for rows longer than `MAX_ROW`, the torch reference runs in
the same operator. `backend_runs` returns which of them ran.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedlang.kernels import interpreter

try:
    import triton
    import triton.language as tl
except ImportError:  # triton is published for Linux on x86-64 only
    triton = tl = None

__all__ = [
    "INTERPRETED",
    "DEVICE_TYPE",
    "MAX_ROW",
    "autocast_dtype",
    "capability",
    "count_kernel_run",
    "environment",
    "has_gpu",
    "as_rows",
    "count_run",
    "on_gpu",
    "program_count",
    "backend_runs",
    "can_run_kernel",
    "tile",
    "tl",
    "triton",
    "compute_dtype",
]

MAX_ROW = 16384  # elements of a row that one program can hold in registers; twice as many spill
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    interpreter.patch_interpreter()

DEVICE_TYPE = "cuda"  # the type of device that the kernels are written and tuned for

_runs: Counter[str] = Counter()


def environment(interpreted: bool) -> dict[str, str]:
    """Return the environment for another process that imports this package.

    Whether triton interprets is fixed at its import, for the whole process.
    """
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, kept.get("PYTHONPATH", "")]))
    # required for deterministic matrix products on a GPU
    defaults = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    mode = {"TRITON_INTERPRET": "1"} if interpreted else {}
    return {**defaults, **kept, "PYTHONPATH": path, **mode}


def on_gpu(x: Tensor) -> bool:
    """Return whether kernels can be compiled for the device of a tensor: an NVIDIA GPU."""
    return x.is_cuda


def has_gpu() -> bool:
    """Return whether this machine has a device that kernels can be compiled for."""
    return torch.cuda.is_available()


def capability(x: Tensor) -> tuple[int, int]:
    """Return the compute capability of a tensor's GPU."""
    return torch.cuda.get_device_capability(x.device)


def backend_runs() -> dict[str, int]:
    """Return the number of runs of each backend: "triton", "interpreter", "torch", "reference".

    Forward and backward count one each.
    """
    return dict(_runs)


def count_kernel_run(kernel: bool) -> None:
    """Count a run of a kernel, or of its reference."""
    count_run(("interpreter" if INTERPRETED else "triton") if kernel else "reference")


def count_run(backend: str) -> None:
    """Count a run of a backend; "torch" if a kernel is torch's own."""
    _runs[backend] += 1


def can_run_kernel(x: Tensor, *others: Tensor | None, longest: int | None = MAX_ROW) -> bool:
    """Return whether a kernel can run for these tensors here; rows are those of `x`."""
    tensors = (x, *(t for t in others if t is not None))
    return (
        triton is not None
        and x.numel() > 0
        and (longest is None or x.shape[-1] <= longest)
        and all(t.dtype in (torch.float32, torch.bfloat16, torch.float16) for t in tensors)
        and (on_gpu(x) or (INTERPRETED and x.is_cpu))
    )


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast would give a product of `x` here; None where it casts nothing.

    It casts no float64.  torch raises for types of device without autocast, meta among them.
    """
    kind = x.device.type
    if x.dtype == torch.float64 or not _has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


# as torch.compiler.assume_constant_result does; torch 2.11's compiler cannot trace the call
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def tile(size: int) -> tuple[int, int, int]:
    """Return (rows of a tile, padded row, warps) for rows of `size` elements."""
    block = 1 << max(size - 1, 0).bit_length()
    rows = max(1, 1024 // block)
    return rows, block, min(32, max(4, rows * block // 512))


def program_count(x: Tensor) -> int:
    """Return the number of programs of a backward kernel: enough to fill the device, few partial
    sums."""
    if not on_gpu(x):
        return 4
    return 2 * torch.cuda.get_device_properties(x.device).multi_processor_count


def as_rows(x: Tensor) -> Tensor:
    """View a tensor as rows with adjacent elements; copy it only if necessary."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return the dtype in which a kernel computes with these: float32, or float64."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    return dtype


# -- launches of kernels over full rows ------------------------------------------------------------
# Forward, a program computes one tile of rows. Backward, it computes several tiles, with a constant
# stride, and has its own sums over rows, which are added afterwards: one launch, and no two
# programs write to the same memory.


def launch_kernel(
    kernel: Any, grid: tuple[int, ...], *args: Any, warps: int, **constants: Any
) -> None:
    """Launch a kernel; fusion into multiply-adds is set explicitly, not left to triton's
    default."""
    kernel[grid](*args, num_warps=warps, enable_fp_fusion=True, **constants)


def launch_forward(
    kernel: Any,
    inputs: tuple[Tensor | None, ...],
    extras: tuple[Tensor | None, ...],
    result_dtypes: tuple[torch.dtype | None, ...],
    numbers: int,
    *scalars: float,
    groups: int = 1,
    **constants: Any,
) -> tuple[Tensor, ...]:
    """Launch a kernel on rows; return results of the inputs' shape and `numbers` float32 per row.

    made    dtypes of the results; None: the result is empty
    groups  each row is split into groups of one size: the kernel gets the size of a group, the
            second program id is the group, and `numbers` are per group
    The kernel's arguments are: inputs, given, results, numbers, number of rows, their size, strides
    of the inputs' rows, scalars. For None the kernel gets the first input, which it must not use.
    """
    x, rows = _rows(inputs)
    length, size = rows[0].shape[0], rows[0].shape[1] // groups
    height, block, warps = tile(size)
    results = _empty_results(x, result_dtypes)
    lines = (*x.shape[:-1], groups)
    results += [torch.empty(lines, dtype=torch.float32, device=x.device) for _ in range(numbers)]
    launch_kernel(
        kernel,
        (triton.cdiv(length, height), groups),
        *rows,
        *_replace_missing(extras, rows[0]),
        *(t if t.numel() else rows[0] for t in results),
        length,
        size,
        *(matrix.stride(0) for matrix in rows),
        *scalars,
        ROWS=height,
        BLOCK=block,
        warps=warps,
        **constants,
    )
    count_kernel_run(True)
    return tuple(results)


def launch_backward(
    kernel: Any,
    inputs: tuple[Tensor | None, ...],
    extras: tuple[Tensor | None, ...],
    grad_dtypes: tuple[torch.dtype | None, ...],
    sums: int,
    *scalars: float,
    groups: int = 1,
    **constants: Any,
) -> tuple[Tensor, ...]:
    """Launch a kernel on rows; return gradients of the inputs' shape and `sums` float32 sums over
    rows.

    The kernel's arguments are: inputs, given, the gradients, the sums of each program, number of
    rows, their size, strides of the inputs' rows, tiles per program, scalars. `grad_dtypes`,
    `groups` and None are as for `launch_forward`.
    """
    x, rows = _rows(inputs)
    length, width = rows[0].shape
    size = width // groups
    height, block, warps = tile(size)
    tiles = triton.cdiv(length, height)
    parts = min(tiles, max(1, program_count(x) // groups))
    grads = _empty_results(x, grad_dtypes)
    partial = torch.empty((parts, sums, width), dtype=torch.float32, device=x.device)
    launch_kernel(
        kernel,
        (parts, groups),
        *rows,
        *_replace_missing(extras, rows[0]),
        *(t if t.numel() else rows[0] for t in grads),
        partial,
        length,
        size,
        *(matrix.stride(0) for matrix in rows),
        triton.cdiv(tiles, parts),
        *scalars,
        ROWS=height,
        BLOCK=block,
        warps=warps,
        **constants,
    )
    count_kernel_run(True)
    return *grads, *(partial[:, i].sum(0) for i in range(sums))  # separate tensors, no views of one


def _rows(inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, list[Tensor]]:
    """Return (the first input, all inputs as rows)."""
    first = inputs[0]
    assert first is not None
    lines = as_rows(first)
    return first, [lines, *(lines if x is None else as_rows(x) for x in inputs[1:])]


def _empty_results(x: Tensor, kinds: tuple[torch.dtype | None, ...]) -> list[Tensor]:
    shapes = [(0,) if kind is None else x.shape for kind in kinds]
    return [torch.empty(s, dtype=k or x.dtype, device=x.device) for s, k in zip(shapes, kinds)]


def _replace_missing(tensors: tuple[Tensor | None, ...], instead: Tensor) -> list[Tensor]:
    return [instead if t is None else t.contiguous() for t in tensors]


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def tile_of(number, rows, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return (rows, columns, mask) of one tile of ROWS rows."""
        row = number * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, BLOCK)
        return row, column, (row[:, None] < rows) & (column[None, :] < size)

    @triton.jit
    def load_rows(x, row, column, stride, inside):  # type: ignore[no-untyped-def]
        """Load a tile of a matrix in float32, zero outside of the mask."""
        pointer = x + row[:, None] * stride + column[None, :]
        return tl.load(pointer, mask=inside, other=0.0).to(tl.float32)

    @triton.jit
    def store_rows(y, row, column, stride, inside, value):  # type: ignore[no-untyped-def]
        """Write a tile of a matrix, rounded to its dtype."""
        pointer = y + row[:, None] * stride + column[None, :]
        tl.store(pointer, value.to(y.dtype.element_ty), mask=inside)

    @triton.jit
    def load_vector(vector, column, size):  # type: ignore[no-untyped-def]
        """Load a vector that all rows share, in float32."""
        return tl.load(vector + column, mask=column < size, other=0.0).to(tl.float32)

    @triton.jit
    def rounded(value, like):  # type: ignore[no-untyped-def]
        """Return the value rounded to the dtype of the pointer `like`, in float32 again."""
        return value.to(like.dtype.element_ty).to(tl.float32)
