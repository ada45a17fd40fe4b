"""Checkpoints: what one layout saved any other loads; a refused load changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from schedlang import last_checkpoint
from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from schedlang.runtime.checkpointing import archive
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.program import Program
from tests.engine import Threads
from tests.layouts import (
    SEED,
    OddModel,
    adamw,
    assert_equal,
    assert_refused,
    batch_of,
    newest_checkpoint,
    odd_program,
    points,
    program_of,
    program_state,
    program_under,
    save_old_format,
    trained_program,
)
from tests.models import gpt2
from tests.proofs import make_plan
from tests.ranks import run_ranks

WORLDS = {1: ["one"], 2: ["tp2", "dp2", "dp2z1", "dp2z3", "pp2"], 4: ["dp2tp2"]}


def halve_rates(program: Program) -> None:
    """Halve all learning rates, as a scheduler would."""
    for group in program.optimizer.param_groups if program.optimizer is not None else ():
        group["lr"] *= 0.5


def save_layouts(rank: int, names: list[str], folder: str, odd: bool) -> dict[str, Any]:
    """Train two steps, save, train one more: return what was saved and the state after it."""
    with enter_modes(Float64()):
        return {name: save_one(name, folder, odd) for name in names}


def save_one(name: str, folder: str, odd: bool) -> tuple[Any, Any]:
    """Save under one layout: return what was saved, and the state one step later."""
    program, batch = program_under(name, odd), batch_of(odd)
    for seed in range(2):
        program.train_step(batch(seed))
    halve_rates(program)
    program.save(f"{folder}/{name}")
    snapshot = program_state(program)
    program.train_step(batch(2))
    return snapshot, program.state_dict()


def load_layouts(
    rank: int, names: list[str], folder: str, saved: list[str], odd: bool
) -> dict[tuple[str, str], Any]:
    """Load each saved checkpoint under each layout: return what was loaded, and the state after a
    step."""
    with enter_modes(Float64()):
        return {
            (source, name): result
            for name in names
            for source, result in load_one(name, folder, saved, odd)
        }


def load_one(name: str, folder: str, saved: list[str], odd: bool) -> Iterator[tuple[str, Any]]:
    """Load each checkpoint under one layout; yield what was loaded, and the state one step
    later."""
    program, batch = program_under(name, odd, fresh=True), batch_of(odd)
    program.train_step(batch(9))
    for source in saved:
        program.load(f"{folder}/{source}")
        snapshot = program_state(program)
        program.train_step(batch(2))
        yield source, (snapshot, program.state_dict())


def assert_close(actual: Any, expected: Any, path: str = "") -> None:
    """Compare nested results, up to rounding."""
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys(), path
        for key in actual:
            assert_close(actual[key], expected[key], f"{path}/{key}")
    elif isinstance(actual, Tensor):
        assert float((actual - expected).norm()) <= 1e-12 * float(expected.norm()) + 1e-13, path
    else:
        assert actual == expected, path


def check_all_pairs(folder: Path, odd: bool, worlds: dict[int, list[str]]) -> None:
    """Save under each layout, load each under every other, and compare."""
    gpt2(layers=1)  # what it imports is imported once, before ranks are forked
    saved: dict[str, Any] = {}
    for world, names in worlds.items():
        ranks = run_ranks(world, save_layouts, names, str(folder), odd)
        saved |= ranks[0]
    for world, names in worlds.items():
        for loaded in run_ranks(world, load_layouts, names, str(folder), list(saved), odd):
            for (source, name), (before, after) in loaded.items():
                for part in ("state", "moments", "step"):
                    assert_equal(before[part], saved[source][0][part], f"{source}->{name}/{part}")
                check = assert_equal if source == name else assert_close
                check(after, saved[source][1], f"{source}->{name}+1")
                lrs = {1e-2 * 0.5, 2e-2 * 0.5}
                assert {g["lr"] for g in before["groups"].values()} <= lrs
                assert before["groups"], (source, name)


@pytest.mark.deep
def test_any_layout_loads_under_any_other(tmp_path: Path) -> None:
    """Parameters, buffers and moments are bitwise equal, and so is the next step under the same
    layout."""
    check_all_pairs(tmp_path, False, WORLDS)


@pytest.mark.deep
def test_sizes_that_nothing_divides(tmp_path: Path) -> None:
    """Uneven and empty slices, a scalar, a frozen weight and a buffer are loaded too."""
    two = ["dp2", "dp2z1", "dp2z3", "pp2"]
    check_all_pairs(tmp_path, True, {1: ["one"], 2: two, 4: ["pp2dp2"]})


def load_model(rank: int, folder: str) -> tuple[Any, Any]:
    """Load a program without optimizer: return its state and step."""
    program = program_under("pp2", fresh=True, optimizer=None)
    program.load(f"{folder}/tp2")
    return program.state_dict(), program.step


def test_torchs_own_tools_read_it(tmp_path: Path) -> None:
    """dcp_to_torch_save gives nested full tensors; a program without optimizer loads the model."""
    gpt2(layers=1)
    (saved, _), _ = (
        ranks["tp2"] for ranks in run_ranks(2, save_layouts, ["tp2"], str(tmp_path), False)
    )
    dcp_to_torch_save(newest_checkpoint(tmp_path / "tp2"), tmp_path / "whole.pt")
    contents = torch.load(tmp_path / "whole.pt")
    model = gpt2(layers=2)
    mismatch = model.load_state_dict(contents["model"], strict=False)
    assert mismatch.missing_keys == ["lm_head.weight"] and not mismatch.unexpected_keys
    assert_equal(dict(model.state_dict()), saved["state"])
    key = "transformer.h.0.attn.c_attn.weight"
    moment = contents["optim"]["state"][key]["exp_avg"]
    assert torch.equal(moment, saved["moments"][key]["exp_avg"])
    for state, step in run_ranks(2, load_model, str(tmp_path)):
        assert_equal(state, saved["state"])
        assert step == 2


@pytest.mark.parametrize("before", [False, True], ids=["now", "before"])
@pytest.mark.parametrize("damage", ["truncated", "lost", "index", "emptied", "no index"])
def test_damage_changes_nothing(tmp_path: Path, damage: str, before: bool) -> None:
    """A checkpoint with lost bytes is refused, in the current format and in the former one."""
    trained_program().save(tmp_path / "a")
    step = (
        save_old_format(newest_checkpoint(tmp_path / "a"), tmp_path / "b")
        if before
        else newest_checkpoint(tmp_path / "a")
    )
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
    as_it_was = program_state(program)
    for folder in (step, step if before else tmp_path / "a"):
        assert_refused(
            lambda folder=folder: program.load(folder), "S633", "the program is unchanged"
        )
    assert_equal(program_state(program), as_it_was)
    assert last_checkpoint(step) is None


class Changed(OddModel):
    """The odd model with one parameter more or less, of another shape or dtype, or frozen."""

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
    trained_program().save(tmp_path / "a")
    program = program_of(Changed(change))
    before = program_state(program)
    assert_refused(lambda: program.load(tmp_path / "a"), code, *words)
    assert_equal(program_state(program), before)


def test_before_the_first_step(tmp_path: Path) -> None:
    """Loading a checkpoint of step 0 removes the momentum that a program has."""
    odd_program().save(tmp_path / "a")
    program = trained_program()
    program.load(tmp_path / "a")
    assert program.step == 0 and not program.optimizer_state()


def test_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of another version is refused."""
    monkeypatch.setattr(archive, "VERSION", 2)  # of the contents
    trained_program().save(tmp_path / "a")
    monkeypatch.undo()
    assert_refused(lambda: odd_program().load(tmp_path / "a"), "S633", "its version is not")


@pytest.mark.parametrize("patient", [True, False])
def test_saves_that_are_quicker_than_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    """Each save removes the checkpoint being read: the load tries again until its time is over."""
    saver, loader, read, remaining = trained_program(), odd_program(), archive._read, [20]
    saver.save(tmp_path / "a", keep=1)

    def outrun(*args: Any) -> Any:
        if remaining[0]:
            remaining[0] -= 1
            saver.step += 1
            saver.save(tmp_path / "a", keep=1)
        return read(*args)

    monkeypatch.setattr(archive, "_read", outrun)
    if patient:
        loader.load(tmp_path / "a")
        assert loader.step == saver.step and not remaining[0]
    else:
        monkeypatch.setattr(archive, "PATIENCE", 0.0)
        assert_refused(lambda: loader.load(tmp_path / "a"), "S633")
        assert remaining == [19]


class Scaled(nn.Module):
    """A layer behind a scale that its first batch sets, and each later one moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)
        self.register_buffer("scale", None)
        self.register_buffer("latest", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.latest = x.detach().abs().amax(0)
        if self.scale is None:
            self.scale = self.latest
        elif self.training:
            self.scale = self.scale * 1.25
        return x + torch.tanh(self.layer(x / (1 + self.scale)))


class ScaledNet(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return ((x.sum(1) - y) ** 2).mean()


def run_scaled(plan: Plan, saved: Path, load: bool, steps: range) -> dict[str, Tensor]:
    """On this rank: train some steps, and save; return the state."""
    program = build(plan, points(0), optimizer=adamw, seed=SEED)
    if load:
        program.load(saved)
    for step in steps:
        program.train_step(points(step))
    program.save(saved)
    return program.state_dict()


def test_buffers_that_a_forward_adds(tmp_path: Path, threads: Threads) -> None:
    """They are saved and loaded under stages and without, as torch's state dict has them."""
    stages = 'blocks  pipeline_split(over=pp)\npipeline(order="GPipe", micro=1)'
    plans = [
        make_plan(ScaledNet(), *rows) for rows in ((stages, "pp=2"), ("", ""), (stages, "pp=2"))
    ]
    model = ScaledNet()
    optimizer = adamw(list(model.named_parameters()))
    for step in range(6):
        model(**points(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for part, plan in enumerate(plans):
        steps = range(2 * part, 2 * part + 2)
        args = plan, tmp_path / "a", part > 0, steps
        states = threads.run(run_scaled, plan.mesh.world, *args)
    assert "blocks.1.scale" in model.state_dict() and "blocks.1.latest" not in model.state_dict()
    for state in states:
        assert state.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
