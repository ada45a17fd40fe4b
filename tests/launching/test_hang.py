"""Hang detection: waiting is told from working, also when a process hardly gets a processor."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from schedlang.runtime.launch.rank_job import (
    Hang,
    RankJob,
    RankProcess,
    check_progress,
    cpu_seconds,
    queued_seconds,
)

DUMP_ON_SIGNAL = "import faulthandler, signal; faulthandler.register(signal.SIGUSR1)"
BUSY_LOOP = (
    "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); os.nice(NICE)\n"
    "print(flush=True)\nwhile True: pass"
)
Start = Callable[[str], RankProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start processes in place of ranks; each is ready once it has printed a line."""
    processes: list[subprocess.Popen[bytes]] = []

    def _start(code: str) -> RankProcess:
        log = tmp_path / f"{len(processes)}.log"
        command = [sys.executable, "-c", f"{DUMP_ON_SIGNAL}\n{code}"]
        with log.open("wb") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline()
        return RankProcess(len(processes) - 1, socket.socket(), log, process.pid)

    yield _start
    for process in processes:
        process.kill()
        process.communicate()


def watch_until(rank: RankProcess, ready: Callable[[], bool]) -> None:
    """Watch a rank until `ready()`, or until a hang is detected; fail after a minute."""
    job, end = RankJob(1, None), time.monotonic() + 60
    while not ready() and time.monotonic() < end:
        check_progress(job, [rank], hang_after=1.0)
        time.sleep(0.1)


def test_what_sleeps_is_a_hang(start: Start) -> None:
    """The error names the line where it sleeps."""
    rank = start("def stuck():\n  import time; time.sleep(60)\nprint(flush=True)\nstuck()")
    with pytest.raises(Hang, match="no rank made progress for 1 s") as info:
        watch_until(rank, lambda: False)
    assert "in stuck" in info.value.stacks[0]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="queues are not counted here")
def test_what_starves_is_no_hang(start: Start) -> None:
    """A busy process that gets 1/70 of a processor is not a hang.

    The kernel reports a wait in the run queue after it has ended. On a loaded machine a wait may be
    longer than the second that counts as a hang here; then it is watched again.
    """
    start(BUSY_LOOP.replace("NICE", "0"))
    rank = start(BUSY_LOOP.replace("NICE", "19"))
    for _ in range(20):
        cpu_before, queued = cpu_seconds([rank.pid]), queued_seconds([rank.pid])
        with suppress(Hang):
            watch_until(rank, lambda queued=queued: queued_seconds([rank.pid]) > queued + 2)
            break
    else:
        pytest.fail("it was taken for a hang each time")
    assert queued_seconds([rank.pid]) > queued + 2
    assert cpu_seconds([rank.pid]) - cpu_before < 1


POLLING = """import ctypes, threading, time
def poll():
  ctypes.CDLL(None).prctl(15, b"gloo_tcp_loop", 0, 0, 0)
  while True: pass
threading.Thread(target=poll, daemon=True).start()
print(flush=True)
time.sleep(60)"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="threads are not counted")
def test_a_thread_of_gloo_that_polls_is_a_hang(start: Start) -> None:
    """gloo's thread spins if a send was dropped: the rank waits all the same."""
    rank = start(POLLING)
    with pytest.raises(Hang):
        watch_until(rank, lambda: False)


def test_a_machine_that_stood_still_tells_nothing(start: Start) -> None:
    """Time in which the watcher itself did not run, as in a suspended machine, does not count."""
    rank = start("import time; print(flush=True); time.sleep(60)")
    job = RankJob(1, None)
    job.last_progress, job.looked = job.last_progress - 100, job.looked - 100
    check_progress(job, [rank], hang_after=5.0)
    job.last_progress -= 100  # it ran, and received nothing
    job.last_check = 0.0
    with pytest.raises(Hang):
        check_progress(job, [rank], hang_after=5.0)
