"""CPU time spent so far by processes and all that they started."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

_PROC = Path("/proc")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Seconds of CPU time of processes and their living descendants; those already gone count 0."""
    if not (_PROC / "self" / "stat").exists():
        return _by_ps(set(pids))
    total, todo = 0.0, list(pids)
    while todo:
        pid = todo.pop()
        total += _spent(pid)
        todo += _children(pid)
    return total


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
