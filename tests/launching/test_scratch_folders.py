"""Scratch folders of pools: those of killed processes are removed, those in use are not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from schedlang.runtime.launch import pool

HOLD_FOLDER = (
    "from schedlang.runtime.launch import pool\nprint(pool.make_folder()[0], flush=True)\ninput()"
)


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a temporary folder of this test only."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_what_is_left_is_swept(tmp_path: Path) -> None:
    """When its process has ended, and not before; other folders stay."""
    other = tmp_path / f"{pool.PREFIX}other"
    other.mkdir()  # no lock: not a pool's folder
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_FOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    (folder / "rank0.log").write_text("words")
    pool.remove_abandoned()
    assert folder.is_dir()
    process.kill()
    process.communicate()
    with pool.temporary_folder() as own_folder:
        assert not folder.exists() and other.is_dir() and Path(own_folder).is_dir()
        pool.remove_abandoned()
        assert Path(own_folder).is_dir()
    assert os.listdir(tmp_path) == [other.name]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """No other folder is removed through a link with such a name."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / ".lock").touch()
    (tmp_path / f"{pool.PREFIX}link").symlink_to(precious)
    pool.remove_abandoned()
    assert precious.is_dir()
