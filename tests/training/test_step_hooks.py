"""Hooks that a loop puts on the steps of a program's optimizer run as in a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from tests.engine import Threads
from tests.proofs import make_plan

TENSOR = "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)\n"
PIPELINE = "blocks  pipeline_split(over=pp)\n"
ORDER = 'pipeline(order="1F1B", micro=2)'
LAYOUTS = {
    "dp": ("zero(stage=0, over=dp)", "dp=2"),
    "zero": ("zero(stage=2, over=dp)", "dp=2"),
    "offloaded": ("offload(optimizer)\nzero(stage=1, over=dp)", "dp=2"),
    "tp": (TENSOR, "tp=2"),
    "pp": (PIPELINE + ORDER, "pp=2"),
    "tp zero": (TENSOR + "zero(stage=3, over=dp)", "dp=2, tp=2"),
    "pp zero": (PIPELINE + "zero(stage=1, over=dp)\n" + ORDER, "dp=2, pp=2"),
}
# of the first, ranks hold all elements of all gradients
WHOLE, PARTS = ("dp", "zero"), ("tp", "pp", "tp zero", "pp zero")


class Block(nn.Module):
    """Two projections and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return a sum with the input."""
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Return a mean of squares."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


NET = Net()
Hook = Callable[..., None]


def batch(seed: int) -> dict[str, Tensor]:
    """Return four rows."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, 6, generator=generator, dtype=torch.float64)}


def sgd(named: Any) -> torch.optim.Optimizer:
    """Return an elementwise optimizer."""
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def adafactor(named: Any) -> torch.optim.Optimizer:
    """Return an optimizer of full tensors."""
    return torch.optim.Adafactor([p for _, p in named], lr=0.02)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def lower_rates(optimizer: Any, *unused: object) -> None:
    """Halve the learning rates."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def clamp(optimizer: Any, *unused: object) -> None:
    """Clip gradients by value, which fails without a gradient."""
    nn.utils.clip_grad_value_(parameters_of(optimizer), 0.01)


def clip(optimizer: Any, *unused: object) -> None:
    """Clip gradients by their norm."""
    nn.utils.clip_grad_norm_(parameters_of(optimizer), 0.05)  # here


def decay(optimizer: Any, *unused: object) -> None:
    """Shrink all parameters."""
    with torch.no_grad():
        for parameter in parameters_of(optimizer):
            parameter.mul_(0.9)


def average(averages: dict[Any, Tensor]) -> Hook:
    """Return a hook that averages parameters."""

    def hook(optimizer: Any, *unused: object) -> None:
        for parameter in parameters_of(optimizer):
            value = parameter.detach().clone()
            averages[parameter] = 0.5 * (averages.get(parameter, value) + value)

    return hook


def put_hooks(optimizer: Any, *, norms: bool) -> Callable[[], None]:
    """Put hooks on an optimizer; return a function that sets its parameters to their averages."""
    averages: dict[Any, Tensor] = {}
    for hook in (lower_rates, clamp, *([clip] if norms else [])):
        optimizer.register_step_pre_hook(hook)
    for hook in (decay, average(averages)):
        optimizer.register_step_post_hook(hook)

    @torch.no_grad()
    def end() -> None:
        assert set(averages) == set(parameters_of(optimizer))
        for parameter, value in averages.items():
            parameter.copy_(value)

    return end


def plain_loop(make: Callable[[Any], torch.optim.Optimizer], *, norms: bool) -> Any:
    """Return the averages of a plain loop."""
    model = copy.deepcopy(NET)
    optimizer = make(model.named_parameters())
    end = put_hooks(optimizer, norms=norms)
    for seed in range(3):
        optimizer.zero_grad()
        model(**batch(seed)).backward()
        optimizer.step()
    end()
    return model.state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [sgd, adafactor])
def test_hooks_on_steps(make: Any, layout: str, threads: Threads) -> None:
    """They run once a step, with all parameters of a rank and their gradients."""
    rows, mesh = LAYOUTS[layout]
    norms = layout in WHOLE

    def body() -> Any:
        program = build(make_plan(copy.deepcopy(NET), rows, mesh), batch(0), optimizer=make)
        end = put_hooks(program.optimizer, norms=norms)
        for seed in range(3):
            program.train_step(batch(seed))
        end()
        return program.state_dict()

    expected = plain_loop(make, norms=norms)
    for state in threads.run(body, 4 if "," in mesh else 2):
        torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", PARTS)
def test_a_norm_of_parts_in_a_hook(layout: str, threads: Threads) -> None:
    """It would differ by rank: refused, at the line of the hook; the hook removed, steps go on."""
    rows, mesh = LAYOUTS[layout]

    def body() -> Any:
        program = build(make_plan(copy.deepcopy(NET), rows, mesh), batch(0), optimizer=sgd)
        assert program.optimizer is not None
        handle = program.optimizer.register_step_pre_hook(clip)
        with pytest.raises(Refusal) as caught:
            program.train_step(batch(0))
        handle.remove()
        place = caught.value.diagnostic.primary.span
        assert place is not None and "# here" in place.source.line(place.line)
        return caught.value.diagnostic.code, program.train_step(batch(0)).isfinite().item()

    world = 4 if "," in mesh else 2
    assert threads.run(body, world) == [("S622", True)] * world


def normalised(named: Any) -> torch.optim.Optimizer:
    """Return SGD with a hook that divides each gradient by its norm."""
    optimizer = sgd(named)

    def hook(optimizer: Any, *unused: object) -> None:
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                parameter.grad /= parameter.grad.norm() + 0.1

    optimizer.register_step_pre_hook(hook)
    return optimizer


def test_a_hook_that_the_optimizer_is_made_with(threads: Threads) -> None:
    """It is part of an optimizer of full tensors: it gets these, not shards."""

    def train(optimizer: Any, step: Callable[[dict[str, Tensor]], Any]) -> None:
        optimizer.register_step_post_hook(decay)
        for seed in range(3):
            step(batch(seed))

    def body() -> Any:
        plan = make_plan(copy.deepcopy(NET), *LAYOUTS["tp"])
        program = build(plan, batch(0), optimizer=normalised)
        train(program.optimizer, program.train_step)
        return program.state_dict()

    model = copy.deepcopy(NET)
    optimizer = normalised(model.named_parameters())

    def step(part: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        model(**part).backward()
        optimizer.step()

    train(optimizer, step)
    found = threads.run(body, 2)[1]
    torch.testing.assert_close(found, model.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "make, hook", [(sgd, lambda *arguments: arguments[1:]), (normalised, lower_rates)]
)
def test_a_hook_that_a_step_cannot_run(make: Any, hook: Any, threads: Threads) -> None:
    """A hook that changes the arguments, or one before those that need full tensors: refused."""

    def body() -> Any:
        program = build(make_plan(copy.deepcopy(NET), *LAYOUTS["tp"]), batch(0), optimizer=make)
        assert program.optimizer is not None
        program.optimizer.register_step_pre_hook(hook)
        with pytest.raises(Refusal) as caught:
            program.train_step(batch(0))
        return caught.value.diagnostic.code

    assert threads.run(body, 2) == ["S622", "S622"]
