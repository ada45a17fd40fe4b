"""A step of an optimizer after a step of a program that has made it: refused."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from tests.engine import Threads
from tests.proofs import make_plan
from tests.training.test_plain_loops import ALL, LAYOUTS, NET, batch


def built(rows: str, mesh: str) -> Any:
    """Return a program with an optimizer."""

    def make(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9)

    return build(make_plan(copy.deepcopy(NET), rows, mesh), batch(0), optimizer=make)


def refused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step is refused at the line of the call."""
    with pytest.raises(Refusal, match="a second time") as caught:
        optimizer.step()  # here
    span = caught.value.diagnostic.primary.span
    return caught.value.diagnostic.code == "S622" and "# here" in span.source.line(span.line)


@pytest.mark.parametrize("layout", ALL)
def test_a_second_step(layout: str, threads: Threads) -> None:
    """It would move weights twice by one gradient; by the same optimizer, or by one of a loop."""

    def body(rows: str, mesh: str) -> Any:
        program = built(rows, mesh)
        found = []
        for seed in range(3):
            program.train_step(batch(seed))
            found.append(refused(program.optimizer))
        own = torch.optim.SGD(program.module.parameters(), lr=0.1)
        for seed in range(2):
            program.train_step(batch(seed))
            found += [refused(own), refused(program.optimizer)]
        return all(found), program.state_dict()

    plain = copy.deepcopy(NET)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for seed in (0, 1, 2, 0, 1):
        optimizer.zero_grad()
        plain(**batch(seed)).backward()
        optimizer.step()
    assert_found_and_equal(threads, body, layout, plain)


def assert_found_and_equal(
    threads: Threads, body: Any, layout: str, plain: torch.nn.Module
) -> None:
    """On each rank `body` found what it looked for, and its state is that of the plain loop."""
    world = 4 if "," in LAYOUTS[layout][1] else 2
    for found, state in threads.run(body, world, *LAYOUTS[layout]):
        assert found
        torch.testing.assert_close(state, plain.state_dict(), rtol=1e-9, atol=1e-12)


def test_changed_gradients(threads: Threads) -> None:
    """A loop that has changed them, as by clipping, is warned."""

    def body() -> None:
        program = built(*LAYOUTS["dp"])
        program.train_step(batch(0))
        torch.nn.utils.clip_grad_value_(program.optimizer.param_groups[0]["params"], 1e-3)
        program.optimizer.step()

    with pytest.warns(UserWarning, match="a second time"):
        threads.run(body, 2)


def test_backwards_of_a_loop(threads: Threads) -> None:
    """Gradients of a backward of its own are new; also beside steps of the program."""

    def body() -> Any:
        program = built(*LAYOUTS["tp"])
        module, optimizer = program.module, program.optimizer
        for seed in range(3):
            optimizer.zero_grad()
            module(**batch(seed)).backward()
            optimizer.step()
            program.train_step(batch(seed))
        return program.state_dict()

    plain = copy.deepcopy(NET)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for seed in (0, 0, 1, 1, 2, 2):
        optimizer.zero_grad()
        plain(**batch(seed)).backward()
        optimizer.step()
    for state in threads.run(body, 2):
        torch.testing.assert_close(state, plain.state_dict(), rtol=1e-9, atol=1e-12)


def own_part(name: str, named: Any) -> torch.optim.Optimizer:
    """Return an optimizer of the parameters of which a name is a part."""
    return torch.optim.SGD([p for n, p in named if name in n], lr=0.1)


@pytest.mark.parametrize("layout", ALL)
def test_an_optimizer_of_other_parameters(layout: str, threads: Threads) -> None:
    """It steps with gradients that no step has used; one that shares a parameter is refused."""
    layers = [name for name, _ in NET.named_children()]

    def body(rows: str, mesh: str) -> Any:
        plan = make_plan(copy.deepcopy(NET), rows, mesh)
        program = build(plan, batch(0), optimizer=lambda named: own_part(layers[0], named))
        other = own_part(layers[-1], program.module.named_parameters())
        for seed in range(2):
            program.train_step(batch(seed))
            other.step()
        state = program.state_dict()
        new = torch.nn.Parameter(torch.ones(2))
        both = torch.optim.SGD([new, *program.module.parameters()], lr=0.1)
        return refused(both), state

    plain = copy.deepcopy(NET)
    optimizers = [own_part(name, plain.named_parameters()) for name in (layers[0], layers[-1])]
    for seed in range(2):
        plain.zero_grad()
        plain(**batch(seed)).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_found_and_equal(threads, body, layout, plain)


def test_closures(threads: Threads) -> None:
    """A closure that makes new gradients is taken; one that steps the program is refused."""

    def body() -> Any:
        program = built(*LAYOUTS["tp"])
        module, optimizer = program.module, program.optimizer

        def renew() -> Any:
            optimizer.zero_grad()
            module(**batch(1)).backward()

        program.train_step(batch(0))
        optimizer.step(renew)
        state = program.state_dict()
        with pytest.raises(Refusal, match="a second time"):
            optimizer.step(lambda: program.train_step(batch(0)))
        program.train_step(batch(0))
        with pytest.raises(Refusal, match="a second time"):
            optimizer.step(closure=lambda: None)
        return state

    plain = copy.deepcopy(NET)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for seed in range(2):
        optimizer.zero_grad()
        plain(**batch(seed)).backward()
        optimizer.step()
    for state in threads.run(body, 2):
        torch.testing.assert_close(state, plain.state_dict(), rtol=1e-9, atol=1e-12)


def test_files_of_shards(threads: Threads) -> None:
    """A file of parameters that a loop writes can be read as all files of tensors can."""

    def body() -> bool:
        program = built(*LAYOUTS["tp"])
        named = dict(program.module.named_parameters())
        torch.save(named, file := io.BytesIO())
        file.seek(0)
        read = torch.load(file, weights_only=True)
        return all(torch.equal(read[name], named[name]) for name in named)

    assert all(threads.run(body, 2))
