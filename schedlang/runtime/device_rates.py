"""Measure the speed of this rank's device: seconds of operators and of collectives, by size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from schedlang.runtime.device import local_device, synchronize

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
REPETITIONS = 5  # measurements of one size; the median counts
HEADS, CHANNELS = 8, 64


@dataclass(frozen=True)
class Rate:
    """A measurement of one size: operations, bytes moved or sent, and seconds."""

    what: str
    dtype: str
    flops: float
    bytes: float
    seconds: float


def measure_operators(longest: float, dtypes: tuple[str, ...]) -> Iterator[Rate]:
    """Measure kernel starts, copies, matrix products and attention on this rank's device.

    Sizes double until one takes `longest` seconds. A dtype that the device does not support is
    skipped.
    """
    device = local_device()
    tiny = torch.zeros(1, device=device)
    yield Rate("start", "float32", 0, 0, _seconds(lambda: tiny.add_(1), device, 200))
    yield from _growing(longest, lambda k: _copy(k, device))
    for dtype in dtypes:
        for make in (_product, _attention):
            try:
                yield from _growing(longest, lambda k: make(k, dtype, device))  # noqa: B023
            except (RuntimeError, NotImplementedError):  # no kernel, or no memory for a larger one
                continue


def measure_collectives(longest: float) -> list[Rate]:
    """Measure all_reduce, all_gather and broadcast among the ranks of the default group.

    Every rank runs the same sizes: all ranks decide together whether to go on.
    """
    count, rates = dist.get_world_size(), []
    for op in ("all_reduce", "all_gather", "broadcast"):
        for power in range(10, 27, 2):
            size = 2**power
            seconds = _slowest_seconds(_collective(op, size, count))
            rates.append(Rate(op, "float32", 0, size, seconds))
            if seconds > longest:
                break
    return rates


# -- one size --------------------------------------------------------------------------------------


Measurement = tuple[str, str, float, float, Callable[[], Any], torch.device]


def _growing(longest: float, make: Callable[[int], Measurement]) -> Iterator[Rate]:
    """Yield measurements of growing sizes until one takes `longest` seconds."""
    for k in range(12):
        name, dtype, flops, num_bytes, function, device = make(k)
        seconds = _seconds(function, device)
        yield Rate(name, dtype, flops, num_bytes, seconds)
        if seconds > longest:
            return


def _copy(k: int, device: torch.device) -> Measurement:
    """Return an addition in place that reads two tensors and writes one; from 3 MiB on."""
    a, b = (torch.zeros(2 ** (18 + k), device=device) for _ in range(2))
    return "copy", "float32", 0, 3.0 * a.numel() * a.element_size(), lambda: a.add_(b), device


def _product(k: int, dtype: str, device: torch.device) -> Measurement:
    n = 128 * 2**k
    a, b = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in range(2))
    num_bytes = 3.0 * n * n * a.element_size()
    return "product", dtype, 2.0 * n**3, num_bytes, lambda: a @ b, device


def _attention(k: int, dtype: str, device: torch.device) -> Measurement:
    n = 128 * 2**k
    shape = (1, HEADS, n, CHANNELS)
    q, k_, v = (torch.randn(shape, device=device).to(DTYPES[dtype]) for _ in range(3))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    num_bytes = 4.0 * q.numel() * q.element_size()
    flops = 4.0 * HEADS * n * n * CHANNELS
    return "attention", dtype, flops, num_bytes, lambda: sdpa(q, k_, v), device


def _seconds(function: Callable[[], Any], device: torch.device, calls: int = 1) -> float:
    """Return the median of a few times, each the mean of `calls` calls, after one warm-up call."""
    function()
    times = []
    for _ in range(REPETITIONS):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)


def _collective(op: str, size: int, count: int) -> Callable[[], Any]:
    full = torch.zeros(size // 4)
    if op == "all_reduce":
        return lambda: dist.all_reduce(full)
    if op == "broadcast":
        return lambda: dist.broadcast(full, 0)
    part = torch.zeros(size // 4 // count)
    parts = [torch.zeros_like(part) for _ in range(count)]
    return lambda: dist.all_gather(parts, part)


def _slowest_seconds(function: Callable[[], Any]) -> float:
    """Return the median, over repetitions, of the time of the slowest rank; equal on all ranks."""
    function()
    times = []
    for _ in range(REPETITIONS):
        dist.barrier()
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(statistics.median(slowest.tolist()))
