"""Programs whose step is no gradient of the batch, beside a simulation of it: local steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.simulated_step import SimulatedStep
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches.collectives import world_size
from tests.judging.net import batch_part
from tests.judging.test_reduction_dtype import by_hand
from tests.judging.test_shard_steps import judge_program, layers, numbers, squared

WORKERS, LOCAL_STEPS = 2, 3


def local_steps(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    """Train on the thirds of a worker's rows; return the mean loss."""
    total = torch.zeros((), dtype=torch.float64)
    for number in range(LOCAL_STEPS):
        part = batch_part(batch, number, LOCAL_STEPS)
        optimizer.zero_grad()
        value = squared(model(part["input"]), part)
        value.backward()
        optimizer.step()
        total += value.detach() / LOCAL_STEPS
    return total


def simulate(model: nn.Module) -> Any:
    """Return a step of DiLoCo, with one worker after the other."""
    workers = [copy.deepcopy(model) for _ in range(WORKERS)]
    optimizers = [torch.optim.AdamW(w.parameters(), lr=1e-3) for w in workers]

    def step(batch: Any) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for number, worker in enumerate(workers):
            worker.load_state_dict(model.state_dict())
            part = batch_part(batch, number, WORKERS)
            total += local_steps(worker, part, optimizers[number]) / WORKERS
        for p, *others in zip(model.parameters(), *(w.parameters() for w in workers)):
            p.grad = torch.stack([p.detach() - q.detach() for q in others]).mean(0)
        return total

    return step


def diloco(original: Any = simulate, forgets: bool = False, unsent: str = "") -> Any:
    """Return ranks that step on their own, and average what they moved; the outer optimizer is the
    judge's."""

    def program(model: Any) -> TrainingProgram:
        kept = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(batch: Any) -> Tensor:
            before = [p.detach().clone() for p in model.parameters()]
            inner = torch.optim.AdamW(model.parameters(), lr=1e-3) if forgets else kept
            loss = local_steps(model, batch_part(batch, dist.get_rank(), world_size()), inner)
            for (name, p), start in zip(model.named_parameters(), before):
                moved = start - p.detach()
                if name != unsent:
                    dist.all_reduce(moved)
                    moved /= world_size()
                p.data.copy_(start)
                p.grad = moved
            return loss

        return TrainingProgram(model, step, original=original)

    return program


def test_local_steps_beside_their_simulation(pool: Pool) -> None:
    """Right ones pass; lost moments and a missing average fail, with the place."""
    report = judge_program(pool, diloco())
    assert report.ok and "original" in dict(report.facts), str(report)
    report = judge_program(pool, diloco(unsent="2.bias"))
    text = "1 of 4 (`2.bias`): ranks differ and their mean is right: they are not averaged"
    assert dict(report.localised)["gradients"] == text, str(report)
    report = judge_program(pool, diloco(forgets=True))
    text = "what step 0 leaves is wrong (weights, moments, counts)"
    assert text in dict(report.localised)["loss"], str(report)


def test_local_steps_without_a_simulation(pool: Pool) -> None:
    """The report says that the original takes other steps, and how to simulate them."""
    report = judge_program(pool, diloco(original=None))
    assert report.exit_code == 1 and report.localised[0][0] == "step", str(report)
    assert "steps AdamW" in report.localised[0][1] and "original=" in report.localised[0][1]


def test_a_simulation_in_a_low_dtype_shows_little(pool: Pool) -> None:
    """Local steps are roundings there: the report says so."""
    report = judge_program(pool, diloco(), dtype="bfloat16")
    assert report.ok and any("`original` in bfloat16" in gap.condition for gap in report.gaps)


def returning(result: Any) -> Any:
    """Return a simulation whose step returns something."""
    return lambda model: lambda batch: result


def adding(model: Any) -> Any:
    """Add a parameter to the model."""
    model.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    return lambda batch: 1.0


@pytest.mark.parametrize(
    ("original", "message"),
    [
        (lambda model: lambda batch: batch["labels"], "`original` raises KeyError"),
        (len, "`original` .* returns an int, not a function"),
        (returning(None), "the step of `original` returns None, not the loss"),
        (returning((None, None)), "the step of `original` returns None, not the loss"),
        (returning((1, 2, 3)), "the step of `original` returns a tuple of 3, not the loss"),
        (returning("x"), "the step of `original` returns a str, not the loss"),
        (returning(torch.zeros(3)), "the step of `original` returns a Tensor of 3, not the loss"),
        (adding, "`original` adds, removes or replaces parameters: `extra`"),
    ],
)
def test_simulations_that_are_none(original: Any, message: str) -> None:
    """They are refused, with what is wrong with them."""
    with pytest.raises(Refusal, match=message):
        SimulatedStep(original, RunRecord(), layers()).forward_backward(numbers(0), range(6))


def trains(model: Any) -> Any:
    """Return a step that steps the weights itself."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> Tensor:
        value = squared(model(batch["input"]), batch)
        value.backward()
        optimizer.step()
        return value

    return step


def test_a_simulation_that_trains(pool: Pool) -> None:
    """The report says that the original's step moves the weights, not that an optimizer differs."""
    report = judge_program(pool, by_hand(torch.float64, original=trains))
    (head, text), *others = report.localised
    assert report.exit_code == 1 and head == "original" and not others, str(report)
    assert "changes `0.bias`, `0.weight`, `2.bias`, `2.weight`" in text
