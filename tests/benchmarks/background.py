"""Cost of background saves: python -m tests.benchmarks.background [--width W] [--saves N]

A stack of linear layers with AdamW trains in one process.  Printed are medians of interleaved
rounds: a step without a save, `save` with and without `wait`, and the steps that run while a
background save is written to disk.
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
    arguments = parser.parse_args()
    batch = {"x": torch.randn(arguments.rows, arguments.width)}
    program = schedlang.create_schedule(Stack(arguments.width)).build(
        batch=batch, optimizer=lambda named: torch.optim.AdamW(named)
    )
    without_save: list[float] = []
    waited: list[float] = []
    background: list[float] = []
    saving: list[float] = []

    def timed(times: list[float], action: object, *args: object, **options: object) -> None:
        start = time.perf_counter()
        action(*args, **options)  # type: ignore[operator]
        times.append(time.perf_counter() - start)

    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            program.train_step(batch)
        program.save(folder, wait=False)  # the first save allocates the memory of copies
        program.saved()
        for _ in range(arguments.saves):
            for _ in range(5):
                timed(without_save, program.train_step, batch)
            timed(waited, program.save, folder)
            timed(background, program.save, folder, wait=False)
            thread = program._saving.thread
            while thread is not None and thread.is_alive():
                timed(saving, program.train_step, batch)
            program.saved()
    median = statistics.median
    state_mib = 3 * sum(p.numel() * 4 for p in program.module.parameters()) / 2**20
    step, stall, save_time = median(without_save), median(background), median(waited)
    print(f"state {state_mib:.0f} MiB, a step {step * 1e3:.0f} ms")
    print(
        f"save, waited for {save_time * 1e3:.0f} ms; begun in the background {stall * 1e3:.0f} ms"
    )
    print(f"the stall is {stall / save_time:.3f} of the save that is waited for")
    if saving:
        print(f"a step beside it {median(saving) * 1e3:.0f} ms, {median(saving) / step:.2f} of one")


if __name__ == "__main__":
    main()
