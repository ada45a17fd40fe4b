"""Programs on ranks with simulated devices: what they send lies where it has to, and nothing waits.

The worlds are of NCCL's kind alone (`simccl`), of two kinds ("cpu:gloo,sim:simccl"), or none, as
torchrun leaves it.  A program trains as the untouched model does on one CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.passes.running.build import build
from schedlang.testing.accelerator import current, spawn, unavailable
from tests.proofs import planned

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there")

WORLDS = ("simccl", "cpu:gloo,sim:simccl")
STEPS = 3


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Some of them, and a head."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), labels)


def made() -> Blocks:
    torch.manual_seed(0)
    return Blocks().double()


def batch(seed: int, rows: int = 8) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16, generator=draw, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(8, (rows,), generator=draw)}


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


CLIP = 0.05
TENSOR = """
blocks.*.up    shard(col, over=tp)
blocks.*.down  shard(row, over=tp)
"""
PIPE = 'blocks[2]  pipeline_split(over=pp)\npipeline(order="1F1B", micro=4)'
ROWS = {
    "tensor": ("tp=2", TENSOR),
    "replicas": ("dp=2", "zero(stage=0, over=dp)"),
    "zero 3": ("dp=2", "zero(stage=3, over=dp)"),
    "pipeline": ("pp=2", PIPE),
}


def program(rows: str, device: str | None = None, **more: Any) -> Any:
    """Built from the text of a schedule."""
    mesh, text = ROWS[rows]
    model = made() if device is None else made().to(device)
    return build(planned(model, text, mesh), batch(0), optimizer=sgd, clip=CLIP, **more)


def alone() -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and parameters of the untouched model, on the CPU."""
    model, losses, norms = made(), [], []
    optimizer = sgd(model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss))
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}


def trained(rows: str, device: str | None, local: bool = False) -> Any:
    """On a rank: what the same steps give, and where the program computes."""
    made = program(rows, device)
    losses, norms = [], []
    for step in range(STEPS):
        loss = made.train_step(batch(step))
        losses.append(float(loss))
        norms.append(made.grad_norm)
    return losses, norms, made.state_dict(), str(made.assembly.ranks.device), str(loss.device)


def check(found: Any) -> None:
    """As the model alone, on each rank's own device."""
    losses, norms, parameters = alone()
    for rank, (mine, told, state, device, lies) in enumerate(found):
        assert device == lies == f"sim:{rank}"
        assert mine == pytest.approx(losses, rel=1e-9) and told == pytest.approx(norms, rel=1e-9)
        for name, value in parameters.items():
            assert state[name].device.type == "cpu"
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", WORLDS)
@pytest.mark.parametrize("rows", ROWS)
def test_as_on_a_cpu(rows: str, backend: str) -> None:
    """Loss, norm and parameters are those of the model alone, in worlds of either kind."""
    check(spawn(trained, rows, "sim", backend=backend))


def waits(rows: str, clip: float | None = CLIP, **more: Any) -> list[str]:
    """On a rank: where the host waited for the device in two steps whose loss nobody looks at."""
    made = program(rows, "sim", **more)
    seen = current()
    rows_here = [{k: v.to("sim") for k, v in batch(step).items()} for step in range(4)]
    for step in rows_here[:2]:
        made.train_step(step)
    seen.reset()
    for step in rows_here[2:]:
        made.train_step(step)
    return [str(one) for one in seen.synchronisations()]


@pytest.mark.parametrize("rows", ROWS)
def test_a_step_waits_for_nothing(rows: str) -> None:
    """Whose loss and norm nobody reads: gradients are summed and clipped, and the host goes on."""
    for rank, found in enumerate(spawn(waits, rows)):
        assert not found, (rank, found)
