"""Gradients of shards in users' own loops: numbers of a rank's part are followed, and refused."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import (
    ZeroRedundancyOptimizer,
    _apply_optimizer_in_backward,
)

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from schedlang.runtime.shard_gradients import GradientPart
from tests.engine import Threads
from tests.proofs import make_plan
from tests.training.test_plain_loops import LAYOUTS, NET, Plain, batch, sgd

Loop = Callable[[Any], Any]


def named(program: Any) -> list[nn.Parameter]:
    """Return the parameters of a program's module."""
    return list(program.module.parameters())


def steps(program: Any, change: Callable[[list[nn.Parameter]], None]) -> None:
    """Train three steps, and change the gradients of each before the update."""
    optimizer = sgd(program)
    for seed in range(3):
        program.train_step(batch(seed))
        with torch.no_grad():
            change(named(program))
        optimizer.step()


def sharpness(program: Any) -> None:
    """Move weights along the gradient by its norm, as sharpness-aware minimisation does."""

    def move(parameters: list[nn.Parameter]) -> None:
        norm = torch.stack([p.grad.norm(2) for p in parameters if p.grad is not None]).norm()
        for parameter in parameters:
            parameter.add_(parameter.grad * (0.05 / (norm + 1e-12)))  # here

    steps(program, move)


def squares(program: Any) -> None:
    """Clip by a norm of squares."""

    def clip(parameters: list[nn.Parameter]) -> None:
        total = sum(p.grad.pow(2).sum() for p in parameters if p.grad is not None) ** 0.5
        for parameter in parameters:
            parameter.grad.mul_(0.05 / total)  # here

    steps(program, clip)


def centralised(program: Any) -> None:
    """Take the mean of each row off the gradient."""

    def centralise(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.dim() > 1:
                mean = parameter.grad.mean(dim=1, keepdim=True)  # type: ignore[union-attr]
                parameter.grad.sub_(mean)  # here

    steps(program, centralise)


def own_backward(program: Any) -> None:
    """The same after a backward of the loop."""
    program.module(**batch(0)).backward()
    for parameter in named(program):
        parameter.grad /= parameter.grad.abs().max()  # here


def shared_state(program: Any) -> None:
    """Update by torch's optimizer that broadcasts what each rank has updated."""
    group = dist.group.WORLD
    ZeroRedundancyOptimizer(named(program), torch.optim.SGD, group, lr=0.1).step()  # here


def in_backward(program: Any) -> None:
    """Step in the backward by hooks on nodes, which a step does not see."""
    _apply_optimizer_in_backward(torch.optim.SGD, named(program), {"lr": 0.1})
    program.train_step(batch(0))  # here


def wrapped(program: Any) -> None:
    """Wrap the module as loops for several ranks do: the first rank's values go to all."""
    nn.parallel.DistributedDataParallel(program.module)  # here


def wrapped_inside(program: Any) -> None:
    """Wrap a module that contains it."""
    nn.parallel.DistributedDataParallel(nn.Sequential(program.module))  # here


REFUSED: tuple[tuple[Loop, tuple[str, ...]], ...] = (
    (sharpness, ("tp", "tp zero3")),
    (squares, ("tp", "tp zero3")),
    (centralised, ("tp", "tp zero3")),
    (own_backward, ("tp",)),
    (shared_state, ("tp", "zero2")),
    (in_backward, ("dp", "zero3")),
    (wrapped, ("tp", "zero2")),
    (wrapped_inside, ("tp", "zero2")),
)


@pytest.mark.parametrize("loop", [loop for loop, _ in REFUSED])
def test_a_part_is_not_taken_for_the_whole(loop: Loop, threads: Threads) -> None:
    """Refused on all ranks at the line of the loop."""

    def body(rows: str, mesh: str) -> Any:
        program = build(make_plan(copy.deepcopy(NET), rows, mesh), batch(0))
        with pytest.raises(Refusal) as caught:
            loop(program)
        span = caught.value.diagnostic.primary.span
        return caught.value.diagnostic.code, "# here" in span.source.line(span.line)

    code = "S617" if loop in (wrapped, wrapped_inside) else "S622"
    for layout in dict(REFUSED)[loop]:
        world = 4 if "," in LAYOUTS[layout][1] else 2
        assert threads.run(body, world, *LAYOUTS[layout]) == [(code, True)] * world


def test_a_built_optimizer_that_broadcasts(threads: Threads) -> None:
    """It is refused where ranks have other parts, and right where each has all."""

    def make(named_params: Any) -> Any:
        parameters = [parameter for _, parameter in named_params]
        return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, dist.group.WORLD, lr=0.1)

    def body(rows: str, mesh: str) -> Any:
        program = build(make_plan(copy.deepcopy(NET), rows, mesh), batch(0), optimizer=make)
        return [program.train_step(batch(seed)) for seed in range(3)]

    plain = Plain()
    optimizer, losses = torch.optim.SGD(plain.module.parameters(), lr=0.1), []
    for seed in range(3):
        losses.append(plain.train_step(batch(seed)))
        optimizer.step()
    found = threads.run(body, 2, *LAYOUTS["dp"])
    torch.testing.assert_close([torch.as_tensor(x) for x in found[0]], losses)
    for layout in ("tp", "zero2"):
        with pytest.raises(Exception, match="S622"):
            threads.run(body, 2, *LAYOUTS[layout])


def by_elements(program: Any) -> list[Any]:
    """Clip, mask, copy and average gradients element by element, and by rows that are whole."""
    momentum = [torch.zeros_like(parameter) for parameter in named(program)]

    def change(parameters: list[nn.Parameter]) -> None:
        nn.utils.clip_grad_value_(parameters, 0.05)
        for parameter, kept in zip(parameters, momentum):
            grad = parameter.grad
            assert grad is not None
            kept.mul_(0.9).add_(grad)
            parameter.grad = torch.where(grad.abs() > 0.01, 0.5 * grad + copy.deepcopy(kept), grad)
        up = parameters[3]
        assert up.shape[1] == 6 and up.grad is not None  # rows are split, columns are not
        up.grad.sub_(up.grad.mean(dim=1, keepdim=True))

    steps(program, change)
    return momentum


def all_reduced(program: Any) -> list[Any]:
    """Clip by a norm whose squares the loop sums over the ranks that share a tensor."""

    def change(parameters: list[nn.Parameter]) -> None:
        squares = []
        for parameter in parameters:
            assert parameter.grad is not None
            squares.append(parameter.grad.square().sum())
            if isinstance(parameter.grad, GradientPart):
                dist.all_reduce(squares[-1])
        scale = (0.05 / torch.stack(squares).sum().sqrt()).clamp(max=1.0)
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(scale)

    steps(program, change)
    return []


@pytest.mark.parametrize("loop", [by_elements, all_reduced])
def test_what_is_right_is_taken(loop: Loop, threads: Threads) -> None:
    """Elements, rows that a rank has in full, and sums over ranks, as in the plain loop."""

    def body() -> Any:
        program = build(make_plan(copy.deepcopy(NET), *LAYOUTS["tp"]), batch(0))
        loop(program)
        return program.state_dict()

    plain = Plain()
    loop(plain)
    for state in threads.run(body, 2):
        torch.testing.assert_close(state, plain.state_dict(), rtol=1e-9, atol=1e-12)


def test_a_number_for_a_log() -> None:
    """It has this rank's value, and a warning says so once a line; copies and files are plain."""

    def body() -> Any:
        program = build(make_plan(copy.deepcopy(NET), *LAYOUTS["tp"]), batch(0))
        module: Any = program.module
        program.train_step(batch(0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            total = sum(p.grad.norm().item() ** 2 for p in module.parameters())
        file, grad = io.BytesIO(), module.up.weight.grad
        torch.save([grad, {"kept": grad.clone()}], file)
        file.seek(0)
        saved = torch.load(file)
        full = program.gradients()["up.weight"]
        texts = [str(warning.message) for warning in caught]
        kinds = type(saved[0]), type(saved[1]["kept"]), type(copy.deepcopy(grad)), type(full)
        return total, texts, kinds, torch.equal(saved[0], grad)

    for total, texts, kinds, equal in Threads().run(body, 2):
        assert total > 0 and kinds == (Tensor,) * 4 and equal
        assert texts and "this rank's shard of `up.weight`" in texts[0]
