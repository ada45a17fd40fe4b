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
from torch.distributed._functional_collectives import all_reduce
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


def by_each(change: Callable[[nn.Parameter, Tensor], Any]) -> Loop:
    """Return a loop that changes the gradient of each matrix."""

    def loop(program: Any) -> None:
        def changes(parameters: list[nn.Parameter]) -> None:
            for parameter in parameters:
                if parameter.dim() == 2:
                    assert parameter.grad is not None
                    change(parameter, parameter.grad)

        steps(program, changes)

    return loop


def stepped(program: Any) -> None:
    """Step on gradients that were made from a number of the rank's, before it had the module."""
    program.train_step(batch(0))
    for parameter in named(program):
        grad: Any = parameter.grad
        parameter.grad = grad / grad.norm()
    sgd(program).step()  # here


def sliced_norm(program: Any) -> None:
    """Scale slices of a shard by their own norms."""

    def scale(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            grad: Any = parameter.grad
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            local.mul_(1 / (1 + local.norm()))  # here

    steps(program, scale)


def compiled(program: Any) -> None:
    """Scale weights by norms in compiled code."""
    scale = torch.compile(lambda p, g: p.mul_(1 / (1 + g.norm())), backend="eager")  # here

    by_each(scale)(program)


# what names a tuple, reduces other dims than its argument, transposes, or writes elsewhere
WRONG = (
    by_each(lambda p, g: g.div_(g.abs().max(dim=0).values + g.abs().max(dim=1).values[0])),  # here
    by_each(lambda p, g: g.copy_(torch.linalg.svd(g, full_matrices=False).U @ g[:6])),  # here
    by_each(lambda p, g: g.copy_(nn.functional.normalize(g) + g.renorm(2, 1, 0.1))),  # here
    by_each(lambda p, g: g.copy_(g.log_softmax(0) + g.cumprod(1))),  # here
    by_each(lambda p, g: g.T.div_(g.T.norm(dim=1, keepdim=True))),  # here
    by_each(lambda p, g: torch.div(g, g.norm(), out=g)),  # here
    by_each(lambda p, g: p.data.copy_(p.data - g / g.norm())),  # here
    by_each(lambda p, g: setattr(p, "data", p.data - g / g.norm())),  # here
    by_each(lambda p, g: p.add_(torch.zeros_like(g).add_(g / g.norm()))),  # here
)

REFUSED: tuple[tuple[Loop, tuple[str, ...]], ...] = (
    (sharpness, ("tp", "tp zero3")),
    (squares, ("tp", "tp zero3")),
    (centralised, ("tp", "tp zero3")),
    (own_backward, ("tp",)),
    (stepped, ("tp", "tp zero3")),
    (sliced_norm, ("tp", "tp zero3")),
    (compiled, ("tp",)),
    *((loop, ("tp",)) for loop in WRONG),
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


def by_maximum(program: Any) -> list[Any]:
    """Scale by the largest element of all ranks: on one of them it is its own."""

    def change(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            largest = parameter.grad.abs().max()
            if isinstance(parameter.grad, GradientPart):
                dist.all_reduce(largest.view(1), op=dist.ReduceOp.MAX)
            parameter.grad.mul_(0.01 / largest)

    steps(program, change)
    return []


def overflows(program: Any) -> list[Any]:
    """Count elements that are not finite: none on all ranks."""

    def change(parameters: list[nn.Parameter]) -> None:
        bad: Any = sum((~torch.isfinite(p.grad)).sum() for p in parameters if p.grad is not None)
        if any(isinstance(parameter.grad, GradientPart) for parameter in parameters):
            dist.all_reduce(bad)
        for parameter in parameters:
            parameter.grad.mul_((bad == 0).to(torch.float64))  # type: ignore[union-attr]

    steps(program, change)
    return []


def gathered(program: Any) -> list[Any]:
    """Scale by the norm of gathered parts, which are parts no more."""

    def change(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            grad: Any = parameter.grad
            full = [grad.clone(), torch.empty_like(grad)]
            if isinstance(grad, GradientPart):
                dist.all_gather(full, grad)
            else:
                full = full[:1]
            grad.div_(1 + torch.stack(full).norm())

    steps(program, change)
    return []


def summed_by_function(program: Any) -> list[Any]:
    """Scale by a sum over ranks of a collective that returns it."""
    world: Any = dist.group.WORLD

    def change(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            grad: Any = parameter.grad
            total = grad.square().sum()
            if isinstance(grad, GradientPart):
                total = all_reduce(total, "sum", world)
                largest = grad.abs().max()
                functions: Any = torch.ops._c10d_functional
                functions.all_reduce_(largest, "max", world.group_name)
                functions.wait_tensor(largest)
            else:
                largest = grad.abs().max()
            grad.div_(largest)
            grad.div_(1 + total)

    steps(program, change)
    return []


def logged(program: Any) -> list[Any]:
    """Take numbers for a log that read a part and numbers of it."""

    def log(p: nn.Parameter, g: Tensor) -> None:
        float((g.abs() > 3 * g.std()).double().mean() + (g - g.mean()).abs().max())
        torch.histc(g, 4, g.min(), g.max())  # type: ignore[arg-type]
        g.norm().to(p)
        g.clone().div_(g.norm()).max().item()

    by_each(log)(program)
    return []


def by_rows(program: Any) -> list[Any]:
    """Change rows that ranks have in full, and each element by another."""

    def change(parameters: list[nn.Parameter]) -> None:
        weight, grad = parameters[3], parameters[3].grad
        assert grad is not None and weight.shape[1] == 6
        grad.copy_(nn.functional.normalize(grad, dim=1) + grad.renorm(2, 0, 0.01))
        grad.mul_(torch.cosine_similarity(grad, weight.detach(), 1)[:, None])
        grad.T.div_(1 + grad.T.norm(dim=0, keepdim=True))
        grad.copy_(grad @ torch.ones(6, 6, dtype=torch.float64) + grad.sort(dim=1).values)
        grad.copy_(torch.max(grad, torch.zeros_like(grad)))
        grad.div_(1 + grad.reshape(len(grad), 2, 3).flatten(1).norm(dim=1, keepdim=True))  # warns

    steps(program, change)
    return []


def compiled_clamp(program: Any) -> list[Any]:
    """Clip gradients and update an average in compiled code."""
    clamp = torch.compile(lambda a, g: a.lerp_(g.clamp(-0.01, 0.01), 0.5), backend="aot_eager")
    averages = [torch.zeros_like(parameter) for parameter in named(program)]

    def change(parameters: list[nn.Parameter]) -> None:
        for average, parameter in zip(averages, parameters):
            parameter.grad = clamp(average, parameter.grad).clone()

    steps(program, change)
    return []


RIGHT = (
    *(by_elements, all_reduced, by_maximum, overflows, gathered, summed_by_function, logged),
    *(by_rows, compiled_clamp),
)


@pytest.mark.filterwarnings("ignore:.*this rank's shard")
@pytest.mark.parametrize("loop", RIGHT)
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


def test_a_part_for_numpy() -> None:
    """Functions of numpy are not followed: a warning says so."""

    def body() -> None:
        program = build(make_plan(copy.deepcopy(NET), *LAYOUTS["tp"]), batch(0))
        by_each(lambda p, g: g.numpy().sum())(program)

    with pytest.warns(UserWarning, match="`numpy` is of this rank's shard of `up.weight`"):
        Threads().run(body, 2)


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
