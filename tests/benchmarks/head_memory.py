"""Memory of a head and its loss: python -m tests.benchmarks.head_memory [--tokens N] [--classes N]

Forward and backward in float32 on the CPU, each way in a process of its own: the largest resident
memory beyond that of the inputs (which the gradients of input and weight belong to), CPU seconds,
and the loss.  The other sides: F.cross_entropy(F.linear(...)), and torch's chunked
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
WAYS = ("eager", *CHUNKED, "ours", "ours, 16 MiB", "ours, recomputed")


def resident() -> int:
    """Bytes of this process in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def loss_of(way: str, target: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss one way."""
    from schedlang.kernels.linear_cross_entropy import Form, statistics, weighted_loss

    counts = target >= 0
    by = counts / counts.sum()
    if way == "eager":
        return lambda x, w: F.cross_entropy(F.linear(x, w).float(), target)
    if way == "torch, chunked":
        options = torch.nn.LinearCrossEntropyOptions()
        return lambda x, w: F.linear_cross_entropy(x, w, target, options=options)
    labels = target.clamp_min(-1)
    if way == "ours, recomputed":

        def recomputed(x: Tensor, w: Tensor) -> Tensor:
            lse, picked, _ = statistics(x, w, None, labels, Form())
            return ((lse - picked) * by).sum()

        return recomputed
    form = Form(budget=16 * 2**20 if "16" in way else 0)
    return lambda x, w: weighted_loss(x, w, None, labels, by, 0.0, form)


def measure(way: str, tokens: int, classes: int) -> dict[str, float]:
    """Peak bytes above the inputs, CPU seconds and the loss, in this process."""
    torch.manual_seed(0)
    x = torch.randn(tokens, WIDTH).requires_grad_()
    weight = (torch.randn(classes, WIDTH) * 0.02).requires_grad_()
    target = torch.randint(0, classes, (tokens,))
    target[::7] = -100
    loss = loss_of(way, target)
    # whatever torch imports at a first call is no memory of the loss
    small = loss_of(way, target[:8].clamp(max=15))
    small(torch.randn(8, 8).requires_grad_(), torch.randn(16, 8).requires_grad_()).backward()
    base, peak, done = resident(), [resident()], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.process_time()
    value = loss(x, weight)
    value.backward()
    seconds = time.process_time() - start
    done.set()
    watcher.join()
    assert x.grad is not None and weight.grad is not None
    return {
        "bytes": peak[0] - base,
        "cpu": seconds,
        "loss": value.item(),
        "norm": float(weight.grad.norm()),
    }


def main() -> None:
    """Each way in a process of its own, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--classes", type=int, default=32000)
    parser.add_argument("--way")
    asked = parser.parse_args()
    if asked.way:
        print(json.dumps(measure(asked.way, asked.tokens, asked.classes)))
        return
    found = {}
    for way in WAYS:
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.head_memory",
            "--way",
            way,
            "--tokens",
            str(asked.tokens),
            "--classes",
            str(asked.classes),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
        one = found[way]
        print(
            f"{way:18} {one['bytes'] / 2**20:7.0f} MiB  {one['cpu']:5.1f} s CPU  "
            f"loss {one['loss']:.6f}  |dW| {one['norm']:.6e}",
            flush=True,
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
