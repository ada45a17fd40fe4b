"""The source distribution and the wheel: complete, and working outside of the checkout."""

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


def _tracked_files(*folders: str) -> list[str]:
    """The files that git tracks, of some folders or of all."""
    result = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return result.stdout.split()


def _build_distribution(kind: str, source: Path, output: Path) -> Path:
    """The distribution that setuptools builds from a source tree."""
    output.mkdir()
    code = BUILD.format(what=kind)
    subprocess.run(
        [sys.executable, "-c", code, str(output)], cwd=source, check=True, capture_output=True
    )
    (built,) = output.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the source distribution of the tracked files."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("distributions")
    for name in _tracked_files():
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "tree" / name, follow_symlinks=False)
    source = _build_distribution("build_sdist", folder / "tree", folder / "sdist")
    with tarfile.open(source) as archive:
        options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from 3.11.4 on
        archive.extractall(folder / "source", **options)
    (unpacked,) = (folder / "source").iterdir()
    return _build_distribution("build_wheel", unpacked, folder / "wheel")


def test_every_file_of_the_package_is_there(wheel: Path) -> None:
    """The wheel has every tracked file of the package."""
    links = {"schedlang/passes", "schedlang/primitives"}
    expected = set()
    for name in {*_tracked_files(*FOLDERS)} - links:
        folder, _, rest = name.partition("/")
        expected.add(f"{FOLDERS[folder]}/{rest}")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected, sorted(packed ^ expected)


def test_it_works_elsewhere(wheel: Path, tmp_path: Path) -> None:
    """The unpacked wheel checks a schedule and explains a code, outside of the checkout."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    (tmp_path / "x.sched").write_text("schedule 1\n\nmesh(tp=2)\n\nlayers.*  shard(col, over=tp)\n")
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    for args, expected in ((["check", "x.sched"], "holds"), (["explain", "S405"], "S405")):
        result = subprocess.run(
            [sys.executable, "-m", "schedlang", *args],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0 and expected in result.stdout, result.stdout + result.stderr
