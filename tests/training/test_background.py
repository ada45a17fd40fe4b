"""Saves in the background: what they hold, what they cost a step, and how they fail."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.checkpointing import archive, background, checkpoint_folders
from schedlang.runtime.comm import world
from schedlang.runtime.launch.pool import RankDied
from tests.layouts import batch_of, equal, program_under, seen
from tests.ranks import run_ranks

LAYOUTS = ["dp2z1", "dp2z3", "pp2"]


class Held:
    """A save whose writing waits until it is let go."""

    def __init__(self) -> None:
        self.go, self.write = threading.Event(), archive.write_file

    def __enter__(self) -> Held:
        archive.write_file = self._write  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        self.go.set()
        archive.write_file = self.write

    def _write(self, *args: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert self.go.wait(600)
        return self.write(*args)


def _saving(rank: int, layout: str, folder: str) -> Any:
    """Two saves, training beside each, nothing of which may be in them."""
    program, batch = program_under(layout, True), batch_of(True)
    found = []
    for at in range(2):
        program.train_step(batch(at))
        with Held() as held:
            program.save(f"{folder}/{at}", wait=False, beside={"at": at, "rank": rank})
            before = seen(program)
            program.train_step(batch(5))
            assert not list(Path(folder, str(at)).glob("step-*"))
            held.go.set()
            program.train_step(batch(6))
            program.saved()
        found.append(before)
        assert archive.read_beside(f"{folder}/{at}", rank) == {"at": at, "rank": rank}
    return found


def _loaded(rank: int, layout: str, folder: str) -> Any:
    program = program_under(layout, True, fresh=True)
    program.load(folder)
    return seen(program)


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_a_save_holds_the_state_of_when_it_was_begun(tmp_path: Path, layout: str) -> None:
    """Steps that are made while it is written, with collectives of their own, leave no trace in it;
    nothing is named before it is whole; the memory of copies is used again."""
    ranks = 1 if layout == "one" else 2
    saved = run_ranks(ranks, _saving, layout, str(tmp_path))[0]
    for at, before in enumerate(saved):
        found = run_ranks(ranks, _loaded, layout, str(tmp_path / str(at)))[0]
        for part in ("state", "moments", "step"):
            equal(found[part], before[part], part)


def _failing(rank: int, folder: str) -> Any:
    """A disk that is full for one rank; who is told of it, and when."""
    program, batch = program_under("dp2z1", True), batch_of(True)
    program.train_step(batch(0))
    program.save(folder, wait=False)
    program.saved()
    write, told = archive.write_file, []

    def full(*args: Any) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return write(*args)

    archive.write_file = full  # type: ignore[assignment]
    try:
        for ask in (program.saved, lambda: program.save(folder), lambda: program.load(folder)):
            program.train_step(batch(1))
            program.save(folder, wait=False)
            program.train_step(batch(2))
            try:
                ask()
                told.append("nothing")
            except Refusal as refusal:
                told.append(f"{refusal.diagnostic.code}: {refusal.diagnostic.notes[0]}")
            program.saved()  # it is told once
    finally:
        archive.write_file = write
    program.save(folder, wait=False)
    program.saved()
    return told, sorted(path.name for path in Path(folder).glob("[!.]*"))


def test_an_error_is_told_on_all_ranks_by_the_next_call(tmp_path: Path) -> None:
    """`saved`, `save` and `load` tell it, once, with the rank; older checkpoints are there, and
    nothing half written is left by the next save."""
    for told, names in run_ranks(2, _failing, str(tmp_path / "a")):
        assert len(told) == 3
        assert all("S631: rank 1: [Errno 28] No space left" in one for one in told), told
        assert names == ["latest", "step-00000001", "step-00000007"]


def _two(rank: int, folder: str) -> Any:
    """A second save waits for the first: never two threads at a time."""
    program, batch = program_under("dp2z1", True), batch_of(True)
    at_work: list[int] = []
    write = background.BackgroundSave._write

    def counted(self: Any, *args: Any) -> None:
        at_work.append(sum(one.name == "schedlang: saves" for one in threading.enumerate()))
        write(self, *args)

    background.BackgroundSave._write = counted  # type: ignore[method-assign]
    try:
        for at in range(4):
            program.train_step(batch(at))
            program.save(folder, keep=2, wait=False)
        program.saved()
    finally:
        background.BackgroundSave._write = write  # type: ignore[method-assign]
    return at_work, sorted(path.name for path in Path(folder).glob("step-*"))


def test_one_save_is_in_flight(tmp_path: Path) -> None:
    """A thread for each save, one after the other, and as many checkpoints as are kept."""
    for at_work, names in run_ranks(2, _two, str(tmp_path / "a")):
        assert at_work == [1, 1, 1, 1]
        assert names == ["step-00000003", "step-00000004"]


def _dying(rank: int, folder: str, where: str) -> None:
    """Die in the thread that writes, while the main threads train on."""
    program, batch = program_under("dp2z3", True), batch_of(True)
    program.train_step(batch(0))
    program.save(folder, wait=False)
    program.saved()
    if rank == 0:
        room = checkpoint_folders if hasattr(checkpoint_folders, where) else archive
        setattr(room, where, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    program.train_step(batch(1))
    program.save(folder, wait=False)
    for at in range(100):
        program.train_step(batch(at))
    program.saved()


@pytest.mark.parametrize("where", ["write_file", "write_index", "_write_lines"])
def test_a_rank_that_dies_while_it_writes(tmp_path: Path, where: str) -> None:
    """The checkpoint before is the last whole one."""
    with pytest.raises(RankDied):
        run_ranks(2, _dying, str(tmp_path / "a"), where)
    last = schedlang.last_checkpoint(tmp_path / "a")
    assert last is not None and last.name == "step-00000001"


def test_facts_of_a_thread_apart_meet_those_of_no_other() -> None:
    """Two threads of each rank tell their ranks different things at a time, in any order."""
    for found in run_ranks(2, _apart):
        assert found == ([[0, 10], [1, 11]] * 20, [["a0", "a1"]] * 40)


def _apart(rank: int) -> Any:
    here = world.current_world()
    with world.enter_thread_groups(here, "test"):
        _ = here.control_group
    beside: list[Any] = []

    def talk() -> None:
        with world.enter_thread_groups(here, "test"):
            for _ in range(40):
                beside.append(world.all_gather_object(f"a{rank}"))

    thread = threading.Thread(target=talk)
    thread.start()
    found = [world.all_gather_object(at % 2 + 10 * rank) for at in range(40)]
    thread.join()
    return [[min(row), max(row)] for row in found], beside


def test_what_is_kept_beside_is_plain(tmp_path: Path) -> None:
    """S637 names the entry; nothing is written."""
    program = program_under("one", True)
    with pytest.raises(Refusal) as caught:
        program.save(tmp_path / "a", beside={"good": [1, {"x": 2.0}], "bad": object()})
    assert caught.value.diagnostic.code == "S637" and "`bad`" in caught.value.diagnostic.title
    assert not (tmp_path / "a").exists()
    program.save(tmp_path / "a")
    assert archive.read_beside(tmp_path / "a") is None
    with pytest.raises(Refusal) as caught:
        archive.read_beside(tmp_path / "none")
    assert caught.value.diagnostic.code == "S633"
