"""Memory of a head and its loss: python -m tests.benchmarks.head_memory [--tokens N] [--classes N]

Forward and backward in float32 on the CPU, each variant in its own process: the peak resident
memory above that of the inputs (gradients of input and weight count as used), CPU seconds, and
the loss.  Compared with F.cross_entropy(F.linear(...)), and torch's chunked
F.linear_cross_entropy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTH = 512
CHUNKED = ("torch, chunked",) if hasattr(F, "linear_cross_entropy") else ()  # torch 2.13 has it
VARIANTS = ("eager", *CHUNKED, "ours", "ours, 16 MiB", "ours, recomputed")


def resident() -> int:
    """Return the resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def loss_of(variant: str, target: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss function of a variant."""
    from schedlang.kernels.linear_cross_entropy import Form, statistics, weighted_loss

    counts = target >= 0
    row_weights = counts / counts.sum()
    if variant == "eager":
        return lambda x, w: F.cross_entropy(F.linear(x, w).float(), target)
    if variant == "torch, chunked":
        options = torch.nn.LinearCrossEntropyOptions()
        return lambda x, w: F.linear_cross_entropy(x, w, target, options=options)
    labels = target.clamp_min(-1)
    if variant == "ours, recomputed":

        def recomputed(x: Tensor, w: Tensor) -> Tensor:
            lse, picked, _ = statistics(x, w, None, labels, Form())
            return ((lse - picked) * row_weights).sum()

        return recomputed
    form = Form(budget=16 * 2**20 if "16" in variant else 0)
    return lambda x, w: weighted_loss(x, w, None, labels, row_weights, 0.0, form)


def measure(variant: str, tokens: int, classes: int) -> dict[str, float]:
    """Measure one variant in this process: peak bytes above the inputs, CPU seconds, loss."""
    torch.manual_seed(0)
    x = torch.randn(tokens, WIDTH).requires_grad_()
    weight = (torch.randn(classes, WIDTH) * 0.02).requires_grad_()
    target = torch.randint(0, classes, (tokens,))
    target[::7] = -100
    loss = loss_of(variant, target)
    # memory of lazy imports at a first call does not belong to the loss
    small = loss_of(variant, target[:8].clamp(max=15))
    small(torch.randn(8, 8).requires_grad_(), torch.randn(16, 8).requires_grad_()).backward()
    base, peak, finished = resident(), [resident()], threading.Event()

    def watch() -> None:
        while not finished.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.process_time()
    value = loss(x, weight)
    value.backward()
    seconds = time.process_time() - start
    finished.set()
    watcher.join()
    assert x.grad is not None and weight.grad is not None
    return {
        "bytes": peak[0] - base,
        "cpu": seconds,
        "loss": value.item(),
        "norm": float(weight.grad.norm()),
    }


def main() -> None:
    """Run each variant in its own process, and print a JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--classes", type=int, default=32000)
    parser.add_argument("--way")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments.way, arguments.tokens, arguments.classes)))
        return
    results = {}
    for variant in VARIANTS:
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.head_memory",
            "--way",
            variant,
            "--tokens",
            str(arguments.tokens),
            "--classes",
            str(arguments.classes),
        ]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        results[variant] = json.loads(process.stdout.splitlines()[-1])
        result = results[variant]
        print(
            f"{variant:18} {result['bytes'] / 2**20:7.0f} MiB  {result['cpu']:5.1f} s CPU  "
            f"loss {result['loss']:.6f}  |dW| {result['norm']:.6e}",
            flush=True,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
