"""A refusal under torchrun is printed once, by the rank that refuses, without tracebacks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from schedlang.diagnostics import job_refusals
from schedlang.diagnostics.codes import model
from schedlang.diagnostics.diagnostic import Refusal
from tests import forks

ROOT = Path(__file__).parents[2]
HEAD = """\
import os, sys, time
import schedlang
from model import model

sch = schedlang.create_schedule(model())
"""
ALL_RANKS = "sch['layers.*'].chekpoint()\n"
RANK_ONE = """\
if os.environ["RANK"] == "1":
    sch['layers.*'].chekpoint()
time.sleep(60)  # torchrun ends it when the other rank is gone
"""


def run_job(folder: Path, script: str, ranks: int = 2, **variables: str) -> str:
    (folder / "model.py").write_text(model())
    (folder / "x.py").write_text(HEAD + script)
    arguments = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "x.py"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    process = forks.run(*arguments, cwd=folder, env=environ, timeout=600)
    assert process.returncode
    return process.stderr


@pytest.mark.parametrize(
    ("script", "who"), [(ALL_RANKS, "rank "), (RANK_ONE, "rank 1: ")], ids=["all", "one"]
)
def test_it_is_told_once(tmp_path: Path, script: str, who: str) -> None:
    """All ranks refuse, or one alone: one message with its line, and no traceback."""
    errors = run_job(tmp_path, script)
    assert errors.count("error[S301]") == 1, errors
    (line,) = (line for line in errors.splitlines() if "error[S301]" in line)
    assert line.startswith(who)
    assert "chekpoint()" in errors and "did you mean `checkpoint`?" in errors
    assert "Traceback" not in errors[: errors.index("elastic")]


def test_it_is_told_where_torchrun_keeps_no_store(tmp_path: Path) -> None:
    """Under the command that `schedlang launch` prints, too, a rank other than the first tells what
    it alone refuses."""
    errors = run_job(tmp_path, RANK_ONE, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert errors.count("rank 1: error[S301]") == errors.count("error[S301]") == 1, errors
    assert "Traceback" not in errors[: errors.index("elastic")]


def test_ranks_of_a_node_wait_for_the_one_that_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a store the first to come prints; the others go on when it has, or is gone."""
    monkeypatch.setattr(job_refusals, "job_store", lambda: None)
    monkeypatch.setattr(job_refusals._NodeClaim, "_held", [])
    for title in ("first", "first", "second"):
        job_refusals.print_once(Refusal.of("S301", title))
    printed = capsys.readouterr().err
    assert printed.count("first") == printed.count("second") == 1
    held = job_refusals._NodeClaim._held
    assert len(held) == 2
    for claim in held:  # as their processes end
        claim.close()
    job_refusals.print_once(Refusal.of("S301", "first"))
    assert capsys.readouterr().err.count("first") == 1
    held.pop().close()


def test_other_errors_are_as_before(tmp_path: Path) -> None:
    """Other errors have their traceback, also after a refusal that was caught."""
    caught = "try:\n    sch['nope'].modules\nexcept schedlang.Refusal:\n    pass\n1 / 0\n"
    errors = run_job(tmp_path, caught)
    assert "1 / 0\n" in errors and "ZeroDivisionError" in errors and "error[S" not in errors


def test_alone_nothing_is_touched(tmp_path: Path) -> None:
    """Without a job a refusal is an ordinary exception."""
    (tmp_path / "model.py").write_text(model())
    (tmp_path / "x.py").write_text(HEAD + ALL_RANKS)
    process = forks.run_interpreter("x.py", cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""})
    assert "Traceback" in process.stderr and process.stderr.count("error[S301]") == 1
