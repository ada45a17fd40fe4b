"""Saves that are killed anywhere, ranks that die, loads beside saves, bits that flip."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from schedlang.runtime.checkpointing import archive, boxes, checkpoint_folders
from schedlang.runtime.launch.pool import RankDied
from tests.interrupted import apart
from tests.layouts import batch_of, equal, last, program_under, seen
from tests.ranks import run_ranks


def held(found: dict[str, dict[str, int]]) -> None:
    """No figure tells of anything lost, mixed, left, or not found."""
    for what, figures in found.items():
        bad = (
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
        assert not any(figures.get(name) for name in bad), (what, figures)


def test_a_save_that_is_killed_leaves_a_whole_state(tmp_path: Path) -> None:
    """Before each write of all: the last whole checkpoint is the old one or the new one, and the
    next save sweeps; loads beside saves and two jobs meet no mixture, each flipped bit is found."""
    found = apart(tmp_path, writes=1, kills=8, loads=30, jobs=15, flips=15)
    held(found)
    each = found["killed before each write"]
    assert each["killed"] == each["whole"] - 1 >= 30
    assert found["killed at random"]["killed"] == found["killed at random"]["whole"] == 8
    assert found["loads beside saves"]["one state"] == 30
    assert found["loads beside saves"]["different steps"] > 1
    assert found["bits flipped"] == {"data: found": 15, "index: found": 15}


def test_an_export_that_is_killed_leaves_whole_weights(tmp_path: Path) -> None:
    """Before each write of all the old weights lie there or the new ones, or the old come back
    where it takes three moves; the next export sweeps, and two do not sweep each other."""
    found = apart(tmp_path, exports=5)
    held(found)
    each = found["exports killed before each write, one move"]
    assert each["killed"] == each["whole"] - 1 >= 10
    other = found["exports killed before each write, three"]
    assert other["put back"] >= 1 and other["killed"] == other["whole"] + other["put back"] - 1
    assert found["exports killed at random"]["whole"] == 5
    assert found["two exporters"]["one state"] > 5


@pytest.mark.deep
def test_the_figures_of_exports(tmp_path: Path) -> None:
    """100 exports that are killed, 200 of two jobs beside each other."""
    found = apart(tmp_path, exports=100)
    held(found)
    assert found["exports killed at random"]["whole"] == 100


@pytest.mark.deep
def test_the_figures(tmp_path: Path) -> None:
    """200 saves that are killed, 300 loads beside saves, 200 flipped bits."""
    found = apart(tmp_path, writes=1, kills=200, loads=300, jobs=60, flips=200)
    held(found)
    assert found["killed at random"]["whole"] == 200
    assert found["loads beside saves"]["one state"] == 300
    assert found["bits flipped"]["data: found"] == 200


def _dying(rank: int, layout: str, folder: str, dies: tuple[int, str] | None) -> Any:
    """Train a step and save; then another, in whose save a rank may die."""
    program, batch = program_under(layout, True), batch_of(True)
    program.train_step(batch(0))
    program.save(folder)
    saved = seen(program)
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


def _loading(rank: int, layout: str, folder: str, save: bool) -> Any:
    """What a program of this layout takes over."""
    program = program_under(layout, True, fresh=True)
    program.load(folder)
    found = seen(program)
    if save:
        program.save(folder)
    return found


@pytest.mark.parametrize(
    "layout, dies, other",
    [
        ("dp2z3", (1, "item"), "pp2"),  # a rank while it writes
        ("pp2", (0, "indexed"), "dp2z1"),  # the first, when all have written
        ("dp2z1", (0, "_write_lines"), "one"),  # before the new one is named
    ],
)
def test_a_rank_that_dies_in_a_save(
    tmp_path: Path, layout: str, dies: tuple[int, str], other: str
) -> None:
    """The job ends, what was saved before loads under another layout, and its save sweeps."""
    folder = tmp_path / "a"
    saved = run_ranks(2, _dying, layout, str(tmp_path / "b"), None)[0]
    with pytest.raises(RankDied):
        run_ranks(2, _dying, layout, str(folder), dies)
    published = dies[1] == "_write_lines"  # it was whole, and lacked only to be named
    assert last(folder).name == "step-00000001"
    world = 1 if other == "one" else 2
    for found in run_ranks(world, _loading, other, str(folder), True):
        for part in ("state", "moments", "step"):
            equal(found[part], saved[part], part)
    names = {p.name for p in folder.iterdir()}
    more = {"step-00000002"} if published else set()
    assert names == {"latest", ".schedlang-lock", "step-00000001", "step-00000001.1", *more}
