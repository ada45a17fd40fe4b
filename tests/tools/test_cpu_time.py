"""CPU time of processes and their descendants."""

import os
import shutil
import subprocess
import sys
import time

from schedlang.runtime.launch import rank_job
from schedlang.runtime.launch.rank_job import cpu_seconds

BURN = "import time\nwhile time.process_time() < 0.3: pass\ninput()"


def test_a_child_that_still_runs_counts() -> None:
    """CPU time of a running grandchild is included."""
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        end = time.monotonic() + 60
        while cpu_seconds([child.pid]) < 0.3 and time.monotonic() < end:
            time.sleep(0.05)
        assert cpu_seconds([child.pid]) >= 0.3
        if shutil.which("ps"):  # which small images lack; it may round to seconds
            assert abs(rank_job._ps_seconds({child.pid}) - cpu_seconds([child.pid])) < 2
    finally:
        child.communicate(b"\n")


def test_a_process_that_is_gone_counts_nothing() -> None:
    """An ended process counts 0, without an error."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert cpu_seconds([gone.pid]) == 0
    assert cpu_seconds([os.getpid()]) > 0


def test_times_of_ps() -> None:
    """Both time formats of `ps` are read, and descendants are found."""
    assert rank_job._parse_time("1-02:03:04") == 86400 + 7384
    assert rank_job._parse_time("0:01.50") == 1.5
    table = {1: (0, 1.0), 2: (1, 2.0), 3: (2, 4.0), 4: (0, 8.0)}
    assert rank_job._table_seconds(table, {1}) == 7
