"""Packages that add primitives: the template of examples/extension, and packages that fail."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "examples" / "extension"


def _write_metadata(folder: Path, name: str, points: dict[str, str]) -> None:
    """Write what an installer writes of a package's entry points."""
    info = folder / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = [f"{key} = {value}" for key, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[schedlang.primitives]", *lines, ""]))


def _install_template(folder: Path) -> None:
    """Write the metadata of the template package."""
    project = tomllib.loads((TEMPLATE / "pyproject.toml").read_text())["project"]
    _write_metadata(folder, project["name"], project["entry-points"]["schedlang.primitives"])


def _run_module(*args: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python module with the template on the path."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TEMPLATE, path, ROOT)))}
    command = [sys.executable, "-m", *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=path)


def test_the_verb_of_a_package_is_known(tmp_path: Path) -> None:
    """A package's primitive has its page, arguments and example, as a built-in one."""
    _install_template(tmp_path)
    result = _run_module("schedlang", "explain", "halve", path=tmp_path)
    assert result.stdout.startswith("halve(parts=2)"), result.stderr
    (tmp_path / "a.sched").write_text('schedule 1\n\nstep "a" {\n  mlp  halve(part=2)\n}\n')
    result = _run_module("schedlang", "check", "a.sched", path=tmp_path)
    assert result.returncode == 2 and "did you mean `parts`?" in result.stderr, result.stderr


def test_a_package_that_fails_is_named(tmp_path: Path) -> None:
    """A package that cannot be imported is named with its module and error, without a traceback."""
    _write_metadata(tmp_path, "broken-verbs", {"b": "broken_verbs"})
    (tmp_path / "broken_verbs.py").write_text("import no_such_module\n")
    result = _run_module("schedlang", "explain", "shard", path=tmp_path)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.startswith(
        "error[S009]: cannot import the primitives of broken-verbs 0.1\n"
        "  = note: `broken_verbs`: ModuleNotFoundError: No module named 'no_such_module'\n"
    ), result.stderr


def test_two_verbs_of_one_name_are_refused(tmp_path: Path) -> None:
    """A package cannot redefine a primitive of schedlang."""
    _write_metadata(tmp_path, "other-verbs", {"o": "other_verbs"})
    text = (TEMPLATE / "schedlang_halves" / "halve.py").read_text()
    (tmp_path / "other_verbs.py").write_text(text.replace("class halve", "class shard"))
    result = _run_module("schedlang", "explain", "shard", path=tmp_path)
    assert (
        result.returncode == 2
        and "error[S008]: two primitives have the name `shard`" in result.stderr
    )


@pytest.mark.deep
def test_the_template_is_proven(tmp_path: Path) -> None:
    """The template's own test passes."""
    _install_template(tmp_path)
    test = str(TEMPLATE / "test_halve.py")
    result = _run_module("pytest", "-q", "-n", "0", "-p", "no:cacheprovider", test, path=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
