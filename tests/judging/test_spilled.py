"""Tensors that are large go through files: verdicts and causes are as of small ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from schedlang import TrainingProgram, verify_program
from schedlang.passes.verify import mapped_tensors
from schedlang.passes.verify.mapped_tensors import MappedTensors, map_tensor
from schedlang.runtime.launch.pool import Pool
from tests.judging import saving, wrapped

WIDTH = 192  # so that a weight is larger than what goes without a file


def batch(seed: int) -> dict[str, Any]:
    """Rows of numbers, and their classes."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(8, WIDTH, generator=draw)
    return {"x": x, "y": torch.randint(0, WIDTH, (8,), generator=draw)}


class Wide(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        return self.last(self.first(x).relu())


def right(model: nn.Module) -> TrainingProgram:
    """All rows on every rank, and a state that is loaded back."""
    made = saving.averaged(model)

    def save(optimizer: Any) -> Any:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: Any, optimizer: Any) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return TrainingProgram(model, made.step, world_loss="same", state_dict=save, load=load)


def one_rank_off(model: nn.Module) -> TrainingProgram:
    """Wrong: the second rank's gradient is halved."""
    import torch.distributed as dist

    made = saving.averaged(model)

    def step(batch: Any) -> Any:
        value = made.step(batch)
        if dist.get_rank() == 1:
            model.last.weight.grad.mul_(0.5)  # type: ignore[union-attr, operator]
        return value

    return TrainingProgram(model, step, world_loss="same")


@pytest.mark.parametrize(
    "program, said", [(right, ""), (one_rank_off, "only rank 0 has the right")]
)
def test_large_tensors_are_judged_from_files(
    pool: Pool, tmp_path: Path, monkeypatch: Any, program: Any, said: str
) -> None:
    """The program that is right passes, the other is told why; no file is left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert WIDTH * WIDTH * 8 > mapped_tensors.LEAST_FILE_BYTES
    torch.manual_seed(0)
    report = verify_program(
        program, model=Wide(), batch=batch, loss=wrapped.of_images, ranks=2, pool=pool
    )
    assert report.ok is not bool(said), str(report)
    assert not said or any(
        "`last.weight`" in text and said in text for _, text in report.localised
    ), str(report)
    kept = [one for one in tmp_path.rglob("*") if one.is_file() and one.stat().st_size > 10**5]
    assert not kept


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(WIDTH, WIDTH, dtype=torch.float64),
        torch.randn(3, WIDTH, WIDTH).to(torch.bfloat16).transpose(0, 2),
        torch.randint(9, (WIDTH, WIDTH)),
        torch.randn(WIDTH, WIDTH) > 0,
        torch.tensor(2.5),
        torch.empty(0, 4),
    ],
    ids=["float64", "bfloat16", "int64", "bool", "a number", "none"],
)
def test_what_is_written_is_read(tmp_path: Path, value: torch.Tensor) -> None:
    """In its shape and dtype, bit by bit, as it was when it was written."""
    seen = MappedTensors(str(tmp_path))
    was = value.clone()
    seen["a"], seen["b"] = value, None
    if value.numel():
        value.zero_()
    read = seen["a"]
    assert read is not None and read.dtype == was.dtype and read.shape == was.shape
    assert torch.equal(read, was) and seen["b"] is None and list(seen) == ["a", "b"]
    one = map_tensor(was, str(tmp_path))
    again = one.read()
    one.remove_file()
    assert torch.equal(again, was)
    assert len(list(tmp_path.iterdir())) == int(
        was.numel() * was.element_size() >= mapped_tensors.LEAST_FILE_BYTES
    )
