"""CPU time of processes and all that they started: what they had so far, what they waited for."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_PROC = Path("/proc")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Seconds of CPU time of processes and their living descendants; those already gone count 0."""
    if not (_PROC / "self" / "stat").exists():
        return _by_ps(set(pids))
    return sum(map(_spent, _family(pids)))


def queued_seconds(pids: Iterable[int]) -> float:
    """Seconds in which threads of the living among them could have run, and had no processor.

    0 where the system does not count it (`/proc/PID/task/TID/schedstat`, nanoseconds on the run
    queue).
    """
    return sum(map(_queued, _family(pids)))


def _family(pids: Iterable[int]) -> Iterator[int]:
    """These processes and their living descendants."""
    todo = list(pids)
    while todo:
        pid = todo.pop()
        yield pid
        todo += _children(pid)


def _queued(pid: int) -> float:
    total = 0
    for stat in (_PROC / str(pid) / "task").glob("*/schedstat"):
        try:
            total += int(stat.read_text().split()[1])
        except (OSError, IndexError):  # the thread has ended, or nothing is counted
            continue
    return total / 1e9


def _spent(pid: int) -> float:
    """User and system time of a process and of its children that have ended."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0.0
    ticks = stat.rpartition(")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:
            continue
    return found


def _by_ps(pids: set[int]) -> float:
    """The same from `ps`, where there is no /proc."""
    text = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,time="], capture_output=True, text=True)
    rows = [line.split() for line in text.stdout.splitlines()]
    return _of_table({int(p): (int(pp), _seconds(t)) for p, pp, t in rows}, pids)


def _of_table(table: Mapping[int, tuple[int, float]], pids: set[int]) -> float:
    """Time of `pids` and their descendants in a table of pid: (parent, seconds)."""
    wanted = set(pids)
    while more := {p for p, (parent, _) in table.items() if parent in wanted} - wanted:
        wanted |= more
    return sum(table[p][1] for p in wanted if p in table)


def _seconds(text: str) -> float:
    """Seconds of a time printed as [[days-]hours:]minutes:seconds."""
    days, _, clock = text.rpartition("-")
    total = 0.0
    for part in re.split(":", clock):
        total = total * 60 + float(part)
    return total + 86400 * int(days or 0)
