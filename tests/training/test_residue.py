"""What compressed sums keep from step to step, saved and loaded."""

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
from tests.proofs import assert_same, planned, sgd
from tests.training.test_compress import HOW, Net, points

SHARDS = "up shard(col, over=tp)\nmid shard(row, over=tp)\n"


def plan_of(how: str, mesh: str, more: str = "") -> Plan:
    """Net, whose gradients are compressed over dp."""
    rows = f"{more}zero(stage=0, over=dp)\ncompress(gradients, {how}, over=dp)"
    return planned(Net().double(), rows, mesh, "lossy")


def left(program: Program) -> dict[str, Tensor]:
    """The errors of this rank, by name."""
    c = program.assembly.compressor
    assert c is not None
    return {n: m.error.clone() for n, m in c.memories.items() if m.error is not None}


def saving(plan: Plan, path: str) -> Any:
    """Two steps, saved, and two more: the errors that were saved, and what came after."""
    with enter_modes(Float64()):
        one = build(plan, points(0), optimizer=sgd)
        for seed in range(2):
            one.train_step(points(seed))
        one.save(path)
        kept = left(one)
        for seed in (2, 3):
            one.train_step(points(seed))
        return kept, one.state_dict()


def loading(plan: Plan, path: str, fresh: nn.Module | None = None) -> Any:
    """The same of a program that has made a step of its own and loads it."""
    with enter_modes(Float64()):
        one = build(plan, points(0), optimizer=sgd)
        one.train_step(points(9))
        one.load(path)
        kept = left(one) if one.assembly.compressor is not None else {}
        for seed in (2, 3):
            one.train_step(points(seed))
        return kept, one.state_dict()


def flat(seen: tuple[dict[str, Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Errors and state under names of their own."""
    kept, state = seen
    return {**{f"error {n}": v for n, v in kept.items()}, **state}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("more, mesh", [("", "dp=3"), (SHARDS, "dp=2, tp=2")])
def test_the_same_layout_goes_on(
    threads: Threads, tmp_path: Path, how: str, more: str, mesh: str
) -> None:
    """Errors, starts and draws are those of the program that saved, to the last bit."""
    plan = plan_of(HOW[how], mesh, more)
    world = plan.mesh.world
    saved = threads.run(saving, world, plan, str(tmp_path / "one"))
    found = threads.run(loading, world, plan, str(tmp_path / "one"))
    assert all(kept for kept, _ in saved)  # something was left out
    for before, after in zip(saved, found):
        assert_same(flat(before), flat(after))


@pytest.mark.parametrize("how", ["int8", "powersgd"])
def test_other_ranks_share_what_was_left_out(threads: Threads, tmp_path: Path, how: str) -> None:
    """Four ranks, split otherwise, hold together what two had left out, and load without fail."""
    threads.run(saving, 2, plan_of(HOW[how], "dp=2"), str(tmp_path / "one"))
    before = threads.run(loading, 2, plan_of(HOW[how], "dp=2"), str(tmp_path / "one"))
    after = threads.run(loading, 4, plan_of(HOW[how], "dp=4"), str(tmp_path / "one"))
    split = threads.run(loading, 4, plan_of(HOW[how], "dp=2, tp=2", SHARDS), str(tmp_path / "one"))
    for name in ("up.weight", "mid.weight"):
        whole = sum(kept[name] for kept, _ in before)
        assert float(whole.norm()) > 0
        assert torch.allclose(whole, sum(kept[name] for kept, _ in after), rtol=1e-12)
        dim = 0 if name == "up.weight" else 1
        parts = [kept[name] for kept, _ in split]  # ranks 0 and 1 are one copy
        each = [torch.cat(parts[k : k + 2], dim) for k in (0, 2)]
        assert torch.allclose(whole, each[0] + each[1], rtol=1e-12)


def test_programs_without_the_row(threads: Threads, tmp_path: Path) -> None:
    """They load what one with it has saved; and one with it starts from nothing after theirs."""
    plain = planned(Net().double(), "zero(stage=0, over=dp)", "dp=2")
    coded = plan_of("int8", "dp=2")
    threads.run(saving, 2, coded, str(tmp_path / "coded"))
    threads.run(loading, 2, plain, str(tmp_path / "coded"))
    threads.run(plainly, 2, plain, str(tmp_path / "plain"))
    kept, _ = threads.run(loading, 2, coded, str(tmp_path / "plain"))[0]
    assert kept == {}


def plainly(plan: Plan, path: str) -> None:
    """One step, saved."""
    one = build(plan, points(0), optimizer=sgd)
    one.train_step(points(0))
    one.save(path)
