"""Costs of saves in the background: python -m tests.benchmarks.background [--width W] [--saves N]

A stack of linear layers with AdamW trains on one process.  Told are, in medians of interleaved
rounds: a step without a save, `save` with and without `wait`, and how much longer those
steps take that are made until a save in the background is on the disk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
from torch import nn

import schedlang


class Stack(nn.Module):
    """Layers of one width; the loss is their output's mean square."""

    def __init__(self, width: int, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--saves", type=int, default=7)
    asked = parser.parse_args()
    batch = {"x": torch.randn(asked.rows, asked.width)}
    program = schedlang.create_schedule(Stack(asked.width)).build(
        batch=batch, optimizer=lambda named: torch.optim.AdamW(named)
    )
    plain: list[float] = []
    waited: list[float] = []
    begun: list[float] = []
    beside: list[float] = []

    def timed(into: list[float], act: object, *args: object, **more: object) -> None:
        start = time.perf_counter()
        act(*args, **more)  # type: ignore[operator]
        into.append(time.perf_counter() - start)

    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            program.train_step(batch)
        program.save(folder, wait=False)  # the memory of copies is made by the first
        program.saved()
        for _ in range(asked.saves):
            for _ in range(5):
                timed(plain, program.train_step, batch)
            timed(waited, program.save, folder)
            timed(begun, program.save, folder, wait=False)
            thread = program._saving.thread
            while thread is not None and thread.is_alive():
                timed(beside, program.train_step, batch)
            program.saved()
    middle = statistics.median
    held = 3 * sum(p.numel() * 4 for p in program.module.parameters()) / 2**20
    step, stall, whole = middle(plain), middle(begun), middle(waited)
    print(f"state {held:.0f} MiB, a step {step * 1e3:.0f} ms")
    print(f"save, waited for {whole * 1e3:.0f} ms; begun in the background {stall * 1e3:.0f} ms")
    print(f"the stall is {stall / whole:.3f} of the save that is waited for")
    if beside:
        print(f"a step beside it {middle(beside) * 1e3:.0f} ms, {middle(beside) / step:.2f} of one")


if __name__ == "__main__":
    main()
