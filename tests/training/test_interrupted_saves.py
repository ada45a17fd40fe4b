"""Interrupted saves: killed processes, dying ranks, concurrent loads, flipped bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from schedlang.runtime.checkpointing import archive, boxes, checkpoint_folders
from schedlang.runtime.launch.pool import RankDied
from tests.interrupted import run_forked
from tests.layouts import assert_equal, batch_of, newest_checkpoint, program_state, program_under
from tests.ranks import run_ranks


def check_counts(results: dict[str, dict[str, int]]) -> None:
    """Check that nothing was lost, mixed, left behind, or not detected."""
    for experiment, figures in results.items():
        failures = (
            "lost",
            "mixture",
            "left",
            "too many kept",
            "refused",
            "jobs that failed",
            "data: not found",
            "data: badly told",
            "index: not found",
            "index: badly told",
            "not replaced",
        )
        assert not any(figures.get(name) for name in failures), (experiment, figures)


def test_a_save_that_is_killed_leaves_a_whole_state(tmp_path: Path) -> None:
    """Killed before each write, a save leaves the old or the new checkpoint complete, and the next
    save cleans up; concurrent loads and jobs read no mixture; each flipped bit is detected."""
    results = run_forked(tmp_path, writes=1, kills=8, loads=30, jobs=15, flips=15)
    check_counts(results)
    counts = results["killed before each write"]
    assert counts["killed"] == counts["whole"] - 1 >= 30
    assert results["killed at random"]["killed"] == results["killed at random"]["whole"] == 8
    assert results["loads beside saves"]["one state"] == 30
    assert results["loads beside saves"]["different steps"] > 1
    assert results["bits flipped"] == {"data: found": 15, "index: found": 15}


def test_an_export_that_is_killed_leaves_whole_weights(tmp_path: Path) -> None:
    """Killed before each write, an export leaves the old weights or the new ones, or the old are
    put back where it takes three moves; the next export cleans up, and two do not remove each
    other's files."""
    results = run_forked(tmp_path, exports=5)
    check_counts(results)
    counts = results["exports killed before each write, one move"]
    assert counts["killed"] == counts["whole"] - 1 >= 10
    three_moves = results["exports killed before each write, three"]
    assert (
        three_moves["put back"] >= 1
        and three_moves["killed"] == three_moves["whole"] + three_moves["put back"] - 1
    )
    assert results["exports killed at random"]["whole"] == 5
    assert results["two exporters"]["one state"] > 5


@pytest.mark.deep
def test_the_figures_of_exports(tmp_path: Path) -> None:
    """100 killed exports, 200 of two concurrent jobs."""
    results = run_forked(tmp_path, exports=100)
    check_counts(results)
    assert results["exports killed at random"]["whole"] == 100


@pytest.mark.deep
def test_the_figures(tmp_path: Path) -> None:
    """200 killed saves, 300 loads beside saves, 200 flipped bits."""
    results = run_forked(tmp_path, writes=1, kills=200, loads=300, jobs=60, flips=200)
    check_counts(results)
    assert results["killed at random"]["whole"] == 200
    assert results["loads beside saves"]["one state"] == 300
    assert results["bits flipped"]["data: found"] == 200


def save_then_die(rank: int, layout: str, folder: str, dies: tuple[int, str] | None) -> Any:
    """Train a step and save; then another, in whose save a rank may die; return the first
    snapshot."""
    program, batch = program_under(layout, True), batch_of(True)
    program.train_step(batch(0))
    program.save(folder)
    saved = program_state(program)
    program.train_step(batch(1))
    if dies is not None and dies[0] == rank:
        room = next(
            room
            for room in (archive, checkpoint_folders, boxes, boxes._Writer)
            if hasattr(room, dies[1])
        )
        setattr(room, dies[1], lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    if dies is not None:
        program.save(folder)
    return saved


def load_snapshot(rank: int, layout: str, folder: str, save: bool) -> Any:
    """Load a checkpoint in a program of this layout, and return its snapshot."""
    program = program_under(layout, True, fresh=True)
    program.load(folder)
    snapshot = program_state(program)
    if save:
        program.save(folder)
    return snapshot


@pytest.mark.parametrize(
    "layout, dies, other",
    [
        ("dp2z3", (1, "item"), "pp2"),  # a rank, while it writes
        ("pp2", (0, "indexed"), "dp2z1"),  # the first rank, when all have written
        ("dp2z1", (0, "_write_lines"), "one"),  # before `latest` names the new one
    ],
)
def test_a_rank_that_dies_in_a_save(
    tmp_path: Path, layout: str, dies: tuple[int, str], other: str
) -> None:
    """The job ends, the earlier checkpoint loads under another layout, and the next save cleans
    up."""
    folder = tmp_path / "a"
    saved = run_ranks(2, save_then_die, layout, str(tmp_path / "b"), None)[0]
    with pytest.raises(RankDied):
        run_ranks(2, save_then_die, layout, str(folder), dies)
    published = dies[1] == "_write_lines"  # complete, except for `latest`
    assert newest_checkpoint(folder).name == "step-00000001"
    world = 1 if other == "one" else 2
    for loaded in run_ranks(world, load_snapshot, other, str(folder), True):
        for part in ("state", "moments", "step"):
            assert_equal(loaded[part], saved[part], part)
    names = {p.name for p in folder.iterdir()}
    expected = {"step-00000002"} if published else set()
    assert names == {"latest", ".schedlang-lock", "step-00000001", "step-00000001.1", *expected}
