"""Callbacks and data loaders of other packages: they receive what the run did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from schedlang.callbacks import TensorBoard, WandB
from tests.training.test_trainer import LossFile, RandomRows, fixed_batches, make_trainer


def test_tensorboard_has_every_figure(tmp_path: Path) -> None:
    """TensorBoard's reader finds losses, evaluations and learning rates by step."""
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    heard = LossFile(tmp_path / "heard")
    data = fixed_batches()
    make_trainer(
        None,
        tmp_path / "heard",
        6,
        data=data,
        evaluation=data[:2],
        evaluate_every=3,
        callbacks=(heard, TensorBoard(tmp_path / "board")),
    ).fit()
    board: Any = reading.EventAccumulator(str(tmp_path / "board")).Reload()
    losses = {event.step: event.value for event in board.Scalars("loss")}
    assert losses == pytest.approx(heard.losses) and list(losses) == list(range(1, 7))
    assert [event.step for event in board.Scalars("evaluation loss")] == [3, 6]
    rates = [event.value for event in board.Scalars("learning rate")]
    assert len(rates) == 6 and rates == sorted(rates, reverse=True) and rates[0] > rates[-1]


def test_weights_and_biases_has_every_figure(tmp_path: Path) -> None:
    """Offline, the last figures of the W&B run are those of the training run."""
    pytest.importorskip("wandb", reason="needs wandb")
    heard, sent = LossFile(tmp_path / "heard"), WandB(mode="offline", dir=str(tmp_path))
    summary: dict[str, Any] = {}

    class Looks:
        def on_end(self, _: Any) -> None:
            summary.update(sent._run.summary)  # type: ignore[attr-defined]

    make_trainer(
        None, tmp_path / "heard", 5, data=fixed_batches(), callbacks=(heard, Looks(), sent)
    ).fit()
    step = int(summary["step"])  # the last is sent when the run ends
    assert step >= 4 and summary["loss"] == pytest.approx(heard.losses[step])
    files = [*tmp_path.glob("wandb/offline-run-*/*.wandb")]
    assert len(files) == 1 and files[0].stat().st_size > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_tells_its_place(tmp_path: Path, workers: int) -> None:
    """A torchdata loader stopped in the middle of an epoch goes on bit by bit; no batch is read
    again to find its position."""
    loading = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")

    def loader(seed: int) -> Any:
        torch.manual_seed(seed)  # the loader draws the seed of its order when it is created
        return loading.StatefulDataLoader(
            FixedRows(), batch_size=4, shuffle=True, num_workers=workers, drop_last=True
        )

    uninterrupted, interrupted = tmp_path / "whole", tmp_path / "parts"
    make_trainer(None, uninterrupted, 9, data=loader(1)).fit()
    make_trainer(tmp_path / "saved", interrupted, 6, data=loader(1)).fit()
    resumed = make_trainer(tmp_path / "saved", interrupted, 9, data=loader(2))
    resumed.fit()
    assert LossFile(interrupted).losses == LossFile(uninterrupted).losses
    assert resumed._stream.stateful and len({*LossFile(uninterrupted).losses.values()}) == 9


class FixedRows(RandomRows):
    """The series of `Rows` without random augmentation: workers draw by themselves."""

    def __getitem__(self, row: int) -> Any:
        generator = torch.Generator().manual_seed(row)
        series = torch.randn(6, 7, generator=generator, dtype=torch.float64)
        return {"series": series, "lengths": torch.tensor(6)}
