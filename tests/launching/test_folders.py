"""Tests of folders: what a killed process leaves is swept, what a living one uses is not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from schedlang.runtime.launch import pool

HOLDS = (
    "from schedlang.runtime.launch import pool\nprint(pool.make_folder()[0], flush=True)\ninput()"
)


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary folder of this test's alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_what_is_left_is_swept(tmp_path: Path) -> None:
    """As soon as its process is gone, and not before; others' folders stay."""
    other = tmp_path / f"{pool.PREFIX}other"
    other.mkdir()  # no lock: not one of these
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    (folder / "rank0.log").write_text("words")
    pool.remove_abandoned()
    assert folder.is_dir()
    process.kill()
    process.communicate()
    with pool.temporary_folder() as mine:
        assert not folder.exists() and other.is_dir() and Path(mine).is_dir()
        pool.remove_abandoned()
        assert Path(mine).is_dir()
    assert os.listdir(tmp_path) == [other.name]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """Nobody else's folder is removed through a link that is named like one of these."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / ".lock").touch()
    (tmp_path / f"{pool.PREFIX}link").symlink_to(precious)
    pool.remove_abandoned()
    assert precious.is_dir()
