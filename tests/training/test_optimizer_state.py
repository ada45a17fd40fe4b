"""Optimizer state in checkpoints: all of it is saved, and another optimizer is refused."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine import Threads
from tests.layouts import (
    OddModel,
    assert_equal,
    assert_refused,
    odd_program,
    points,
    program_of,
    program_state,
    program_under,
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


def test_groups_that_were_one(tmp_path: Path) -> None:
    """Options that differ here are refused where one group would set them alike; rates may."""

    def make(named: Any, **options: float) -> torch.optim.Optimizer:
        pairs = list(named)
        vectors = [p for n, p in pairs if "bias" in n]
        others = [p for n, p in pairs if "bias" not in n]
        return torch.optim.AdamW([{"params": vectors, **options}, {"params": others}], lr=1e-3)

    program_of(OddModel(), one_group).save(tmp_path / "a")
    for options in ({}, {"lr": 1e-4}):
        program_of(OddModel(), partial(make, **options)).load(tmp_path / "a")
    program = program_of(OddModel(), partial(make, weight_decay=0.0))
    assert_refused(lambda: program.load(tmp_path / "a"), "S636", "weight_decay")


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


class _Falling(torch.optim.Optimizer):
    """Plain descent whose rate falls with a count that belongs to no parameter."""

    def __init__(self, parameters: Any, lr: Any = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.count = 0

    def counted(self) -> int:
        self.count += 1
        return self.count

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        count = self.counted()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * group["lr"] / count)


class InState(_Falling):
    """The count is an entry of the state."""

    def counted(self) -> int:
        self.state["all"]["count"] = count = self.state["all"].get("count", 0) + 1
        return int(count)


class InStateDict(_Falling):
    """The count is an attribute, which `state_dict` of the class adds."""

    def state_dict(self) -> Any:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "count"})


class Listed(torch.optim.Optimizer):
    """Momenta in a list."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                momenta: list[Tensor] = self.state[parameter].setdefault(
                    "momenta", [torch.zeros_like(parameter)]
                )
                momenta[0].mul_(0.9).add_(parameter.grad)
                parameter.sub_(0.1 * momenta[0])


def made_by(kind: Any, **settings: Any) -> Any:
    return lambda named: kind([p for _, p in named], **settings)


OTHER_STATE: dict[str, Any] = {
    "state of no parameter": made_by(InState),
    "entries of an own state_dict": made_by(InStateDict),
    "lists": made_by(Listed),
    "a rate of numpy": made_by(torch.optim.AdamW, lr=1e-2 * np.sqrt(2.0)),
    "betas of numpy": made_by(torch.optim.AdamW, betas=(np.float64(0.8), np.float64(0.9))),
    "a dtype in a group": lambda named: torch.optim.SGD(
        [{"params": [p for _, p in named], "kept_in": torch.bfloat16}], lr=0.1
    ),
}


@pytest.mark.parametrize("name", OTHER_STATE)
def test_state_beside_tensors(tmp_path: Path, name: str) -> None:
    """What torch's `state_dict` would keep is loaded, too: the next step is bitwise the same."""
    program, loaded = (program_of(OddModel(), OTHER_STATE[name]) for _ in range(2))
    for seed in range(2):
        program.train_step(points(seed))
    program.save(tmp_path / "a")
    loaded.train_step(points(5))
    loaded.load(tmp_path / "a")
    for program_run in (program, loaded):
        program_run.train_step(points(2))
    assert_equal(program_state(loaded)["state"], program_state(program)["state"])


def step_and_save(path: Path, optimizer: Any, loaded: Path | None = None) -> None:
    """On this rank: load, train a step under ZeRO and save."""
    program = program_under("dp2z3", True, optimizer=optimizer)
    if loaded is not None:
        program.load(loaded)
    program.train_step(points(0))
    program.save(path)


def test_numbers_of_numpy_on_two_ranks(tmp_path: Path, threads: Threads) -> None:
    """A rate of numpy is compared among ranks, saved under slices, and loaded by one rank."""
    optimizer = OTHER_STATE["a rate of numpy"]
    threads.run(step_and_save, 2, tmp_path / "a", optimizer)
    program = program_of(OddModel(), optimizer)
    program.load(tmp_path / "a")
    assert program.optimizer is not None
    assert program.optimizer.param_groups[0]["lr"] == 1e-2 * np.sqrt(2.0)


def test_full_tensors_in_a_list_and_a_shard(tmp_path: Path, threads: Threads) -> None:
    """One rank loads what it has saved; a rank with slices cannot take its part (S636)."""
    program = program_of(OddModel(), OTHER_STATE["lists"])
    program.train_step(points(0))
    program.save(tmp_path / "a")
    load = (tmp_path / "b", OTHER_STATE["lists"], tmp_path / "a")
    assert_refused(lambda: threads.run(step_and_save, 2, *load), "S636", "list of full tensors")


def test_a_key_that_is_no_text(tmp_path: Path) -> None:
    """It is refused by the parameter's name, as the optimizer's and not the disk's."""
    program = trained_program()
    assert program.optimizer is not None
    program.optimizer.state[program.assembly.parameters["row"]][0] = torch.zeros(3)
    assert_refused(lambda: program.save(tmp_path / "a"), "S637", "`row` has the key 0")
