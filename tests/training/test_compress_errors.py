"""Error feedback of compressed gradients (`compress`): saved in checkpoints and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.program import Program
from tests.engine import Threads
from tests.proofs import assert_same, make_plan, sgd
from tests.training.test_compress import METHODS, Net, batch

SHARDS = "up shard(col, over=tp)\nmid shard(row, over=tp)\n"


def compressed_plan(how: str, mesh: str, more: str = "") -> Plan:
    """Plan Net with gradients compressed over dp."""
    rows = f"{more}zero(stage=0, over=dp)\ncompress(gradients, {how}, over=dp)"
    return make_plan(Net().double(), rows, mesh, "lossy")


def local_errors(program: Program) -> dict[str, Tensor]:
    """Return the errors of this rank, by name."""
    c = program.assembly.compressor
    assert c is not None
    return {n: m.error.clone() for n, m in c.memories.items() if m.error is not None}


def save_and_step(plan: Plan, path: str) -> Any:
    """Train two steps, save, train two more: return the saved errors, and the state after it."""
    with enter_modes(Float64()):
        program = build(plan, batch(0), optimizer=sgd)
        for seed in range(2):
            program.train_step(batch(seed))
        program.save(path)
        errors = local_errors(program)
        for seed in (2, 3):
            program.train_step(batch(seed))
        return errors, program.state_dict()


def load_and_step(plan: Plan, path: str, fresh: nn.Module | None = None) -> Any:
    """Train a step, load, train two more: return the loaded errors, and the state after it."""
    with enter_modes(Float64()):
        program = build(plan, batch(0), optimizer=sgd)
        program.train_step(batch(9))
        program.load(path)
        errors = local_errors(program) if program.assembly.compressor is not None else {}
        for seed in (2, 3):
            program.train_step(batch(seed))
        return errors, program.state_dict()


def flat_results(results: tuple[dict[str, Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return errors and state in one dict."""
    errors, state = results
    return {**{f"error {n}": v for n, v in errors.items()}, **state}


@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("more, mesh", [("", "dp=3"), (SHARDS, "dp=2, tp=2")])
def test_the_same_layout_goes_on(
    threads: Threads, tmp_path: Path, how: str, more: str, mesh: str
) -> None:
    """Errors, starts and draws are those of the program that saved, to the last bit."""
    plan = compressed_plan(METHODS[how], mesh, more)
    world = plan.mesh.world
    saved = threads.run(save_and_step, world, plan, str(tmp_path / "one"))
    loaded = threads.run(load_and_step, world, plan, str(tmp_path / "one"))
    assert all(errors for errors, _ in saved)  # something was left out
    for before, after in zip(saved, loaded):
        assert_same(flat_results(before), flat_results(after))


@pytest.mark.parametrize("how", ["int8", "powersgd"])
def test_other_ranks_share_what_was_left_out(threads: Threads, tmp_path: Path, how: str) -> None:
    """The errors of four ranks, split differently, sum to those of two."""
    threads.run(save_and_step, 2, compressed_plan(METHODS[how], "dp=2"), str(tmp_path / "one"))
    before = threads.run(
        load_and_step, 2, compressed_plan(METHODS[how], "dp=2"), str(tmp_path / "one")
    )
    after = threads.run(
        load_and_step, 4, compressed_plan(METHODS[how], "dp=4"), str(tmp_path / "one")
    )
    split = threads.run(
        load_and_step, 4, compressed_plan(METHODS[how], "dp=2, tp=2", SHARDS), str(tmp_path / "one")
    )
    for name in ("up.weight", "mid.weight"):
        total = sum(errors[name] for errors, _ in before)
        assert float(total.norm()) > 0
        assert torch.allclose(total, sum(errors[name] for errors, _ in after), rtol=1e-12)
        dim = 0 if name == "up.weight" else 1
        parts = [errors[name] for errors, _ in split]  # ranks 0 and 1 are one copy
        copies = [torch.cat(parts[k : k + 2], dim) for k in (0, 2)]
        assert torch.allclose(total, copies[0] + copies[1], rtol=1e-12)


def test_programs_without_the_row(threads: Threads, tmp_path: Path) -> None:
    """A program without compression loads a compressed one's checkpoint; the other way, errors
    start at zero."""
    uncompressed = make_plan(Net().double(), "zero(stage=0, over=dp)", "dp=2")
    coded = compressed_plan("int8", "dp=2")
    threads.run(save_and_step, 2, coded, str(tmp_path / "coded"))
    threads.run(load_and_step, 2, uncompressed, str(tmp_path / "coded"))
    threads.run(save_uncompressed, 2, uncompressed, str(tmp_path / "plain"))
    errors, _ = threads.run(load_and_step, 2, coded, str(tmp_path / "plain"))[0]
    assert errors == {}


def save_uncompressed(plan: Plan, path: str) -> None:
    """Train one step without compression, and save."""
    program = build(plan, batch(0), optimizer=sgd)
    program.train_step(batch(0))
    program.save(path)
