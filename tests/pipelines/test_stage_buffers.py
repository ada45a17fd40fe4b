"""Buffers that a forward writes and never reads: each is saved from a stage that has its value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.schedule import create_schedule
from tests.engine import Threads

WIDTH = 4


class Layer(nn.Module):
    """A layer that keeps the mean of what it was given in a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, beside the input."""
        self.seen = x.detach().mean(0)
        return x + torch.tanh(self.up(x))


class Net(nn.Module):
    """Layers whose means are also kept beside them: before, between and after layers."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.added: Tensor
        self.last: Tensor
        for name in ("given", "first", "last", "added"):
            self.register_buffer(name, torch.zeros(WIDTH))
        self.register_buffer("means", torch.zeros(layers, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        self.given = x.detach().mean(0)
        outputs: list[Tensor] = []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x.detach())
            if len(outputs) == 1:
                self.first = outputs[0].mean(0)
            if len(outputs) == 3:
                self.added += outputs[0].mean(0)
        self.last, self.means = x.detach().mean(0), torch.stack(outputs).mean(1)
        return x.square().mean()


class Carrying(Net):
    """Keeps for the next forward, before the layers, what is computed behind them."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        before = self.last * 1.0
        loss = super().forward(x)
        self.last = self.last + 0.5 * before
        return loss


def batch(seed: int) -> dict[str, Tensor]:
    """Return four rows."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)}


def make_sgd(named: Any) -> torch.optim.Optimizer:
    """Return SGD over named parameters."""
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def build(kind: type[Net], stages: int) -> Any:
    """Build a pipeline of one microbatch."""
    torch.manual_seed(0)
    sch = create_schedule(kind().double())
    sch.mesh(pp=stages)
    sch["layers"].pipeline_split(over="pp")
    sch.pipeline(order="1F1B", micro=1)
    return sch.build(batch=batch(0), optimizer=make_sgd)


@pytest.mark.parametrize("stages", [2, 4])
def test_unread_buffers_are_saved(stages: int, threads: Threads) -> None:
    """Values of the state equal those of a plain loop, wherever the forward writes them."""

    def body() -> Any:
        program = build(Net, stages)
        for seed in range(2):
            program.train_step(batch(seed))
        return program.state_dict()

    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(2):
        optimizer.zero_grad()
        model(**batch(seed)).backward()
        optimizer.step()
    for state in threads.run(body, stages):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_a_buffer_between_two_stages(threads: Threads) -> None:
    """Refused where the stage that saves a buffer reads it, and another one writes it."""

    def body() -> Any:
        with pytest.raises(Refusal) as caught:
            build(Carrying, 2)
        return caught.value.diagnostic.code, "`last`" in caught.value.render()

    assert threads.run(body, 2) == [("S708", True)] * 2
