"""What is built to be installed has every file of the package, and works without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "schedlang": "schedlang",
    "passes": "schedlang/passes",
    "primitives": "schedlang/primitives",
}
BUILD = "import sys; from setuptools import build_meta as b; b.{what}(sys.argv[1])"


def _tracked(*folders: str) -> list[str]:
    """The files of some folders, or of all."""
    done = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return done.stdout.split()


def _built(what: str, source: Path, into: Path) -> Path:
    """The one file that setuptools makes of a source tree."""
    into.mkdir()
    code = BUILD.format(what=what)
    subprocess.run(
        [sys.executable, "-c", code, str(into)], cwd=source, check=True, capture_output=True
    )
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the source distribution of the files that git knows."""
    pytest.importorskip("setuptools", minversion="77")
    room = tmp_path_factory.mktemp("distributions")
    for name in _tracked():
        (room / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, room / "tree" / name, follow_symlinks=False)
    source = _built("build_sdist", room / "tree", room / "sdist")
    with tarfile.open(source) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from 3.11.4 on
        archive.extractall(room / "source", **safely)
    (unpacked,) = (room / "source").iterdir()
    return _built("build_wheel", unpacked, room / "wheel")


def test_every_file_of_the_package_is_there(wheel: Path) -> None:
    """A folder that pyproject.toml does not list, or a kind of file, would be left out."""
    links = {"schedlang/passes", "schedlang/primitives"}
    there = set()
    for name in {*_tracked(*FOLDERS)} - links:
        folder, _, rest = name.partition("/")
        there.add(f"{FOLDERS[folder]}/{rest}")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == there, sorted(inside ^ there)


def test_it_works_elsewhere(wheel: Path, tmp_path: Path) -> None:
    """Unpacked, and away from the checkout: a schedule is checked and a message explained."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    (tmp_path / "x.sched").write_text("schedule 1\n\nmesh(tp=2)\n\nlayers.*  shard(col, over=tp)\n")
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    for words, said in ((["check", "x.sched"], "holds"), (["explain", "S405"], "S405")):
        done = subprocess.run(
            [sys.executable, "-m", "schedlang", *words],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
