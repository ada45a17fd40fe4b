"""Saves in the background: the state they save, their cost in a step, and how they fail."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.checkpointing import archive, background, boxes, checkpoint_folders
from schedlang.runtime.comm import world
from schedlang.runtime.launch.pool import RankDied
from tests.layouts import assert_equal, batch_of, program_state, program_under
from tests.ranks import run_ranks

LAYOUTS = ["dp2z1", "dp2z3", "pp2"]


class BlockedSave:
    """Blocks the writing of a save until `go` is set."""

    def __init__(self) -> None:
        self.go, self.write = threading.Event(), archive.write_file

    def __enter__(self) -> BlockedSave:
        archive.write_file = self._write  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        self.go.set()
        archive.write_file = self.write

    def _write(self, *args: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert self.go.wait(600)
        return self.write(*args)


def save_twice(rank: int, layout: str, folder: str) -> Any:
    """Save twice while training goes on; return the state at the begin of each save."""
    program, batch = program_under(layout, True), batch_of(True)
    snapshots = []
    for index in range(2):
        program.train_step(batch(index))
        with BlockedSave() as blocked:
            program.save(f"{folder}/{index}", wait=False, beside={"at": index, "rank": rank})
            before = program_state(program)
            program.train_step(batch(5))
            assert not list(Path(folder, str(index)).glob("step-*"))
            blocked.go.set()
            program.train_step(batch(6))
            program.saved()
        snapshots.append(before)
        assert archive.read_beside(f"{folder}/{index}", rank) == {"at": index, "rank": rank}
    return snapshots


def load_snapshot(rank: int, layout: str, folder: str) -> Any:
    """Load a checkpoint into a fresh program and return its snapshot."""
    program = program_under(layout, True, fresh=True)
    program.load(folder)
    return program_state(program)


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_a_save_holds_the_state_of_when_it_was_begun(tmp_path: Path, layout: str) -> None:
    """Steps trained while it is written leave no trace in it.

    No checkpoint is named before it is complete; the memory of copies is used again.
    """
    ranks = 1 if layout == "one" else 2
    saved = run_ranks(ranks, save_twice, layout, str(tmp_path))[0]
    for index, snapshot in enumerate(saved):
        loaded = run_ranks(ranks, load_snapshot, layout, str(tmp_path / str(index)))[0]
        for part in ("state", "moments", "step"):
            assert_equal(loaded[part], snapshot[part], part)


def save_to_full_disk(rank: int, folder: str) -> Any:
    """Save to a disk that is full for one rank: return which calls raise on this rank, and the
    files."""
    program, batch = program_under("dp2z1", True), batch_of(True)
    program.train_step(batch(0))
    program.save(folder, wait=False)
    program.saved()
    write, messages = archive.write_file, []

    def full(*args: Any) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return write(*args)

    archive.write_file = full  # type: ignore[assignment]
    try:
        for call in (program.saved, lambda: program.save(folder), lambda: program.load(folder)):
            program.train_step(batch(1))
            program.save(folder, wait=False)
            program.train_step(batch(2))
            try:
                call()
                messages.append("nothing")
            except Refusal as refusal:
                messages.append(f"{refusal.diagnostic.code}: {refusal.diagnostic.notes[0]}")
            program.saved()  # the error is raised once
    finally:
        archive.write_file = write
    program.save(folder, wait=False)
    program.saved()
    return messages, sorted(path.name for path in Path(folder).glob("[!.]*"))


def test_an_error_is_told_on_all_ranks_by_the_next_call(tmp_path: Path) -> None:
    """`saved`, `save` and `load` report the error once, with its rank.

    Older checkpoints stay, and the next save removes half-written files.
    """
    for messages, names in run_ranks(2, save_to_full_disk, str(tmp_path / "a")):
        assert len(messages) == 3
        assert all("S631: rank 1: [Errno 28] No space left" in message for message in messages), (
            messages
        )
        assert names == ["latest", "step-00000001", "step-00000007"]


def save_repeatedly(rank: int, folder: str) -> Any:
    """Save in each step: return the number of writing threads at each save, and the checkpoints."""
    program, batch = program_under("dp2z1", True), batch_of(True)
    writers: list[int] = []
    write = background.BackgroundSave._write

    def counted(self: Any, *args: Any) -> None:
        writers.append(sum(thread.name == "schedlang: saves" for thread in threading.enumerate()))
        write(self, *args)

    background.BackgroundSave._write = counted  # type: ignore[method-assign]
    try:
        for seed in range(4):
            program.train_step(batch(seed))
            program.save(folder, keep=2, wait=False)
        program.saved()
    finally:
        background.BackgroundSave._write = write  # type: ignore[method-assign]
    return writers, sorted(path.name for path in Path(folder).glob("step-*"))


def test_one_save_is_in_flight(tmp_path: Path) -> None:
    """Saves run one after the other, and the oldest checkpoints are removed."""
    for at_work, names in run_ranks(2, save_repeatedly, str(tmp_path / "a")):
        assert at_work == [1, 1, 1, 1]
        assert names == ["step-00000003", "step-00000004"]


def die_while_saving(rank: int, folder: str, function: str) -> None:
    """Kill rank 0 in the thread that writes, while the main threads train on."""
    program, batch = program_under("dp2z3", True), batch_of(True)
    program.train_step(batch(0))
    program.save(folder, wait=False)
    program.saved()
    if rank == 0:
        module = checkpoint_folders if hasattr(checkpoint_folders, function) else archive
        setattr(module, function, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    program.train_step(batch(1))
    program.save(folder, wait=False)
    for seed in range(100):
        program.train_step(batch(seed))
    program.saved()


@pytest.mark.parametrize("where", ["write_file", "write_index", "_write_lines"])
def test_a_rank_that_dies_while_it_writes(tmp_path: Path, where: str) -> None:
    """The checkpoint before it is the last complete one."""
    with pytest.raises(RankDied):
        run_ranks(2, die_while_saving, str(tmp_path / "a"), where)
    last = schedlang.last_checkpoint(tmp_path / "a")
    assert last is not None and last.name == "step-00000001"


@pytest.mark.parametrize("slow", [False, True])
def test_the_end_of_a_process_beside_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    """After an error a process waits only for a save that is written at once; it stops another one,
    as a thread that runs on would abort the process."""
    program, batch = program_under("one", True), batch_of(True)
    program.train_step(batch(0))
    on_host = boxes._on_host

    def copy_slowly(tensor: Any) -> Any:
        time.sleep(0.1)
        return on_host(tensor)

    if slow:
        monkeypatch.setattr(background, "_FINISH", 0.01)
        monkeypatch.setattr(background, "_STOP", 60.0)
        monkeypatch.setattr(boxes, "_on_host", copy_slowly)
    monkeypatch.setattr(sys, "last_value", RuntimeError("its own error"), raising=False)
    program.save(tmp_path / "a", wait=False)
    program._saving._at_exit()
    assert program._saving.thread is not None and not program._saving.thread.is_alive()
    assert (schedlang.last_checkpoint(tmp_path / "a") is None) == slow
    assert {path.name for path in (tmp_path / "a").iterdir()} - {"latest", "step-00000001"} == {
        ".schedlang-lock"
    }


def test_facts_of_a_thread_apart_meet_those_of_no_other() -> None:
    """Two threads of each rank gather objects at the same time; their messages do not mix."""
    for result in run_ranks(2, gather_in_threads):
        assert result == ([[0, 10], [1, 11]] * 20, [["a0", "a1"]] * 40)


def gather_in_threads(rank: int) -> Any:
    """Gather numbers in the main thread and strings in another one; return both."""
    current = world.current_world()
    with world.enter_thread_groups(current, "test"):
        _ = current.control_group
    background: list[Any] = []

    def talk() -> None:
        with world.enter_thread_groups(current, "test"):
            for _ in range(40):
                background.append(world.all_gather_object(f"a{rank}"))

    thread = threading.Thread(target=talk)
    thread.start()
    gathered = [world.all_gather_object(index % 2 + 10 * rank) for index in range(40)]
    thread.join()
    return [[min(row), max(row)] for row in gathered], background


def test_what_is_kept_beside_is_plain(tmp_path: Path) -> None:
    """An entry that is not plain data is refused (S637), and nothing is written."""
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
