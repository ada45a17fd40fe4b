"""Whether and where Triton kernels run here, how rows are tiled, and a count of what ran.

A kernel runs on a GPU, or in Triton's interpreter where TRITON_INTERPRET=1 was set before triton
was imported; otherwise, for float64, and for rows longer than `LONGEST`, the torch reference runs
inside the same operator.  `runs` says which of them did.
"""

from __future__ import annotations

import os
from collections import Counter

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
    """As rows whose elements lie side by side; copied only where they do not."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def wide(*tensors: Tensor | None) -> torch.dtype:
    """The type in which a kernel computes with these: float32, or float64."""
    found = torch.float32
    for tensor in tensors:
        found = found if tensor is None else torch.promote_types(found, tensor.dtype)
    return found
