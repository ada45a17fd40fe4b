"""Tests of moments: whatever an optimizer keeps is kept, and a different optimizer gets nothing."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.layouts import Odd, equal, odd_program, points, program_of, refused, seen, trained


def _in_one_group(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-3)


def _sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=1e-3, momentum=0.9)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": torch.tensor(1e-2), "amsgrad": True},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Adagrad": {},
    "NAdam": {},
    "RMSprop": {"centered": True},
    "Adafactor": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(tmp_path: Path, name: str) -> None:
    """Whatever an optimizer keeps for a parameter, the next step is bitwise the same."""

    def make(named: Any) -> torch.optim.Optimizer:
        options = copy.deepcopy(OPTIMIZERS[name])
        made: torch.optim.Optimizer = getattr(torch.optim, name)([p for _, p in named], **options)
        return made

    program, other = program_of(Odd(), make), program_of(Odd(), make)
    program.train_step(points(0))
    program.save(tmp_path / "a")
    other.load(tmp_path / "a")
    for one in (program, other):
        one.train_step(points(1))
    equal(seen(other), seen(program))


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [(_sgd, ["`AdamW`", "`SGD`"]), (_in_one_group, ["parameter groups differ"])],
)
def test_another_optimizer(tmp_path: Path, optimizer: Any, words: list[str]) -> None:
    """A state that this optimizer would ignore or mix up is refused."""
    trained().save(tmp_path / "a")
    refused(lambda: program_of(Odd(), optimizer).load(tmp_path / "a"), "S636", *words)
    program_of(Odd(), None).load(tmp_path / "a")


def test_a_checkpoint_without_optimizer(tmp_path: Path) -> None:
    """It does not fit a program that has one."""
    program_of(Odd(), None).save(tmp_path / "a")
    refused(lambda: odd_program().load(tmp_path / "a"), "S636", "saved without an optimizer")


def test_state_that_cannot_be_saved(tmp_path: Path) -> None:
    """An object in the optimizer's state is refused by name, and nothing is written."""
    program = trained()
    assert program.optimizer is not None
    program.optimizer.state[program.assembly.parameters["row"]]["hook"] = partial(print)
    refused(lambda: program.save(tmp_path / "a"), "S637", "`row.hook`")
    assert not list(tmp_path.iterdir())
