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


def _installed(folder: Path, name: str, points: dict[str, str]) -> None:
    """What an installer writes of a package's entry points."""
    info = folder / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = [f"{key} = {value}" for key, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[schedlang.primitives]", *lines, ""]))


def _template(folder: Path) -> None:
    told = tomllib.loads((TEMPLATE / "pyproject.toml").read_text())["project"]
    _installed(folder, told["name"], told["entry-points"]["schedlang.primitives"])


def _run(*words: str, path: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TEMPLATE, path, ROOT)))}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=path)


def test_the_verb_of_a_package_is_known(tmp_path: Path) -> None:
    """Its page, its arguments and its example are there as those of any other verb."""
    _template(tmp_path)
    done = _run("schedlang", "explain", "halve", path=tmp_path)
    assert done.stdout.startswith("halve(parts=2)"), done.stderr
    (tmp_path / "a.sched").write_text('schedule 1\n\nstep "a" {\n  mlp  halve(part=2)\n}\n')
    done = _run("schedlang", "check", "a.sched", path=tmp_path)
    assert done.returncode == 2 and "did you mean `parts`?" in done.stderr, done.stderr


def test_a_package_that_fails_is_named(tmp_path: Path) -> None:
    """Its name, its module and its own error, and no traceback."""
    _installed(tmp_path, "broken-verbs", {"b": "broken_verbs"})
    (tmp_path / "broken_verbs.py").write_text("import no_such_module\n")
    done = _run("schedlang", "explain", "shard", path=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith(
        "error[S009]: cannot import the primitives of broken-verbs 0.1\n"
        "  = note: `broken_verbs`: ModuleNotFoundError: No module named 'no_such_module'\n"
    ), done.stderr


def test_two_verbs_of_one_name_are_refused(tmp_path: Path) -> None:
    """A package cannot change what a verb of schedlang means."""
    _installed(tmp_path, "other-verbs", {"o": "other_verbs"})
    text = (TEMPLATE / "schedlang_halves" / "halve.py").read_text()
    (tmp_path / "other_verbs.py").write_text(text.replace("class halve", "class shard"))
    done = _run("schedlang", "explain", "shard", path=tmp_path)
    assert (
        done.returncode == 2 and "error[S008]: two primitives have the name `shard`" in done.stderr
    )


@pytest.mark.deep
def test_the_template_is_proven(tmp_path: Path) -> None:
    """Its own test holds."""
    _template(tmp_path)
    test = str(TEMPLATE / "test_halve.py")
    done = _run("pytest", "-q", "-n", "0", "-p", "no:cacheprovider", test, path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
