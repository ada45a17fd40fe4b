"""A resumed run: loaders whose workers outlive an epoch, schedulers that look at a loss."""

from __future__ import annotations

import itertools
import random
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.training.test_trainer import LossFile, RandomRows, make_trainer


class WorkersDraws(RandomRows):
    """Rows with noise of all generators of a worker, and of the data set's own."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(2)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        noise = random.random() + np.random.random() + float(torch.rand(())) + self.own.random()
        series = super().__getitem__(row)["series"] + 0.01 * noise
        return {"series": series, "lengths": torch.tensor(6)}


def test_workers_that_outlive_an_epoch(tmp_path: Path) -> None:
    """A run that is stopped after its first epoch resumes the order of rows, and the draws of each
    worker: those of a loop of torch."""

    def loader() -> DataLoader[dict[str, Tensor]]:
        options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
        generator = torch.Generator().manual_seed(3)
        return DataLoader(WorkersDraws(), 4, shuffle=True, generator=generator, **options)

    def losses_of(*stops: tuple[int, Any]) -> dict[int, float]:
        heard = LossFile(tmp_path / f"heard {secrets.token_hex(4)}")
        for steps, data in stops:
            folder = None if isinstance(data, list) else tmp_path / f"saved {len(stops)}"
            make_trainer(folder, heard.file, steps, data=data).fit()
        return heard.losses

    losses = losses_of((8, loader()))
    assert len(losses) == 8 and losses == losses_of((7, loader()), (8, loader()))
    data = loader()
    batches = itertools.chain.from_iterable(iter(data) for _ in range(2))
    assert losses == losses_of((8, list(itertools.islice(batches, 8))))


def test_a_scheduler_that_looks_at_the_loss(tmp_path: Path) -> None:
    """`ReduceLROnPlateau` steps with each evaluation's loss, as in a loop of torch, and resumes."""

    class Rates:
        def __init__(self) -> None:
            self.rates: dict[int, float] = {}
            self.losses: list[float] = []

        def on_step(self, trainer: Any) -> None:
            self.rates[trainer.program.step] = trainer.rate

        def on_evaluate(self, trainer: Any, figures: dict[str, float]) -> None:
            self.losses.append(figures["evaluation loss"])

    def run(folder: str, *stops: int) -> Rates:
        heard = Rates()
        rows = [row for row in DataLoader(RandomRows(), 4)]
        for steps in stops:
            options: dict[str, Any] = {"data": rows, "evaluation": rows[:1], "evaluate_every": 1}
            options |= {"scheduler": plateau, "callbacks": (heard,)}
            make_trainer(tmp_path / folder, tmp_path / "heard", steps, **options).fit()
        return heard

    heard = run("a", 8)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=3e-3)
    by_torch = plateau(optimizer)
    for step, loss_of_step in enumerate(heard.losses, 1):
        assert heard.rates[step] == optimizer.param_groups[0]["lr"]
        by_torch.step(loss_of_step)
    assert len(set(heard.rates.values())) > 1
    assert run("b", 5, 8).rates == heard.rates


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    """Return a scheduler that asks for more progress than there is."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.3)
