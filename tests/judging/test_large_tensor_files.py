"""Large tensors go through files: verdicts and causes are as for small ones."""

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

WIDTH = 192  # so that a weight is large enough for a file


def batch(seed: int) -> dict[str, Any]:
    """Return random rows and their classes."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(8, WIDTH, generator=draw)
    return {"x": x, "y": torch.randint(0, WIDTH, (8,), generator=draw)}


class WideNet(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        return self.last(self.first(x).relu())


def right(model: nn.Module) -> TrainingProgram:
    """All rows on every rank, with a state that is saved and loaded."""
    base_program = saving.image_program(model)

    def save(optimizer: Any) -> Any:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: Any, optimizer: Any) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return TrainingProgram(model, base_program.step, world_loss="same", state_dict=save, load=load)


def one_rank_halved(model: nn.Module) -> TrainingProgram:
    """Wrong: the second rank's gradient is halved."""
    import torch.distributed as dist

    base_program = saving.image_program(model)

    def step(batch: Any) -> Any:
        value = base_program.step(batch)
        if dist.get_rank() == 1:
            model.last.weight.grad.mul_(0.5)  # type: ignore[union-attr, operator]
        return value

    return TrainingProgram(model, step, world_loss="same")


@pytest.mark.parametrize(
    "program, said", [(right, ""), (one_rank_halved, "only rank 0 has the right")]
)
def test_large_tensors_are_judged_from_files(
    pool: Pool, tmp_path: Path, monkeypatch: Any, program: Any, said: str
) -> None:
    """The right program passes, the wrong one is explained; no large file is left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert WIDTH * WIDTH * 8 > mapped_tensors.LEAST_FILE_BYTES
    torch.manual_seed(0)
    report = verify_program(
        program, model=WideNet(), batch=batch, loss=wrapped.image_loss, ranks=2, pool=pool
    )
    assert report.ok is not bool(said), str(report)
    assert not said or any(
        "`last.weight`" in text and said in text for _, text in report.localised
    ), str(report)
    large_files = [
        path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 10**5
    ]
    assert not large_files


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
    """A tensor is read with its shape, dtype and values as written."""
    stored = MappedTensors(str(tmp_path))
    original = value.clone()
    stored["a"], stored["b"] = value, None
    if value.numel():
        value.zero_()
    read = stored["a"]
    assert read is not None and read.dtype == original.dtype and read.shape == original.shape
    assert torch.equal(read, original) and stored["b"] is None and list(stored) == ["a", "b"]
    tensor_file = map_tensor(original, str(tmp_path))
    reread = tensor_file.read()
    tensor_file.remove_file()
    assert torch.equal(reread, original)
    assert len(list(tmp_path.iterdir())) == int(
        original.numel() * original.element_size() >= mapped_tensors.LEAST_FILE_BYTES
    )
