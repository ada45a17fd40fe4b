"""Tests of folder: a checkpoint is replaced whole or not at all, whatever fails and wherever."""

from __future__ import annotations

import errno
import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from schedlang.diagnostic import Refusal
from tests.layouts import equal, ids, odd_program, points, program_under, refused, seen, trained
from tests.models import gpt2
from tests.ranks import run_ranks


def test_places_that_are_no_checkpoints(tmp_path: Path) -> None:
    """Files and folders of others are neither replaced nor read."""
    program = trained()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    for name in ("file", "home"):
        refused(partial(program.save, tmp_path / name), "S632", "is no checkpoint")
        refused(partial(program.load, tmp_path / name), "S633")
    refused(lambda: program.load(tmp_path / "none"), "S633", "no such folder")
    refused(lambda: program.save(tmp_path / "file" / "below"), "S631", "/file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "home"]
    (tmp_path / "empty").mkdir()
    program.save(tmp_path / "empty")
    program.load(tmp_path / "empty")


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    """The second save is what is read, and nothing else is left in the folder or beside it."""
    program = trained()
    program.save(tmp_path / "a")
    (tmp_path / ".a.01234567.saving").mkdir()  # of a save that died
    (tmp_path / ".a.b.01234567.saving").mkdir()  # of somebody else
    program.train_step(points(1))
    program.save(tmp_path / "a")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.b.01234567.saving", "a"]
    other = odd_program()
    other.load(tmp_path / "a")
    equal(seen(other), seen(program))


def test_a_crash_between_two_renames(tmp_path: Path) -> None:
    """The checkpoint that was set aside is found."""
    program = trained()
    program.save(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / ".a.0123abcd.replaced")
    other = odd_program()
    other.load(tmp_path / "a")
    equal(seen(other), seen(program))


def _full_disk(rank: int, folder: str, real: bool) -> Any:
    """Save, then save again where the files of rank 1 may not grow."""
    program = program_under("dp2z3")
    program.train_step(ids(0))
    program.save(f"{folder}/a")
    program.train_step(ids(1))
    plain = FileSystemWriter.write_data
    if rank == 1 and real:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    elif rank == 1:
        FileSystemWriter.write_data = _no_space  # type: ignore[method-assign]
    try:
        program.save(f"{folder}/a")
        return "saved"
    except Refusal as error:
        return str(error)
    finally:
        FileSystemWriter.write_data = plain  # type: ignore[method-assign]
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
    program = program_under("one", fresh=True)
    program.load(tmp_path / "a")
    assert program.step == 1


def _unwritable(rank: int, folder: str) -> str:
    program = program_under("dp2", True)
    try:
        program.save(f"{folder}/file/a")
    except Refusal as error:
        return str(error)
    return "saved"


def test_an_unwritable_path_on_all_ranks(tmp_path: Path) -> None:
    """Only rank 0 makes the folder, and all ranks say why it cannot."""
    (tmp_path / "file").write_text("")
    told = run_ranks(2, _unwritable, str(tmp_path))
    assert told[0] == told[1] and "S631" in told[0] and "/file" in told[0]
