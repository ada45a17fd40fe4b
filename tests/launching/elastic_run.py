"""A training run that torchrun agents start on each node, and that records its samples.

    torchrun ... tests/launching/elastic_run.py FOLDER STEPS PAUSE [STEPS TO HOLD AT]

For each step each rank writes a line into its own file: the step, the number of the round, the
number of ranks, and the samples of its loss.  At the steps to hold at it waits for a file.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import schedlang
from examples.custom.model import Watcher
from schedlang.runtime.comm import world
from schedlang.runtime.launch.hang_watch import waits_for_ranks

SCHEDULE = """schedule 1 for Watcher

knob pp: int = 1 in [1, 2]
knob micro: int = 1 in [1, 2]

mesh(dp=_, pp=pp)

blocks  pipeline_split(over=pp)
zero(stage=1, over=dp)
pipeline(order="1F1B", micro=micro)
"""
SAMPLES, ROWS = 36, 6
BUILD = {"dropout": "logical", "seed": 7}


def samples() -> list[dict[str, Tensor]]:
    """Return the rows, each with its number and its class."""
    draw = torch.Generator().manual_seed(1)
    return [
        {
            "series": torch.randn(6, 7, generator=draw, dtype=torch.float64),
            "lengths": torch.tensor(6 - number % 3),
            "target": torch.tensor(number % 5),
            "number": torch.tensor(number),
        }
        for number in range(SAMPLES)
    ]


class Seen:
    """Records the samples of this rank's loss since the last step, and the losses of all steps."""

    def __init__(self, folder: Path | None, holds: list[int], pause: float) -> None:
        self.folder, self.holds, self.pause = folder, holds, pause
        self.numbers: list[int] = []
        self.losses: dict[int, float] = {}
        self.round = 0

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy, and record the samples that it was asked for."""
        if not batch["number"].is_meta and output.requires_grad:
            self.numbers += batch["number"].tolist()
        return F.cross_entropy(output, batch["target"])

    def on_begin(self, trainer: Any) -> None:
        """Forget the samples used while the program was built; agree on a name for the round."""
        self.numbers.clear()
        with waits_for_ranks():  # waits for nobody but the other ranks
            self.round = world.broadcast_object(0, time.time_ns())

    def on_step(self, trainer: Any) -> None:
        """Write one line, then wait if this step is held."""
        numbers, step = list(self.numbers), trainer.program.step
        self.numbers.clear()
        if self.folder is None:
            return
        size = world.size()
        line = f"{step} {self.round} {size} {os.getpid()} {','.join(map(str, numbers)) or '-'}\n"
        with (self.folder / f"seen.{os.getpid()}.{self.round}").open("a") as file:
            file.write(line)
        time.sleep(self.pause)
        while step in self.holds and not (self.folder / f"go.{step}").exists():
            time.sleep(0.02)

    def on_log(self, trainer: Any, figures: dict[str, float]) -> None:
        """Keep the loss of the step; the first rank writes it."""
        if "loss" not in figures:
            return
        self.losses[int(figures["step"])] = figures["loss"]
        if self.folder is not None and world.rank() == 0:
            with (self.folder / "losses").open("a") as file:
                file.write(f"{int(figures['step'])} {figures['loss'].hex()}\n")


def train(folder: Path | None, steps: int, holds: list[int], pause: float) -> Seen:
    """Train on shuffled samples to the end, and return the recorder."""
    torch.manual_seed(0)
    recorder = Seen(folder, holds, pause)
    schedlang.Trainer(
        schedule=SCHEDULE,
        model=Watcher().double(),
        data=DataLoader(samples(), batch_size=ROWS, shuffle=True),  # type: ignore[arg-type]
        steps=steps,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
        scheduler=lambda it: torch.optim.lr_scheduler.CosineAnnealingLR(it, 50),
        loss=recorder.loss,
        folder=None if folder is None else folder / "saved",
        save_every=0 if folder is None else 1,
        log_every=1,
        callbacks=(recorder,),
        elastic=True,
        build=BUILD,
    ).fit()
    return recorder


def main() -> None:
    """Run as torchrun starts it."""
    folder, steps, pause, *holds = sys.argv[1:]
    Path(folder, f"rank.{os.environ['GROUP_OF_NODE']}.{os.getpid()}").touch()
    train(Path(folder), int(steps), list(map(int, holds)), float(pause))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
