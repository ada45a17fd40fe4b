"""Weights of shards in users' own loops: what a loop computes of a rank's part is followed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from tests.engine import Threads
from tests.proofs import make_plan
from tests.training.test_plain_loops import LAYOUTS, NET, Plain, batch, sgd

Loop = Callable[[Any], Any]


def steps(change: Callable[[list[nn.Parameter]], Any]) -> Loop:
    """Return a loop that changes weights after each update, and trains on."""

    def loop(program: Any) -> None:
        optimizer, parameters = sgd(program), list(program.module.parameters())
        for seed in range(3):
            program.train_step(batch(seed))
            optimizer.step()
            change(parameters)

    return loop


@torch.no_grad()
def pruned(parameters: list[nn.Parameter]) -> None:
    """Mask weights by a threshold of all magnitudes."""
    magnitudes = torch.cat([parameter.abs().flatten() for parameter in parameters])
    threshold = magnitudes.kthvalue(magnitudes.numel() // 3).values
    for parameter in parameters:
        parameter.mul_(parameter.abs() > threshold)  # here


@torch.no_grad()
def normed(parameters: list[nn.Parameter]) -> None:
    """Divide each weight by its norm."""
    for parameter in parameters:
        parameter.div_(1 + parameter.norm())  # here


def normed_data(parameters: list[nn.Parameter]) -> None:
    """The same of data, with gradients on."""
    for parameter in parameters:
        parameter.data.div_(1 + parameter.data.norm())  # here


@torch.no_grad()
def normed_rows(parameters: list[nn.Parameter]) -> None:
    """Bound the norm of each row, which ranks hold in part."""
    for parameter in parameters:
        if parameter.dim() == 2:
            parameter.copy_(torch.renorm(parameter.detach(), 2, 0, 0.5))  # here


@torch.no_grad()
def trusted(parameters: list[nn.Parameter]) -> None:
    """Move along the gradient by the norm of the weight."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.sub_(0.1 * parameter.grad * parameter.norm())  # here


@torch.no_grad()
def broadcast(parameters: list[nn.Parameter]) -> None:
    """Give all ranks the weights of the first, as loops for replicas do."""
    for parameter in parameters:
        held: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
        dist.broadcast(held, 0)  # here


def averaged_gradients(parameters: list[nn.Parameter]) -> None:
    """Sum gradients over ranks, as loops for replicas do."""
    for parameter in parameters:
        grad: Any = parameter.grad
        dist.all_reduce(grad.to_local() if hasattr(grad, "to_local") else grad)  # here


REFUSED: tuple[tuple[Callable[[list[nn.Parameter]], Any], tuple[str, ...]], ...] = (
    (pruned, ("tp", "tp zero3")),
    (normed, ("tp", "tp zero3")),
    (normed_data, ("tp", "tp zero3")),
    (normed_rows, ("tp",)),
    (trusted, ("tp", "tp zero3")),
    (broadcast, ("tp", "zero3", "tp zero3")),
    (averaged_gradients, ("tp", "zero2", "zero3")),
)


@pytest.mark.parametrize("change", [change for change, _ in REFUSED])
def test_a_part_is_not_taken_for_the_whole(change: Any, threads: Threads) -> None:
    """Refused on all ranks at the line of the loop."""

    def body(rows: str, mesh: str) -> Any:
        program = build(make_plan(copy.deepcopy(NET), rows, mesh), batch(0))
        with pytest.raises(Refusal) as caught:
            steps(change)(program)
        span = caught.value.diagnostic.primary.span
        return caught.value.diagnostic.code, "# here" in span.source.line(span.line)

    for layout in dict(REFUSED)[change]:
        world = 4 if "," in LAYOUTS[layout][1] else 2
        assert threads.run(body, world, *LAYOUTS[layout]) == [("S622", True)] * world


@torch.no_grad()
def clipped(parameters: list[nn.Parameter]) -> None:
    """Change weights by elements, and by rows that ranks have in full."""
    for parameter in parameters:
        parameter.clamp_(-0.3, 0.3).mul_(parameter.abs() > 0.01)
        parameter.copy_(0.5 * parameter + 0.5 * parameter.detach().clone())
    up = parameters[3]
    up.div_(1 + up.norm(dim=1, keepdim=True))  # rows are split, columns are not


def all_reduced(parameters: list[nn.Parameter]) -> None:
    """Divide by a norm that ranks have summed."""
    for parameter in parameters[3:5]:
        square = parameter.data.square().sum()
        if dist.is_initialized():
            dist.all_reduce(square)
        parameter.data.div_(1 + square.sqrt())


def by_average(program: Any) -> None:
    """Train with averages of weights, in a copy and by hand, and take their mean."""
    module, optimizer = program.module, sgd(program)
    by_hand = [parameter.detach().clone() for parameter in module.parameters()]
    averages = AveragedModel(module)
    for seed in range(3):
        program.train_step(batch(seed))
        optimizer.step()
        averages.update_parameters(module)
        with torch.no_grad():
            for average, parameter in zip(by_hand, module.parameters()):
                average.lerp_(parameter, 0.1)
            module(**batch(seed))
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for parameter, *others in zip(
            *(m.parameters() for m in (module, averages.module, copied)), by_hand
        ):
            parameter.copy_(sum(others) / 3)


def by_own_loops(program: Any) -> None:
    """Train by a loop's own backward and a penalty of weights, between steps of the program."""
    optimizer = sgd(program)
    for seed in range(3):
        program.train_step(batch(seed))
        optimizer.step()
        optimizer.zero_grad()
        program.module(**batch(seed)).backward()
        optimizer.step()
        clipped(list(program.module.parameters()))
        program.eval_step(batch(seed))


def averaged_on_replicas(parameters: list[nn.Parameter]) -> None:
    """Average weights over ranks that hold the same, as local steps do."""
    if dist.is_initialized():
        groups = [dist.new_group([rank, rank + 2]) for rank in range(2)]
        for parameter in parameters:
            dist.all_reduce(parameter.data, group=groups[dist.get_rank() % 2])
            parameter.data /= 2


RIGHT = (
    *((loop, LAYOUTS["tp"]) for loop in (steps(clipped), steps(all_reduced), by_average)),
    (by_own_loops, LAYOUTS["tp"]),
    (steps(clipped), LAYOUTS["zero3"]),
    (steps(averaged_on_replicas), (LAYOUTS["tp"][0] + "zero(stage=0, over=dp)", "dp=2, tp=2")),
)


@pytest.mark.parametrize("loop, layout", RIGHT)
def test_what_is_right_is_taken(loop: Loop, layout: tuple[str, str], threads: Threads) -> None:
    """Elements, full rows, averages, and sums over ranks, as in the plain loop."""

    def body() -> Any:
        program = build(make_plan(copy.deepcopy(NET), *layout), batch(0))
        loop(program)
        state = program.state_dict()
        assert all(type(value) is Tensor for value in state.values())
        return state

    plain = Plain()
    loop(plain)
    for state in threads.run(body, 4 if "," in layout[1] else 2):
        torch.testing.assert_close(state, plain.state_dict(), rtol=1e-9, atol=1e-12)


@torch.no_grad()
def noisy(parameters: list[nn.Parameter]) -> None:
    """Add noise to weights."""
    for parameter in parameters:
        parameter.add_(torch.randn_like(parameter), alpha=0.01)


@torch.no_grad()
def drawn_again(parameters: list[nn.Parameter]) -> None:
    """Draw weights again."""
    nn.init.xavier_uniform_(parameters[3])


@pytest.mark.parametrize("change, name", [(noisy, "randn_like"), (drawn_again, "uniform_")])
def test_random_numbers(change: Any, name: str) -> None:
    """Draws for a part are other ones than those for the full tensor: warned of."""

    def body() -> None:
        steps(change)(build(make_plan(copy.deepcopy(NET), *LAYOUTS["tp"]), batch(0)))

    with pytest.warns(UserWarning, match=f"`{name}` is of this rank's shard of `up.weight`"):
        Threads().run(body, 2)
