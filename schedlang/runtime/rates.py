"""Rates of the device at hand: seconds of operators and of collectives, by their sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from schedlang.runtime.device import own_device, synchronize

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ENOUGH = 5  # measurements of one size, of which the median counts
HEADS, CHANNELS = 8, 64


@dataclass(frozen=True)
class Rate:
    """A measurement of one size: operations, bytes that were moved or sent, and seconds."""

    what: str
    dtype: str
    flops: float
    bytes: float
    seconds: float


def operators(longest: float, dtypes: tuple[str, ...]) -> Iterator[Rate]:
    """Measure starts, copies, products and attention on this rank's device.

    Sizes double until one takes `longest` seconds.  What a device does not compute in a dtype is
    left out.
    """
    device = own_device()
    tiny = torch.zeros(1, device=device)
    yield Rate("start", "float32", 0, 0, _seconds(lambda: tiny.add_(1), device, 200))
    yield from _growing(longest, lambda k: _copy(k, device))
    for dtype in dtypes:
        for make in (_product, _attention):
            try:
                yield from _growing(longest, lambda k: make(k, dtype, device))  # noqa: B023
            except (RuntimeError, NotImplementedError):  # no kernel, or no memory for a larger one
                continue


def collectives(longest: float) -> list[Rate]:
    """Measure all_reduce, all_gather and broadcast among the ranks of the default group.

    Every rank goes through the same sizes: whether to go on is decided together.
    """
    count, found = dist.get_world_size(), []
    for op in ("all_reduce", "all_gather", "broadcast"):
        for power in range(10, 27, 2):
            size = 2**power
            took = _together(_collective(op, size, count))
            found.append(Rate(op, "float32", 0, size, took))
            if took > longest:
                break
    return found


# -- one size --------------------------------------------------------------------------------------


Made = tuple[str, str, float, float, Callable[[], Any], torch.device]


def _growing(longest: float, make: Callable[[int], Made]) -> Iterator[Rate]:
    """Sizes one after the other until one takes so long."""
    for k in range(12):
        what, dtype, flops, moved, run, device = make(k)
        took = _seconds(run, device)
        yield Rate(what, dtype, flops, moved, took)
        if took > longest:
            return


def _copy(k: int, device: torch.device) -> Made:
    """A sum in place that reads two and writes one; from 3 MiB on."""
    a, b = (torch.zeros(2 ** (18 + k), device=device) for _ in range(2))
    return "copy", "float32", 0, 3.0 * a.numel() * a.element_size(), lambda: a.add_(b), device


def _product(k: int, dtype: str, device: torch.device) -> Made:
    n = 128 * 2**k
    a, b = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in range(2))
    moved = 3.0 * n * n * a.element_size()
    return "product", dtype, 2.0 * n**3, moved, lambda: a @ b, device


def _attention(k: int, dtype: str, device: torch.device) -> Made:
    n = 128 * 2**k
    shape = (1, HEADS, n, CHANNELS)
    q, k_, v = (torch.randn(shape, device=device).to(DTYPES[dtype]) for _ in range(3))
    run = torch.nn.functional.scaled_dot_product_attention
    moved = 4.0 * q.numel() * q.element_size()
    flops = 4.0 * HEADS * n * n * CHANNELS
    return "attention", dtype, flops, moved, lambda: run(q, k_, v), device


def _seconds(run: Callable[[], Any], device: torch.device, often: int = 1) -> float:
    """The median of a few times, each of `often` calls, after one that warms up."""
    run()
    took = []
    for _ in range(ENOUGH):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(often):
            run()
        synchronize(device)
        took.append((time.perf_counter() - begin) / often)
    return statistics.median(took)


def _collective(op: str, size: int, count: int) -> Callable[[], Any]:
    whole = torch.zeros(size // 4)
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if op == "broadcast":
        return lambda: dist.broadcast(whole, 0)
    part = torch.zeros(size // 4 // count)
    parts = [torch.zeros_like(part) for _ in range(count)]
    return lambda: dist.all_gather(parts, part)


def _together(run: Callable[[], Any]) -> float:
    """The median of what the slowest rank took, which all are told."""
    run()
    took = []
    for _ in range(ENOUGH):
        dist.barrier()
        begin = time.perf_counter()
        run()
        took.append(time.perf_counter() - begin)
    slowest = torch.tensor(took)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(statistics.median(slowest.tolist()))
