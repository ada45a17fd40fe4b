"""Whether and where Triton kernels run here, a count of what ran, and the frame of kernels on rows.

A kernel runs on a GPU, or in Triton's interpreter where TRITON_INTERPRET=1 was set before triton
was imported; otherwise, for float64, and for rows longer than `LONGEST`, the torch reference runs
inside the same operator.  `runs` says which of them did.
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
    "KIND",
    "LONGEST",
    "autocast_to",
    "capability",
    "count",
    "environment",
    "gpu_here",
    "matrix",
    "note",
    "on_gpu",
    "programs",
    "runs",
    "runs_kernel",
    "tile",
    "tl",
    "triton",
    "wide",
]

LONGEST = 16384  # elements of a row that one program holds in registers; twice as many spill
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    interpreter.install()

KIND = "cuda"  # of the devices that kernels are written, tuned and asked for here

_runs: Counter[str] = Counter()


def environment(interpreted: bool) -> dict[str, str]:
    """The environment of a process beside this one, which imports this package.

    Whether triton interprets is settled when it is imported, for a whole process.
    """
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, kept.get("PYTHONPATH", "")]))
    # products have no deterministic form on a GPU without it
    more = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    mode = {"TRITON_INTERPRET": "1"} if interpreted else {}
    return {**more, **kept, "PYTHONPATH": path, **mode}


def on_gpu(x: Tensor) -> bool:
    """Tell whether kernels are compiled for the device of a tensor: an NVIDIA GPU."""
    return x.is_cuda


def gpu_here() -> bool:
    """Tell whether this machine has a device that kernels are compiled for."""
    return torch.cuda.is_available()


def capability(x: Tensor) -> tuple[int, int]:
    """Return the compute capability of a tensor's GPU."""
    return torch.cuda.get_device_capability(x.device)


def runs() -> dict[str, int]:
    """Count the runs of each backend here: "triton", "interpreter", "torch", "reference".

    Forward and backward count one each.
    """
    return dict(_runs)


def count(kernel: bool) -> None:
    """Note that a kernel ran, or that its reference did."""
    note(("interpreter" if INTERPRETED else "triton") if kernel else "reference")


def note(backend: str) -> None:
    """Note that a backend ran; "torch" where a kernel is torch's own."""
    _runs[backend] += 1


def runs_kernel(x: Tensor, *others: Tensor | None, longest: int | None = LONGEST) -> bool:
    """Tell whether a kernel can take these tensors here; rows are those of `x`."""
    given = (x, *(t for t in others if t is not None))
    return (
        triton is not None
        and x.numel() > 0
        and (longest is None or x.shape[-1] <= longest)
        and all(t.dtype in (torch.float32, torch.bfloat16, torch.float16) for t in given)
        and (on_gpu(x) or (INTERPRETED and x.is_cpu))
    )


def autocast_to(x: Tensor) -> torch.dtype | None:
    """The type that autocast would give a product of `x` here; None where there is none.

    Kinds of device that torch has no autocast for, meta among them, raise if they are asked.
    """
    kind = x.device.type
    if not _has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


# torch.compiler.assume_constant_result, for torch 2.11, whose compiler cannot follow the question
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def tile(size: int) -> tuple[int, int, int]:
    """(rows of a tile, padded row, warps) for rows of `size` elements."""
    block = 1 << max(size - 1, 0).bit_length()
    rows = max(1, 1024 // block)
    return rows, block, min(32, max(4, rows * block // 512))


def programs(x: Tensor) -> int:
    """Programs of a backward kernel: enough to fill the device, few enough partial sums."""
    if not on_gpu(x):
        return 4
    return 2 * torch.cuda.get_device_properties(x.device).multi_processor_count


def matrix(x: Tensor) -> Tensor:
    """View a tensor as rows whose elements lie side by side; copy it only where they do not."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def wide(*tensors: Tensor | None) -> torch.dtype:
    """The type in which a kernel computes with these: float32, or float64."""
    found = torch.float32
    for tensor in tensors:
        found = found if tensor is None else torch.promote_types(found, tensor.dtype)
    return found


# -- the frame of kernels over whole rows ----------------------------------------------------------
# Forward, a program takes one tile of rows.  Backward, it takes every so many tiles and keeps its
# own sums over rows, which are added up afterwards: one launch, and no two programs write to one
# place.


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, warps: int, **constants: Any) -> None:
    """Run a kernel once; what may be fused into a multiply-add is said, not left to a version."""
    kernel[grid](*given, num_warps=warps, enable_fp_fusion=True, **constants)


def forward(
    kernel: Any,
    inputs: tuple[Tensor | None, ...],
    given: tuple[Tensor | None, ...],
    made: tuple[torch.dtype | None, ...],
    numbers: int,
    *scalars: float,
    groups: int = 1,
    **constants: Any,
) -> tuple[Tensor, ...]:
    """Results of the inputs' shape, of the types `made`, and `numbers` float32 for each row.

    The kernel takes inputs, given, results, numbers, how many rows, their size, the inputs' strides
    and the scalars.  Rows fall into `groups` of one size, which is what the kernel is told for
    theirs: a program's second number is its group, and `numbers` are those of each group.  For None
    the kernel gets the first input, which it must not use so; such results are empty.
    """
    x, rows = _rows(inputs)
    length, size = rows[0].shape[0], rows[0].shape[1] // groups
    height, block, warps = tile(size)
    results = _made(x, made)
    lines = (*x.shape[:-1], groups)
    results += [torch.empty(lines, dtype=torch.float32, device=x.device) for _ in range(numbers)]
    launch(
        kernel,
        (triton.cdiv(length, height), groups),
        *rows,
        *_present(given, rows[0]),
        *(t if t.numel() else rows[0] for t in results),
        length,
        size,
        *(each.stride(0) for each in rows),
        *scalars,
        ROWS=height,
        BLOCK=block,
        warps=warps,
        **constants,
    )
    count(True)
    return tuple(results)


def backward(
    kernel: Any,
    inputs: tuple[Tensor | None, ...],
    given: tuple[Tensor | None, ...],
    made: tuple[torch.dtype | None, ...],
    sums: int,
    *scalars: float,
    groups: int = 1,
    **constants: Any,
) -> tuple[Tensor, ...]:
    """Gradients of the inputs' shape in the types `made`, and so many float32 sums over rows.

    The kernel takes inputs, given, the gradients, the sums of each program, how many rows, their
    size, the inputs' strides, how many tiles a program takes, and the scalars; `groups` and None as
    above.
    """
    x, rows = _rows(inputs)
    length, width = rows[0].shape
    size = width // groups
    height, block, warps = tile(size)
    tiles = triton.cdiv(length, height)
    parts = min(tiles, max(1, programs(x) // groups))
    grads = _made(x, made)
    partial = torch.empty((parts, sums, width), dtype=torch.float32, device=x.device)
    launch(
        kernel,
        (parts, groups),
        *rows,
        *_present(given, rows[0]),
        *(t if t.numel() else rows[0] for t in grads),
        partial,
        length,
        size,
        *(each.stride(0) for each in rows),
        triton.cdiv(tiles, parts),
        *scalars,
        ROWS=height,
        BLOCK=block,
        warps=warps,
        **constants,
    )
    count(True)
    return *grads, *(partial[:, i].sum(0) for i in range(sums))  # each its own: no views of one


def _rows(inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, list[Tensor]]:
    """(the first input, all of them as rows)."""
    first = inputs[0]
    assert first is not None
    lines = matrix(first)
    return first, [lines, *(lines if x is None else matrix(x) for x in inputs[1:])]


def _made(x: Tensor, kinds: tuple[torch.dtype | None, ...]) -> list[Tensor]:
    shapes = [(0,) if kind is None else x.shape for kind in kinds]
    return [torch.empty(s, dtype=k or x.dtype, device=x.device) for s, k in zip(shapes, kinds)]


def _present(given: tuple[Tensor | None, ...], instead: Tensor) -> list[Tensor]:
    return [instead if t is None else t.contiguous() for t in given]


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def tile_of(number, rows, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """(rows, columns, which elements are there) of one tile of ROWS rows."""
        row = number * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, BLOCK)
        return row, column, (row[:, None] < rows) & (column[None, :] < size)

    @triton.jit
    def load_rows(x, row, column, stride, inside):  # type: ignore[no-untyped-def]
        """A tile of a matrix in float32, zero where nothing is."""
        place = x + row[:, None] * stride + column[None, :]
        return tl.load(place, mask=inside, other=0.0).to(tl.float32)

    @triton.jit
    def store_rows(y, row, column, stride, inside, value):  # type: ignore[no-untyped-def]
        """Write a tile of a matrix, rounded to its type."""
        place = y + row[:, None] * stride + column[None, :]
        tl.store(place, value.to(y.dtype.element_ty), mask=inside)

    @triton.jit
    def load_vector(vector, column, size):  # type: ignore[no-untyped-def]
        """Load a vector that all rows share, in float32."""
        return tl.load(vector + column, mask=column < size, other=0.0).to(tl.float32)

    @triton.jit
    def rounded(value, like):  # type: ignore[no-untyped-def]
        """Rounded to the type of what `like` points to, in float32 again."""
        return value.to(like.dtype.element_ty).to(tl.float32)
