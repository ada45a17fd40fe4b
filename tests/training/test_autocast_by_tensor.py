"""Models that name the device of their tensors to torch.autocast, which has no meta device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine import Threads
from tests.proofs import adamw, assert_near, make_plan, train_on_ranks, train_sequential
from tests.training.test_cast import prove_in_both

WIDTH = 8


def without_autocast(function):  # type: ignore[no-untyped-def]
    """Decorate a function as libraries do, for the device of its first tensor."""

    def run(*args: Tensor) -> Tensor:
        with torch.autocast(args[0].device.type, enabled=False):
            output: Tensor = function(*args)
            return output

    return run


@without_autocast
def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate halves of the last dim by angles."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Block(nn.Module):
    """A feed-forward block over rotated rows; `low`: its first layer asks for bfloat16."""

    def __init__(self, low: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.low = low

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * torch.ones(
            WIDTH // 2, device=x.device
        )
        with torch.autocast(device_type=x.device.type, dtype=torch.bfloat16, enabled=self.low):
            h = self.up(rotate(x, angles.to(x.dtype)))
        with torch.amp.autocast(x.device.type, enabled=False):
            output: Tensor = x + self.down(F.gelu(h.to(x.dtype)))
            return output


class Model(nn.Module):
    """Blocks and a loss."""

    def __init__(self, low: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(low) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(seed))}


STAGES = 'blocks pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
SPLIT = "blocks.*.up shard(col, over=tp)\nblocks.*.down shard(row, over=tp)"
ROWS = {
    "stages with ZeRO": ("dp=2, pp=2", f"{STAGES}\nzero(stage=1, over=dp)"),
    "tensor parallel": ("tp=2", f"{SPLIT}\nblocks.0 checkpoint()"),
}


@pytest.mark.parametrize("name", ROWS)
def test_it_is_disabled_around_operators(threads: Threads, name: str) -> None:
    """Three steps equal those of a plain loop."""
    plan = make_plan(Model().double(), ROWS[name][1], ROWS[name][0])
    batches = [{"x": batch(seed)["x"].double()} for seed in range(3)]
    results = train_on_ranks(threads, plan, batches, adamw)
    assert_near(results, train_sequential(plan.model.model, batches, adamw))


@pytest.mark.parametrize("low", [False, True], ids=["disabled", "asked for"])
def test_within_a_cast(threads: Threads, low: bool) -> None:
    """Stages under `cast(bf16)` compute in the dtypes of one process, within and without."""
    plan = make_plan(Model(low), f"cast(bf16)\n{STAGES}", "pp=2", "dtype")
    prove_in_both(threads, plan, [batch(seed) for seed in range(2)])


MODEL_FILE = """
import torch
from tests.training.test_autocast_by_tensor import Model as model, batch
"""


def test_checked_in_a_process_of_its_own(tmp_path: Path) -> None:
    """`check --model` records such a model, whatever has been imported before."""
    (tmp_path / "model.py").write_text(MODEL_FILE)
    (tmp_path / "a.sched").write_text(f"schedule 1\nmesh(tp=2)\n{SPLIT}\n")
    command = [sys.executable, "-m", "schedlang", "check", "a.sched", "--model", "model.py"]
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
