"""A refusal under torchrun is told once, by whichever rank is refused, and without tracebacks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from schedlang.diagnostics.codes import model
from tests import forks

ROOT = Path(__file__).parents[2]
HEAD = """\
import os, sys, time
import schedlang
from model import model

sch = schedlang.create_schedule(model())
"""
ALL = "sch['layers.*'].chekpoint()\n"
ONE = """\
if os.environ["RANK"] == "1":
    sch['layers.*'].chekpoint()
time.sleep(60)  # torchrun ends it when the other rank is gone
"""


def job(folder: Path, script: str, ranks: int = 2) -> str:
    (folder / "model.py").write_text(model())
    (folder / "x.py").write_text(HEAD + script)
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "x.py"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = forks.run(*words, cwd=folder, env=environ, timeout=600)
    assert done.returncode
    return done.stderr


@pytest.mark.parametrize(("script", "who"), [(ALL, "rank "), (ONE, "rank 1: ")], ids=["all", "one"])
def test_it_is_told_once(tmp_path: Path, script: str, who: str) -> None:
    """All ranks refuse, or one alone: one message with its line, and no rank's traceback."""
    said = job(tmp_path, script)
    assert said.count("error[S301]") == 1, said
    (line,) = (line for line in said.splitlines() if "error[S301]" in line)
    assert line.startswith(who)
    assert "chekpoint()" in said and "did you mean `checkpoint`?" in said
    assert "Traceback" not in said[: said.index("elastic")]


def test_other_errors_are_as_before(tmp_path: Path) -> None:
    """What is no refusal has its traceback, also after a refusal that was caught."""
    caught = "try:\n    sch['nope'].modules\nexcept schedlang.Refusal:\n    pass\n1 / 0\n"
    said = job(tmp_path, caught)
    assert "1 / 0\n" in said and "ZeroDivisionError" in said and "error[S" not in said


def test_alone_nothing_is_touched(tmp_path: Path) -> None:
    """Without a job a refusal is an exception as any other."""
    (tmp_path / "model.py").write_text(model())
    (tmp_path / "x.py").write_text(HEAD + ALL)
    done = forks.anew("x.py", cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""})
    assert "Traceback" in done.stderr and done.stderr.count("error[S301]") == 1
