"""A running job on local ranks: what they said, what failed, and which failure is the cause."""

from __future__ import annotations

import pickle
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schedlang.diagnostic import Refusal
from schedlang.runtime.launching.forkserver import HEADER

_GRACE = 1.0  # seconds to wait for the cause when a consequence arrives first
_STILL = 2.0  # seconds between two looks; more, and this process or the whole machine was stopped
_MOMENT = 0.1  # seconds in which several ranks may fail alike; the lowest is named

HERE = -1  # in the place of a rank: the process that started them
_WORDS, _CALLS = 20, 12  # lines that are told of what a process wrote, and of where it stood
_DUMP = "Fatal Python error: "  # with this faulthandler begins

Times = dict[int, tuple[float, float]]  # seconds on a processor, and in wait of one, by process


class RankDied(Exception):
    """A rank raised an exception or ended; `error` is its account, `cause` its exception."""

    def __init__(self, rank: int, error: str, cause: BaseException | None = None) -> None:
        super().__init__(f"rank {rank} failed\n{error}")
        self.rank, self.error, self.cause = rank, error, cause


class Hang(Exception):
    """No rank got on for too long; `stacks` says where each of them stands (HERE: this process)."""

    def __init__(self, why: str, stacks: Mapping[int, str]) -> None:
        who = {rank: "this process" if rank == HERE else f"rank {rank}" for rank in stacks}
        lines = [f"{who[rank]}:\n{stack}" for rank, stack in sorted(stacks.items())]
        super().__init__("\n".join([why, *lines]))
        self.why, self.stacks = why, dict(stacks)


@dataclass
class Rank:
    """One process of a job: its number, the line to it, and where it writes."""

    rank: int
    sock: socket.socket
    log: Path
    pid: int = 0
    buffer: bytearray = field(default_factory=bytearray)
    open: bool = True

    def read(self) -> list[Any]:
        """The messages that have arrived whole; notes when the other end is closed."""
        try:
            chunk = self.sock.recv(1 << 20)
        except ConnectionError:
            chunk = b""
        self.open = bool(chunk)
        self.buffer += chunk
        return _frames(self.buffer)


def _frames(buffer: bytearray) -> list[Any]:
    messages = []
    size = HEADER.size
    while len(buffer) >= size:
        end = size + HEADER.unpack(buffer[:size])[0]
        if len(buffer) < end:
            break
        messages.append(pickle.loads(buffer[size:end]))
        del buffer[:end]
    return messages


@dataclass
class Job:
    """What is known of a running job."""

    world: int
    on_progress: Callable[[int, Any], None] | None
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[tuple[int, int, str, BaseException | None]] = field(default_factory=list)
    first_failure: float = 0.0
    moved: float = field(default_factory=time.monotonic)
    asked: float = 0.0
    spent: Times | None = None  # by process, when first asked since then
    looked: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """All ranks are there; what was imported until then may have taken any time."""
        self.moved = self.looked = time.monotonic()

    def look(self) -> float:
        """The time now; what passed while this process itself stood still tells of no rank."""
        now = time.monotonic()
        self.moved += max(0.0, now - self.looked - _STILL)
        self.looked = now
        return now

    def fail(self, weight: int, rank: int, text: str, cause: BaseException | None = None) -> None:
        """Note a failure; the lightest is the cause: 0 died, 1 raised, 2 a consequence."""
        self.first_failure = self.first_failure or time.monotonic()
        self.failures.append((weight, rank, text, cause))


def judge(job: Job) -> None:
    """Raise the cause of a failure: if it is a consequence, once the others had time to speak."""
    if not job.failures:
        return
    weight, rank, text, cause = min(job.failures, key=lambda f: f[:2])
    grace = _GRACE if weight == 2 else _MOMENT
    if weight and time.monotonic() - job.first_failure < grace:
        return
    if isinstance(cause, Refusal):
        raise cause
    raise RankDied(rank, text, cause)


def account(code: int, log: Path) -> str:
    """How a process ended, its last words, and where it stood: the cause stands first.

    What faulthandler writes of all threads, once a signal has come, is as long as there are
    threads; of it the one is told in which the signal came, or else the main one.
    """
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    words, fatal, dump = text.rpartition(_DUMP) if code < 0 else (text, "", "")
    if not fatal:
        return "\n".join([how, *text.splitlines()[-_WORDS:]])
    threads = dump.split("hread 0x")
    where = next((one for one, before in zip(threads[1:], threads) if before.endswith("Current t")),
                 threads[-1])  # fmt: skip
    calls = [line for line in where.splitlines()[1:] if line.startswith("  File ")]
    own = [line for line in calls if "launching/forkserver.py" not in line][:_CALLS]
    last = words.strip().splitlines()[-_WORDS:]
    return "\n".join([how, *last, fatal + dump.partition("\n")[0], *own])


def unpickled(data: bytes) -> BaseException | None:
    """The exception in what a rank sent, or None if there is none that can be read here."""
    try:
        error = pickle.loads(data) if data else None
    except Exception:  # it may be of a class that only the rank has: its text is shown
        return None
    return error if isinstance(error, BaseException) else None
