"""An exception ends a step on all ranks, and a loop goes on: later steps are those of a plain loop.

torch's fully_shard ends a backward by a callback, which does not run if the backward raises.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.passes.lower.build import build
from schedlang.runtime.grad_reduction import gradient
from tests.engine import Threads
from tests.proofs import make_plan

ACCUMULATED = 'zero(stage={}, over=dp)\npipeline(order="1F1B", micro=2)'
LAYOUTS = (
    ("zero(stage=1, over=dp)", "dp=2"),
    (ACCUMULATED.format(1), "dp=2"),
    (ACCUMULATED.format(3), "dp=2"),
    ("blocks.*  checkpoint()\nzero(stage=3, over=dp)", "dp=2"),
    ("zero(stage=0, over=dp)\noverlap(gradients)", "dp=2"),
    ("zero(stage=3, over=dp)\nzero(stage=0, over=node)", "dp=2, node=2"),
)


class Broken(Exception):
    """The exception of a backward."""


class Breaks(torch.autograd.Function):
    """The identity, whose backward raises if a flag is set."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, broken: bool) -> Tensor:
        """Return the input."""
        ctx.broken = broken
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient, or raise."""
        if ctx.broken:
            raise Broken
        return grad, None


class Block(nn.Module):
    """Two projections; the backward of the first raises if all inputs of the model are large."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, broken: bool) -> Tensor:
        """Return a sum with the input."""
        return x + self.down(torch.tanh(Breaks.apply(self.up(x), broken)))


class Net(nn.Module):
    """Three blocks, of which the second may raise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Return a mean of squares."""
        broken = bool((x > 50).all())
        for index, block in enumerate(self.blocks):
            x = block(x, broken and index == 1)
        return x.square().mean()


def batch(seed: int) -> dict[str, Tensor]:
    """Return four rows."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, 6, generator=generator, dtype=torch.float64)}


def sgd(named: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def plain_loop() -> list[Tensor]:
    """Return the losses of a plain loop without steps that raise, and its parameters."""
    model = Net()
    optimizer, values = sgd(model.named_parameters()), []
    for seed in range(5):
        optimizer.zero_grad()
        loss = model(**batch(seed))
        values.append(loss.detach())
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            values.append(model(**batch(9)))
    return [*values, *model.state_dict().values()]


@pytest.mark.parametrize("rows, mesh", LAYOUTS)
def test_steps_after_an_exception(
    rows: str, mesh: str, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that raised leaves nothing behind: gradients, gathered parameters, reductions."""
    monkeypatch.setattr(gradient, "BUCKET_BYTES", 100)  # some begin before the exception

    def body() -> list[Tensor]:
        program = build(make_plan(Net(), rows, mesh), batch(0), optimizer=sgd)
        values = []
        for seed in range(5):
            for _ in range(seed % 3):
                with pytest.raises(Broken):
                    program.train_step({"x": torch.full((4, 6), 99.0, dtype=torch.float64)})
            values.append(program.train_step(batch(seed)))
            values.append(program.eval_step(batch(9)))
        return [*values, *program.state_dict().values()]

    expected = plain_loop()
    for values in threads.run(body, 4 if "," in mesh else 2):
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-12)
