"""Tests of steps: a checkpoint is added whole or not at all, whatever fails and wherever."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from schedlang import last_checkpoint
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.checkpointing import boxes
from schedlang.runtime.storage.folder import CLAIM, LOCK
from tests.layouts import (
    equal,
    former,
    ids,
    last,
    odd_program,
    points,
    program_under,
    refused,
    seen,
    trained,
)
from tests.models import gpt2
from tests.ranks import run_ranks


def test_places_that_are_no_checkpoints(tmp_path: Path) -> None:
    """Files and folders of others are neither written into nor read."""
    program = trained()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    for name in ("file", "home"):
        refused(partial(program.save, tmp_path / name), "S632", "not a folder of checkpoints")
        refused(partial(program.load, tmp_path / name), "S633")
        assert last_checkpoint(tmp_path / name) is None
    refused(lambda: program.load(tmp_path / "none"), "S633", "the folder does not exist")
    refused(lambda: program.save(tmp_path / "file" / "below"), "S631", "/file")
    assert last_checkpoint(tmp_path / "none") is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "home"]
    assert [p.name for p in (tmp_path / "home").iterdir()] == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    assert last_checkpoint(tmp_path / "empty") is None
    program.save(tmp_path / "empty")
    program.load(tmp_path / "empty")


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("step-"))


def test_each_save_is_a_folder_of_its_own(tmp_path: Path) -> None:
    """The last is what the folder gives, each is given by its name, and `keep` of them stay."""
    program, folder = trained(), tmp_path / "a"
    states = {}
    for k in range(1, 6):
        program.save(folder)
        states[f"step-{k:08d}"] = seen(program)
        assert last(folder).name == f"step-{k:08d}"
        program.train_step(points(k))
    assert _names(folder) == ["step-00000003", "step-00000004", "step-00000005"]
    assert (folder / "latest").read_text().splitlines()[0].startswith("step-00000005 ")
    other = odd_program()
    for name in ("step-00000003", "step-00000005"):
        other.load(folder / name)
        equal(seen(other), states[name])
    other.load(folder)
    equal(seen(other), states["step-00000005"])
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_how_many_are_kept(tmp_path: Path) -> None:
    """One, or all; the one just saved is always among them, also where its step is an older one."""
    program, folder = odd_program(), tmp_path / "a"
    for k in range(5):
        program.step = k
        program.save(folder, keep=None)
    assert len(_names(folder)) == 5
    program.step = 2  # as a run that goes on from an older one
    program.save(folder, keep=2)
    assert _names(folder) == ["step-00000002.1", "step-00000004"]
    assert last(folder).name == "step-00000002.1"
    program.save(folder, keep=1)
    assert _names(folder) == ["step-00000002"]
    for keep in (0, -1, 1.5, True, "all"):
        refused(lambda keep=keep: program.save(folder, keep=keep), "S631", "`keep=")
    assert _names(folder) == ["step-00000002"]


def test_a_checkpoint_is_not_saved_into(tmp_path: Path) -> None:
    """One step's folder, under its own or another name, stays what it is."""
    program = trained()
    program.save(tmp_path / "a")
    (tmp_path / "best").mkdir()
    for path in last(tmp_path / "a").iterdir():
        (tmp_path / "best" / path.name).write_bytes(path.read_bytes())
    for folder in (last(tmp_path / "a"), tmp_path / "best"):
        before = sorted(p.name for p in folder.iterdir())
        refused(lambda folder=folder: program.save(folder), "S632", "is a complete checkpoint")
        assert sorted(p.name for p in folder.iterdir()) == before
        program.load(folder)
    assert last(tmp_path / "best") == tmp_path / "best"


def test_what_saves_that_died_have_left(tmp_path: Path) -> None:
    """It is swept by the next save, and what only looks like it is not."""
    program, folder = trained(), tmp_path / "a"
    program.save(folder)
    for name in (".step-00000009.01234567.saving", ".step-00000001.1.0123abcd.replaced"):
        (folder / name).mkdir()
        (folder / name / "__0_0.distcp").write_text("")
    (folder / ".latest.01234567.saving").write_text("")
    (tmp_path / ".a.01234567.saving").mkdir()  # of a save of before
    (tmp_path / ".a.b.01234567.saving").mkdir()  # of somebody else
    (folder / "notes.txt").write_text("mine")
    program.save(folder)
    left = sorted(p.name for p in folder.iterdir())
    assert left == [".schedlang-lock", "latest", "notes.txt", "step-00000001", "step-00000001.1"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.b.01234567.saving", "a"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    """Saving onto a link to a folder saves into that folder, and the link stays."""
    program = trained()
    (tmp_path / "disk").mkdir()
    (tmp_path / "a").symlink_to(tmp_path / "disk")
    (tmp_path / "b").symlink_to(tmp_path / "new")  # what it leads to is made
    for name, real in (("a", "disk"), ("b", "new")):
        program.save(tmp_path / name)
        program.save(tmp_path / name)
        assert (tmp_path / name).is_symlink() and len(_names(tmp_path / real)) == 2
        program.load(tmp_path / name)
        assert last(tmp_path / name).parent == tmp_path / real


def test_a_lost_or_damaged_pointer(tmp_path: Path) -> None:
    """It is refused, or nothing is missed: the last whole checkpoint is found without it."""
    program, folder = trained(), tmp_path / "a"
    for _ in range(2):
        program.save(folder)
        program.train_step(points(1))
    pointer = folder / "latest"
    good, other = pointer.read_text(), odd_program()
    bad = [good[:-1], good.replace("step-00000002", "../../step-00000002"), "", "x" * 99]
    bad.append(good.replace(good.split()[1], "0123456789abcdef"))
    for text in bad:
        pointer.write_text(text)
        refused(lambda: other.load(folder), "S633", "step-00000002")
        assert last(folder).name == "step-00000002"
    pointer.unlink()
    assert last(folder).name == "step-00000002"
    other.load(folder)
    assert other.step == 2
    (folder / "step-00000002" / "__0_0.distcp").unlink()  # a whole one goes before a damaged one
    assert last(folder).name == "step-00000001"
    refused(lambda: other.load(folder), "S633", "load another", "step-00000001")


def test_two_jobs(tmp_path: Path) -> None:
    """The second is refused and told who the first is; one that has died holds nothing."""
    program, folder = trained(), tmp_path / "a"
    program.save(folder)
    before = sorted(p.name for p in folder.iterdir())
    said = f"{os.getpid()} {socket.gethostname()}\n"
    assert (folder / LOCK).read_text() == said
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, folder / LOCK], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        refused(
            lambda: program.save(folder), "S638", f"process {holder.pid} on `node7`", "of its own"
        )
        assert sorted(p.name for p in folder.iterdir()) == before
        program.load(folder)  # reading asks nobody
        holder.kill()
    program.save(folder)
    assert (folder / LOCK).read_text() == said


HOLDS = """
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
    """A file that only one can make stands in: that of a dead process is taken over, no other."""

    def none(file: int, how: int) -> None:
        if how != fcntl.LOCK_UN:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    program, folder = trained(), tmp_path / "a"
    program.save(folder)
    here, claim = socket.gethostname(), folder / CLAIM
    assert not claim.exists()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        claim.write_text(f"{other.pid} {here}\n")
        refused(lambda: program.save(folder), "S638", f"process {other.pid} on `{here}`")
        other.kill()
    program.save(folder)
    assert not claim.exists()
    claim.write_text("4711 node7\n")
    refused(lambda: program.save(folder), "S638", "process 4711 on `node7`")
    assert not [p.name for p in folder.iterdir() if "claim." in p.name]


def test_a_checkpoint_of_before(tmp_path: Path) -> None:
    """One that lies in the folder itself loads, is the last, and stays until the next is whole."""
    program, folder = trained(), tmp_path / "a"
    program.save(tmp_path / "new")
    former(last(tmp_path / "new"), folder)
    assert last(folder) == folder
    other = odd_program()
    other.load(folder)
    equal(seen(other), seen(program))
    folder.rename(tmp_path / ".a.0123abcd.replaced")  # as a save of before left it when it died
    assert last(folder).name == ".a.0123abcd.replaced"
    folder.mkdir()  # and as one of today leaves it
    (folder / LOCK).write_text("")
    fresh = odd_program()
    fresh.load(folder)
    equal(seen(fresh), seen(program))
    folder.joinpath(LOCK).unlink()
    folder.rmdir()
    (tmp_path / ".a.0123abcd.replaced").rename(folder)
    fresh.train_step(points(1))
    fresh.save(folder)
    assert sorted(p.name for p in folder.iterdir()) == [LOCK, "latest", "step-00000002"]
    other.load(folder)
    equal(seen(other), seen(fresh))


def _full_disk(rank: int, folder: str, real: bool) -> Any:
    """Save, then save again where the files of rank 1 may not grow."""
    program = program_under("dp2z3")
    program.train_step(ids(0))
    program.save(f"{folder}/a")
    program.train_step(ids(1))
    plain = boxes._Writer.item
    if rank == 1 and real:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    elif rank == 1:
        boxes._Writer.item = _no_space
    try:
        program.save(f"{folder}/a")
        return "saved"
    except Refusal as error:
        return error.render()
    finally:
        boxes._Writer.item = plain
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def _no_space(*args: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("real", [False, True])
def test_a_full_disk_on_one_rank(tmp_path: Path, real: bool) -> None:
    """All ranks refuse in the same words, and the older checkpoint is still whole."""
    gpt2(layers=1)
    told = run_ranks(2, _full_disk, str(tmp_path), real)
    assert told[0] == told[1] and "S631" in told[0] and "rank 1: " in told[0]
    assert ("File too large" if real else "No space left") in told[0]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [LOCK, "latest", "step-00000001"]
    program = program_under("one", fresh=True)
    program.load(tmp_path / "a")
    assert program.step == 1


def _unwritable(rank: int, folder: str) -> str:
    program = program_under("dp2", True)
    try:
        program.save(f"{folder}/file/a")
    except Refusal as error:
        return error.render()
    return "saved"


def test_an_unwritable_path_on_all_ranks(tmp_path: Path) -> None:
    """Only rank 0 makes the folder, and all ranks say why it cannot."""
    (tmp_path / "file").write_text("")
    told = run_ranks(2, _unwritable, str(tmp_path))
    assert told[0] == told[1] and "S631" in told[0] and "/file" in told[0]
