"""Optimizer state in checkpoints: all of it is saved, and another optimizer is refused."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.layouts import (
    OddModel,
    assert_equal,
    assert_refused,
    odd_program,
    points,
    program_of,
    program_state,
    trained_program,
)


def one_group(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-3)


def sgd(named: Any) -> torch.optim.Optimizer:
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
    """Whatever state an optimizer has for a parameter, the next step is bitwise the same."""

    def make(named: Any) -> torch.optim.Optimizer:
        options = copy.deepcopy(OPTIMIZERS[name])
        made: torch.optim.Optimizer = getattr(torch.optim, name)([p for _, p in named], **options)
        return made

    program, loaded = program_of(OddModel(), make), program_of(OddModel(), make)
    program.train_step(points(0))
    program.save(tmp_path / "a")
    loaded.load(tmp_path / "a")
    for program_run in (program, loaded):
        program_run.train_step(points(1))
    assert_equal(program_state(loaded), program_state(program))


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [(sgd, ["`AdamW`", "`SGD`"]), (one_group, ["parameter groups differ"])],
)
def test_another_optimizer(tmp_path: Path, optimizer: Any, words: list[str]) -> None:
    """A state that this optimizer would ignore or misread is refused."""
    trained_program().save(tmp_path / "a")
    assert_refused(lambda: program_of(OddModel(), optimizer).load(tmp_path / "a"), "S636", *words)
    program_of(OddModel(), None).load(tmp_path / "a")


def test_a_checkpoint_without_optimizer(tmp_path: Path) -> None:
    """It does not fit a program with an optimizer."""
    program_of(OddModel(), None).save(tmp_path / "a")
    assert_refused(lambda: odd_program().load(tmp_path / "a"), "S636", "saved without an optimizer")


def test_state_that_cannot_be_saved(tmp_path: Path) -> None:
    """An object in the optimizer's state is refused by name, and nothing is written."""
    program = trained_program()
    assert program.optimizer is not None
    program.optimizer.state[program.assembly.parameters["row"]]["hook"] = partial(print)
    assert_refused(lambda: program.save(tmp_path / "a"), "S637", "`row.hook`")
    assert not list(tmp_path.iterdir())
