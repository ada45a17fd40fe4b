"""The frame of kernels over whole rows: loads and stores of a tile, and the two kinds of launch.

Forward, a program takes one tile of rows.  Backward, it takes every so many tiles and keeps its own
sums over rows, which are added up afterwards: one launch, and no two programs write to one place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from schedlang.kernels.device import count, matrix, programs, tile, tl, triton


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
