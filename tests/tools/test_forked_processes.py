"""Forked Python processes behave as new interpreters: exit codes, output, errors, time-outs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forks

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each is an interpreter")
SCRIPT = "import sys\nprint(__name__, __file__, sys.argv)\nimport beside\n"
COMMANDS = {
    "a file": ("x.py", "one", "two"),
    "a module": ("-m", "beside", "one"),
    "a text": ("-c", "import sys, beside; print(sys.argv, __name__)", "one"),
    "an error": ("-c", "import beside\ndef f(): 1 / 0\nf()"),
    "an error of a module": ("-m", "raising"),
    "an exit": ("-c", "raise SystemExit(7)"),
    "words at the exit": ("-c", "raise SystemExit('no more')"),
    "what is run at the exit": ("-c", "import atexit; atexit.register(print, 'last')"),
    "a signal": ("-c", "import os; print('first', flush=True); os.kill(os.getpid(), 15)"),
    "a thread": (
        "-c",
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    ),
}


@linux_only
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_as_an_interpreter(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Exit code, output and errors are equal, for a file, a module and a text."""
    (tmp_path / "x.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("print('beside', __name__)\n")
    (tmp_path / "raising.py").write_text("def f():\n    raise ValueError('so')\n\n\nf()\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert forks.FORKS.can(environ)
    forked = forks.run(*words, cwd=tmp_path, env=environ)
    interpreter = forks.run_interpreter(*words, cwd=tmp_path, env=environ)
    assert (forked.returncode, forked.stdout) == (interpreter.returncode, interpreter.stdout)
    if "-m" not in words:  # else both name lines of runpy, with or without marks
        assert forked.stderr == interpreter.stderr
    else:
        assert forked.stderr.splitlines()[-1:] == interpreter.stderr.splitlines()[-1:]


RANK = """
import os, sys
known = "torch" in sys.modules  # an interpreter of its own has imported nothing
rank = os.environ["RANK"]
os.write(1, f"{rank} of {os.environ['WORLD_SIZE']} {sys.argv[1:]} {known}\\n".encode())
print("unbuffered", rank, file=sys.stderr, end="")
if rank == "1":
    os._exit(7)
"""


@linux_only
def test_ranks_of_torchrun(tmp_path: Path) -> None:
    """torchrun's ranks are forked with their arguments, variables and errors; a failed rank ends
    the job."""
    (tmp_path / "x.py").write_text(RANK)
    args = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "x.py", "one")
    result = forks.run(*args, cwd=tmp_path)
    expected = [f"{rank} of 2 ['one'] True" for rank in range(2)]
    assert sorted(result.stdout.splitlines()) == expected, result.stderr
    assert "unbuffered 1" in result.stderr and "exitcode  : 7" in result.stderr
    assert result.returncode == 1


@linux_only
def test_one_that_does_not_end(tmp_path: Path) -> None:
    """A process that runs too long is ended, and the caller gets `TimeoutExpired`."""
    with pytest.raises(subprocess.TimeoutExpired):
        forks.run("-c", "import time; time.sleep(600)", cwd=tmp_path, timeout=0.5)


def test_what_an_import_may_read_is_not_forked() -> None:
    """Environment variables that an import may read need a new interpreter."""
    assert not forks.FORKS.can({**os.environ, "TRITON_INTERPRET": "of this test"})
    assert not forks.FORKS.can({"PATH": ""})
