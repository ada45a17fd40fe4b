"""Times and bytes of work on a GPU, and what a run of it took."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], object]
# multiplications and additions of bfloat16 in a second, dense, by a part of the device's name
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}


def median(work: Work, times: int) -> float:
    """Seconds of the median run, by events on the GPU; caches of it are cold."""
    cold = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    for _ in range(3):
        work()
    spans: list[float] = []
    for _ in range(times):
        cold.zero_()
        start, end = _event(), _event()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        spans.append(start.elapsed_time(end) / 1e3)
    return sorted(spans)[times // 2]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def extra_peak(work: Work) -> int:
    """The most bytes that a run holds beside what lay there before."""
    return peak_of(work) - torch.cuda.memory_allocated()


def rates(quick: bool = False) -> tuple[float, float]:
    """Bytes that this device moves in a second, and multiplications and additions of bfloat16.

    Measured: of a copy, counted twice, and of a square product.
    """
    if quick not in _rates:
        a = torch.empty(2**28 if quick else 2**30, dtype=torch.int8, device="cuda")
        b = torch.empty_like(a)
        copied = 2 * a.nbytes / median(lambda: b.copy_(a), 10)
        size = 4096 if quick else 8192
        x, y = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
        _rates[quick] = copied, 2 * size**3 / median(lambda: x @ y, 10)
    return _rates[quick]


_rates: dict[bool, tuple[float, float]] = {}


def peak_of(work: Work) -> int:
    """The most bytes that a run holds; what lay there before is among them."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def cleared(device: str) -> None:
    """Give back what nobody holds: modules with kernels are cycles, compiled ones are cached."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def peak_flops() -> float | None:
    """Return the peak rate of this device, if it is known."""
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)
