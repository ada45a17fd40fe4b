"""Checkpoint folders: a step is added completely or not at all, whatever fails."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.checkpoint import save as dcp_save

from schedlang import last_checkpoint
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.checkpointing import boxes
from schedlang.runtime.storage.folder import CLAIM, LOCK
from tests.layouts import (
    assert_equal,
    assert_refused,
    ids,
    newest_checkpoint,
    odd_program,
    points,
    program_state,
    program_under,
    save_old_format,
    trained_program,
)
from tests.models import gpt2
from tests.ranks import run_ranks


def test_places_that_are_no_checkpoints(tmp_path: Path) -> None:
    """Files and folders of others are neither written into nor read."""
    program = trained_program()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    for name in ("file", "home"):
        assert_refused(
            partial(program.save, tmp_path / name), "S632", "not a folder of checkpoints"
        )
        assert_refused(partial(program.load, tmp_path / name), "S633")
        assert last_checkpoint(tmp_path / name) is None
    assert_refused(lambda: program.load(tmp_path / "none"), "S633", "the folder does not exist")
    assert_refused(lambda: program.save(tmp_path / "file" / "below"), "S631", "/file")
    assert last_checkpoint(tmp_path / "none") is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "home"]
    assert [p.name for p in (tmp_path / "home").iterdir()] == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    assert last_checkpoint(tmp_path / "empty") is None
    program.save(tmp_path / "empty")
    program.load(tmp_path / "empty")


def test_checkpoints_of_other_programs_stay(tmp_path: Path) -> None:
    """A folder of torch's, of DeepSpeed's, or with a step of another program is not saved into."""
    program, state = trained_program(), {"model": nn.Linear(2, 2).state_dict()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        for name in ("torch", "steps/step-00000010"):
            dcp_save(state, checkpoint_id=tmp_path / name, no_dist=True)
    (tmp_path / "deepspeed" / "global_step10").mkdir(parents=True)
    (tmp_path / "deepspeed" / "latest").write_text("global_step10")
    for name in ("torch", "steps", "deepspeed"):
        contents = files_in(tmp_path / name)
        assert_refused(partial(program.save, tmp_path / name), "S632", "of other programs")
        assert files_in(tmp_path / name) == contents
    program.save(tmp_path / "ours")
    for path in (tmp_path / "torch").iterdir():  # written beside a save, later
        (tmp_path / "ours" / path.name).write_bytes(path.read_bytes())
    program.save(tmp_path / "ours")
    assert files_in(tmp_path / "torch").items() <= files_in(tmp_path / "ours").items()


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("step-"))


def test_each_save_is_a_folder_of_its_own(tmp_path: Path) -> None:
    """The folder loads the last step, each step loads by name, and `keep` of them stay."""
    program, folder = trained_program(), tmp_path / "a"
    states = {}
    for k in range(1, 6):
        program.save(folder)
        states[f"step-{k:08d}"] = program_state(program)
        assert newest_checkpoint(folder).name == f"step-{k:08d}"
        program.train_step(points(k))
    assert checkpoint_names(folder) == ["step-00000003", "step-00000004", "step-00000005"]
    assert (folder / "latest").read_text().splitlines()[0].startswith("step-00000005 ")
    loaded = odd_program()
    for name in ("step-00000003", "step-00000005"):
        loaded.load(folder / name)
        assert_equal(program_state(loaded), states[name])
    loaded.load(folder)
    assert_equal(program_state(loaded), states["step-00000005"])
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_how_many_are_kept(tmp_path: Path) -> None:
    """One, or all; the newest save always stays, even if its step is an older one."""
    program, folder = odd_program(), tmp_path / "a"
    for k in range(5):
        program.step = k
        program.save(folder, keep=None)
    assert len(checkpoint_names(folder)) == 5
    program.step = 2  # as in a run that was resumed from an older step
    program.save(folder, keep=2)
    assert checkpoint_names(folder) == ["step-00000002.1", "step-00000004"]
    assert newest_checkpoint(folder).name == "step-00000002.1"
    program.save(folder, keep=1)
    assert checkpoint_names(folder) == ["step-00000002"]
    for keep in (0, -1, 1.5, True, "all"):
        assert_refused(lambda keep=keep: program.save(folder, keep=keep), "S631", "`keep=")
    assert checkpoint_names(folder) == ["step-00000002"]


def test_a_checkpoint_is_not_saved_into(tmp_path: Path) -> None:
    """The folder of one step, also renamed, is refused and not changed."""
    program = trained_program()
    program.save(tmp_path / "a")
    (tmp_path / "best").mkdir()
    for path in newest_checkpoint(tmp_path / "a").iterdir():
        (tmp_path / "best" / path.name).write_bytes(path.read_bytes())
    for folder in (newest_checkpoint(tmp_path / "a"), tmp_path / "best"):
        names = sorted(p.name for p in folder.iterdir())
        assert_refused(
            lambda folder=folder: program.save(folder), "S632", "is a complete checkpoint"
        )
        assert sorted(p.name for p in folder.iterdir()) == names
        program.load(folder)
    assert newest_checkpoint(tmp_path / "best") == tmp_path / "best"


def test_what_saves_that_died_have_left(tmp_path: Path) -> None:
    """The next save removes the files of interrupted saves, and no similar ones."""
    program, folder = trained_program(), tmp_path / "a"
    program.save(folder)
    for name in (".step-00000009.01234567.saving", ".step-00000001.1.0123abcd.replaced"):
        (folder / name).mkdir()
        (folder / name / "__0_0.distcp").write_text("")
    (folder / ".latest.01234567.saving").write_text("")
    (tmp_path / ".a.01234567.saving").mkdir()  # of a save in the old format
    (tmp_path / ".a.b.01234567.saving").mkdir()  # not a checkpoint's
    (folder / "notes.txt").write_text("mine")
    program.save(folder)
    names = sorted(p.name for p in folder.iterdir())
    assert names == [".schedlang-lock", "latest", "notes.txt", "step-00000001", "step-00000001.1"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.b.01234567.saving", "a"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    """Saving onto a link to a folder saves into that folder, and the link stays."""
    program = trained_program()
    (tmp_path / "disk").mkdir()
    (tmp_path / "a").symlink_to(tmp_path / "disk")
    (tmp_path / "b").symlink_to(tmp_path / "new")  # its target is created
    for name, real in (("a", "disk"), ("b", "new")):
        program.save(tmp_path / name)
        program.save(tmp_path / name)
        assert (tmp_path / name).is_symlink() and len(checkpoint_names(tmp_path / real)) == 2
        program.load(tmp_path / name)
        assert newest_checkpoint(tmp_path / name).parent == tmp_path / real


def test_a_lost_or_damaged_pointer(tmp_path: Path) -> None:
    """A damaged `latest` is refused; without one the last complete checkpoint is found."""
    program, folder = trained_program(), tmp_path / "a"
    for _ in range(2):
        program.save(folder)
        program.train_step(points(1))
    pointer = folder / "latest"
    original, loaded = pointer.read_text(), odd_program()
    damaged_texts = [
        original[:-1],
        original.replace("step-00000002", "../../step-00000002"),
        "",
        "x" * 99,
    ]
    damaged_texts.append(original.replace(original.split()[1], "0123456789abcdef"))
    for text in damaged_texts:
        pointer.write_text(text)
        assert_refused(lambda: loaded.load(folder), "S633", "step-00000002")
        assert newest_checkpoint(folder).name == "step-00000002"
    pointer.unlink()
    assert newest_checkpoint(folder).name == "step-00000002"
    loaded.load(folder)
    assert loaded.step == 2
    (folder / "step-00000002" / "__0_0.distcp").unlink()  # a complete one goes first
    assert newest_checkpoint(folder).name == "step-00000001"
    assert_refused(lambda: loaded.load(folder), "S633", "load another", "step-00000001")


def test_two_jobs(tmp_path: Path) -> None:
    """The second job is refused and told the owner; a dead process holds no lock."""
    program, folder = trained_program(), tmp_path / "a"
    program.save(folder)
    names = sorted(p.name for p in folder.iterdir())
    owner = f"{os.getpid()} {socket.gethostname()}\n"
    assert (folder / LOCK).read_text() == owner
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, folder / LOCK], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert_refused(
            lambda: program.save(folder), "S638", f"process {holder.pid} on `node7`", "of its own"
        )
        assert sorted(p.name for p in folder.iterdir()) == names
        program.load(folder)  # reading needs no lock
        holder.kill()
    program.save(folder)
    assert (folder / LOCK).read_text() == owner


HOLD_LOCK = """
import fcntl, os, sys, time
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
file.truncate(0)
file.write(f"{os.getpid()} node7")
file.flush()
print("held", flush=True)
time.sleep(60)
"""


def test_where_files_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exclusive file replaces the lock: one of a dead process is taken over, no other."""

    def none(file: int, how: int) -> None:
        if how != fcntl.LOCK_UN:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    program, folder = trained_program(), tmp_path / "a"
    program.save(folder)
    host, claim = socket.gethostname(), folder / CLAIM
    assert not claim.exists()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        claim.write_text(f"{process.pid} {host}\n")
        assert_refused(lambda: program.save(folder), "S638", f"process {process.pid} on `{host}`")
        process.kill()
    program.save(folder)
    assert not claim.exists()
    claim.write_text("4711 node7\n")
    assert_refused(lambda: program.save(folder), "S638", "process 4711 on `node7`")
    assert not [p.name for p in folder.iterdir() if "claim." in p.name]


def test_a_checkpoint_of_before(tmp_path: Path) -> None:
    """One of the old format, in the folder itself, loads and stays until the next is complete."""
    program, folder = trained_program(), tmp_path / "a"
    program.save(tmp_path / "new")
    save_old_format(newest_checkpoint(tmp_path / "new"), folder)
    assert newest_checkpoint(folder) == folder
    loaded = odd_program()
    loaded.load(folder)
    assert_equal(program_state(loaded), program_state(program))
    folder.rename(tmp_path / ".a.0123abcd.replaced")  # left by a save of the old format
    assert newest_checkpoint(folder).name == ".a.0123abcd.replaced"
    folder.mkdir()  # and as one of the current format leaves it
    (folder / LOCK).write_text("")
    fresh = odd_program()
    fresh.load(folder)
    assert_equal(program_state(fresh), program_state(program))
    folder.joinpath(LOCK).unlink()
    folder.rmdir()
    (tmp_path / ".a.0123abcd.replaced").rename(folder)
    fresh.train_step(points(1))
    fresh.save(folder)
    assert sorted(p.name for p in folder.iterdir()) == [LOCK, "latest", "step-00000002"]
    loaded.load(folder)
    assert_equal(program_state(loaded), program_state(fresh))


def save_to_full_disk(rank: int, folder: str, real: bool) -> Any:
    """Save, then save again where the files of rank 1 may not grow: return the result."""
    program = program_under("dp2z3")
    program.train_step(ids(0))
    program.save(f"{folder}/a")
    program.train_step(ids(1))
    item = boxes._Writer.item
    if rank == 1 and real:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    elif rank == 1:
        boxes._Writer.item = raise_no_space
    try:
        program.save(f"{folder}/a")
        return "saved"
    except Refusal as error:
        return error.render()
    finally:
        boxes._Writer.item = item
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def raise_no_space(*args: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("real", [False, True])
def test_a_full_disk_on_one_rank(tmp_path: Path, real: bool) -> None:
    """All ranks refuse with the same text, and the older checkpoint is still complete."""
    gpt2(layers=1)
    messages = run_ranks(2, save_to_full_disk, str(tmp_path), real)
    assert messages[0] == messages[1] and "S631" in messages[0] and "rank 1: " in messages[0]
    assert ("File too large" if real else "No space left") in messages[0]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [LOCK, "latest", "step-00000001"]
    program = program_under("one", fresh=True)
    program.load(tmp_path / "a")
    assert program.step == 1


def save_to_file_path(rank: int, folder: str) -> str:
    program = program_under("dp2", True)
    try:
        program.save(f"{folder}/file/a")
    except Refusal as error:
        return error.render()
    return "saved"


def test_an_unwritable_path_on_all_ranks(tmp_path: Path) -> None:
    """Only rank 0 creates the folder, and all ranks report why it cannot."""
    (tmp_path / "file").write_text("")
    messages = run_ranks(2, save_to_file_path, str(tmp_path))
    assert messages[0] == messages[1] and "S631" in messages[0] and "/file" in messages[0]
