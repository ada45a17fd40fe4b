"""Callbacks and loaders of other packages: what they were told is what the run did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from schedlang.callbacks import TensorBoard, WandB
from tests.training.test_trainer import Heard, Rows, _plain, trainer


def test_tensorboard_has_every_figure(tmp_path: Path) -> None:
    """Losses, evaluations and rates by their steps, as its own reader finds them."""
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    heard = Heard(tmp_path / "heard")
    data = _plain()
    trainer(
        None,
        tmp_path / "heard",
        6,
        data=data,
        evaluation=data[:2],
        evaluate_every=3,
        callbacks=(heard, TensorBoard(tmp_path / "board")),
    ).fit()
    found: Any = reading.EventAccumulator(str(tmp_path / "board")).Reload()
    losses = {one.step: one.value for one in found.Scalars("loss")}
    assert losses == pytest.approx(heard.losses) and list(losses) == list(range(1, 7))
    assert [one.step for one in found.Scalars("evaluation loss")] == [3, 6]
    rates = [one.value for one in found.Scalars("learning rate")]
    assert len(rates) == 6 and rates == sorted(rates, reverse=True) and rates[0] > rates[-1]


def test_weights_and_biases_has_every_figure(tmp_path: Path) -> None:
    """A run without a network: its last figures are those of the run."""
    pytest.importorskip("wandb", reason="needs wandb")
    heard, sent = Heard(tmp_path / "heard"), WandB(mode="offline", dir=str(tmp_path))
    summary: dict[str, Any] = {}

    class Looks:
        def on_end(self, _: Any) -> None:
            summary.update(sent._run.summary)  # type: ignore[attr-defined]

    trainer(None, tmp_path / "heard", 5, data=_plain(), callbacks=(heard, Looks(), sent)).fit()
    step = int(summary["step"])  # the last is sent when the run ends
    assert step >= 4 and summary["loss"] == pytest.approx(heard.losses[step])
    files = [*tmp_path.glob("wandb/offline-run-*/*.wandb")]
    assert len(files) == 1 and files[0].stat().st_size > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_tells_its_place(tmp_path: Path, workers: int) -> None:
    """torchdata's: stopped in the middle of an epoch the run goes on bit by bit, and no batch is
    taken again to find the place."""
    loading = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")

    def loader(seed: int) -> Any:
        torch.manual_seed(seed)  # it draws the order's seed when it is made
        return loading.StatefulDataLoader(
            Seldom(), batch_size=4, shuffle=True, num_workers=workers, drop_last=True
        )

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trainer(None, whole, 9, data=loader(1)).fit()
    trainer(tmp_path / "saved", parts, 6, data=loader(1)).fit()
    again = trainer(tmp_path / "saved", parts, 9, data=loader(2))
    again.fit()
    assert Heard(parts).losses == Heard(whole).losses
    assert again._stream.stateful and len({*Heard(whole).losses.values()}) == 9


class Seldom(Rows):
    """The series of `Rows` without what is drawn anew: workers draw by themselves."""

    def __getitem__(self, row: int) -> Any:
        generator = torch.Generator().manual_seed(row)
        series = torch.randn(6, 7, generator=generator, dtype=torch.float64)
        return {"series": series, "lengths": torch.tensor(6)}
