"""Tests of archive: what one layout saved any other loads, or nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from schedlang import last_checkpoint
from schedlang.runtime.checkpointing import archive
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.program import Program
from tests.layouts import (
    Odd,
    batch_of,
    equal,
    former,
    last,
    odd_program,
    program_of,
    program_under,
    refused,
    seen,
    trained,
)
from tests.models import gpt2
from tests.ranks import run_ranks

WORLDS = {1: ["one"], 2: ["tp2", "dp2", "dp2z1", "dp2z3", "pp2"], 4: ["dp2tp2"]}


def _schedule(program: Program) -> None:
    """A learning rate that has moved away from where it began."""
    for group in program.optimizer.param_groups if program.optimizer is not None else ():
        group["lr"] *= 0.5


def _saving(rank: int, names: list[str], folder: str, odd: bool) -> dict[str, Any]:
    """Train two steps, save, train one more: what was saved, and what came after it."""
    with enter_modes(Float64()):
        return {name: _saved(name, folder, odd) for name in names}


def _saved(name: str, folder: str, odd: bool) -> tuple[Any, Any]:
    program, batch = program_under(name, odd), batch_of(odd)
    for seed in range(2):
        program.train_step(batch(seed))
    _schedule(program)
    program.save(f"{folder}/{name}")
    before = seen(program)
    program.train_step(batch(2))
    return before, program.state_dict()


def _loading(
    rank: int, names: list[str], folder: str, saved: list[str], odd: bool
) -> dict[tuple[str, str], Any]:
    with enter_modes(Float64()):
        return {
            (source, name): seen
            for name in names
            for source, seen in _loaded(name, folder, saved, odd)
        }


def _loaded(name: str, folder: str, saved: list[str], odd: bool) -> Iterator[tuple[str, Any]]:
    program, batch = program_under(name, odd, fresh=True), batch_of(odd)
    program.train_step(batch(9))
    for source in saved:
        program.load(f"{folder}/{source}")
        before = seen(program)
        program.train_step(batch(2))
        yield source, (before, program.state_dict())


def _close(one: Any, other: Any, at: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for key in one:
            _close(one[key], other[key], f"{at}/{key}")
    elif isinstance(one, Tensor):
        assert float((one - other).norm()) <= 1e-12 * float(other.norm()) + 1e-13, at
    else:
        assert one == other, at


def _crossed(folder: Path, odd: bool, worlds: dict[int, list[str]]) -> None:
    gpt2(layers=1)  # what it imports is imported once, before ranks are forked
    saved: dict[str, Any] = {}
    for world, names in worlds.items():
        ranks = run_ranks(world, _saving, names, str(folder), odd)
        saved |= ranks[0]
    for world, names in worlds.items():
        for found in run_ranks(world, _loading, names, str(folder), list(saved), odd):
            for (source, name), (before, after) in found.items():
                for part in ("state", "moments", "step"):
                    equal(before[part], saved[source][0][part], f"{source}->{name}/{part}")
                check = equal if source == name else _close
                check(after, saved[source][1], f"{source}->{name}+1")
                lrs = {1e-2 * 0.5, 2e-2 * 0.5}
                assert {g["lr"] for g in before["groups"].values()} <= lrs
                assert before["groups"], (source, name)


@pytest.mark.deep
def test_any_layout_loads_under_any_other(tmp_path: Path) -> None:
    """Parameters, buffers and moments are bitwise equal, and the next step is as if never saved."""
    _crossed(tmp_path, False, WORLDS)


@pytest.mark.deep
def test_sizes_that_nothing_divides(tmp_path: Path) -> None:
    """Uneven and empty slices, a scalar, a frozen weight and a buffer survive alike."""
    two = ["dp2", "dp2z1", "dp2z3", "pp2"]
    _crossed(tmp_path, True, {1: ["one"], 2: two, 4: ["pp2dp2"]})


def _only_model(rank: int, folder: str) -> tuple[Any, Any]:
    program = program_under("pp2", fresh=True, optimizer=None)
    program.load(f"{folder}/tp2")
    return program.state_dict(), program.step


def test_torchs_own_tools_read_it(tmp_path: Path) -> None:
    """dcp_to_torch_save gives nested whole tensors; a program without optimizer takes the model."""
    gpt2(layers=1)
    (saved, _), _ = (ranks["tp2"] for ranks in run_ranks(2, _saving, ["tp2"], str(tmp_path), False))
    dcp_to_torch_save(last(tmp_path / "tp2"), tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt")
    model = gpt2(layers=2)
    lost = model.load_state_dict(found["model"], strict=False)
    assert lost.missing_keys == ["lm_head.weight"] and not lost.unexpected_keys
    equal(dict(model.state_dict()), saved["state"])
    key = "transformer.h.0.attn.c_attn.weight"
    moment = found["optim"]["state"][key]["exp_avg"]
    assert torch.equal(moment, saved["moments"][key]["exp_avg"])
    for state, step in run_ranks(2, _only_model, str(tmp_path)):
        equal(state, saved["state"])
        assert step == 2


@pytest.mark.parametrize("before", [False, True], ids=["now", "before"])
@pytest.mark.parametrize("damage", ["truncated", "lost", "index", "emptied", "no index"])
def test_damage_changes_nothing(tmp_path: Path, damage: str, before: bool) -> None:
    """A checkpoint with lost bytes is refused, in the format of today and of before."""
    trained().save(tmp_path / "a")
    step = former(last(tmp_path / "a"), tmp_path / "b") if before else last(tmp_path / "a")
    assert last_checkpoint(step) == step
    odd_program().load(step)
    data, listing = step / "__0_0.distcp", step / (".metadata" if before else "schedlang.json")
    if damage == "truncated":
        data.write_bytes(data.read_bytes()[:-3000])
    elif damage == "lost":
        data.unlink()
    elif damage == "no index":
        listing.unlink()
        (step / ".metadata").unlink(missing_ok=True)
    else:
        listing.write_bytes(b"" if damage == "emptied" else listing.read_bytes()[:50])
    program = program_under("one", True, fresh=True)
    as_it_was = seen(program)
    for folder in (step, step if before else tmp_path / "a"):
        refused(lambda folder=folder: program.load(folder), "S633", "the program is unchanged")
    equal(seen(program), as_it_was)
    assert last_checkpoint(step) is None


class Wider(Odd):
    """One parameter more, one of another shape, or one of another dtype."""

    def __init__(self, change: str) -> None:
        super().__init__()
        if change == "more":
            self.extra = nn.Parameter(torch.ones(7, dtype=torch.float64))
        elif change == "less":
            del self.shift, self.head.also_shift
            self.shift = 0.0
        elif change == "shape":
            self.row = nn.Parameter(torch.randn(2, 7, dtype=torch.float64)[:, :7].sum())
        elif change == "dtype":
            self.gain.data = self.gain.data.float()
        elif change == "frozen":
            self.row.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("more", "S634", ["missing in the checkpoint: `extra`"]),
        ("less", "S634", ["not in the model: `shift`"]),
        ("shape", "S635", ["`row` was saved as float64[1, 7], but is float64[]"]),
        ("dtype", "S635", ["was saved as float64", "float32"]),
        ("frozen", "S636", ["not in the model: `row`"]),
    ],
)
def test_another_model(tmp_path: Path, change: str, code: str, words: list[str]) -> None:
    """Names, shapes and dtypes are compared before anything is changed."""
    trained().save(tmp_path / "a")
    program = program_of(Wider(change))
    before = seen(program)
    refused(lambda: program.load(tmp_path / "a"), code, *words)
    equal(seen(program), before)


def test_before_the_first_step(tmp_path: Path) -> None:
    """Momentum that did not exist when it was saved is gone after loading."""
    odd_program().save(tmp_path / "a")
    program = trained()
    program.load(tmp_path / "a")
    assert program.step == 0 and not program.optimizer_state()


def test_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of another version is refused."""
    monkeypatch.setattr(archive, "VERSION", 2)  # of the contents
    trained().save(tmp_path / "a")
    monkeypatch.undo()
    refused(lambda: odd_program().load(tmp_path / "a"), "S633", "its version is not")


@pytest.mark.parametrize("patient", [True, False])
def test_saves_that_are_quicker_than_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    """Each takes away what is being read: the load goes on until one stays, or its time is over."""
    saver, loader, read, left = trained(), odd_program(), archive._read, [20]
    saver.save(tmp_path / "a", keep=1)

    def outrun(*given: Any) -> Any:
        if left[0]:
            left[0] -= 1
            saver.step += 1
            saver.save(tmp_path / "a", keep=1)
        return read(*given)

    monkeypatch.setattr(archive, "_read", outrun)
    if patient:
        loader.load(tmp_path / "a")
        assert loader.step == saver.step and not left[0]
    else:
        monkeypatch.setattr(archive, "PATIENCE", 0.0)
        refused(lambda: loader.load(tmp_path / "a"), "S633")
        assert left == [19]
