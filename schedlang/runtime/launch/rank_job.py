"""A running job on local ranks: messages, the failure to report, hangs and time limits."""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.launch.forkserver import HEADER

# ---- CPU time of processes and their descendants, and the time that they waited for a processor.


RECORD = "SCHEDLANG_RECORD"  # environment variable with the folder of records, on every rank
_PROC = Path("/proc")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds of processes and their living descendants; dead processes count 0."""
    if not (_PROC / "self" / "stat").exists():
        return _ps_seconds(set(pids))
    return sum(map(_process_seconds, _family(pids)))


def queued_seconds(pids: Iterable[int]) -> float:
    """Return the seconds that threads of these processes and descendants were ready but not
    running.

    0 if the system does not count them (`/proc/PID/task/TID/schedstat`, nanoseconds on the run
    queue).
    """
    return sum(thread_seconds(pid)[1] for pid in _family(pids))


def thread_seconds(pid: int, threads: Iterable[int] | None = None) -> tuple[float, float]:
    """Return seconds on a processor, and ready but not running, of living threads of a process.

    threads  native ids; None: all
    0 if the system does not count them.
    """
    tasks = _PROC / str(pid) / "task"
    files = (tasks / str(thread) / "schedstat" for thread in threads or ())
    running = queued = 0
    for stat in tasks.glob("*/schedstat") if threads is None else files:
        try:
            fields = stat.read_text().split()
            running, queued = running + int(fields[0]), queued + int(fields[1])
        except (OSError, IndexError):  # the thread has ended, or nothing is counted
            continue
    return running / 1e9, queued / 1e9


def _family(pids: Iterable[int]) -> Iterator[int]:
    """Yield these processes and their living descendants."""
    todo = list(pids)
    while todo:
        pid = todo.pop()
        yield pid
        todo += _children(pid)


def _process_seconds(pid: int) -> float:
    """Return user and system time of a process and of its reaped children."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0.0
    ticks = stat.rpartition(")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for task in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            children += map(int, task.read_text().split())
        except OSError:
            continue
    return children


def _ps_seconds(pids: set[int]) -> float:
    """Return CPU seconds by `ps`, where there is no /proc."""
    text = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,time="], capture_output=True, text=True)
    rows = [line.split() for line in text.stdout.splitlines()]
    return _table_seconds({int(p): (int(pp), _parse_time(t)) for p, pp, t in rows}, pids)


def _table_seconds(table: Mapping[int, tuple[int, float]], pids: set[int]) -> float:
    """Return the time of `pids` and their descendants in a table of pid: (parent, seconds)."""
    family = set(pids)
    while children := {pid for pid, (parent, _) in table.items() if parent in family} - family:
        family |= children
    return sum(table[pid][1] for pid in family if pid in table)


def _parse_time(text: str) -> float:
    """Return the seconds of a time printed as [[days-]hours:]minutes:seconds."""
    days, _, clock = text.rpartition("-")
    total = 0.0
    for part in re.split(":", clock):
        total = total * 60 + float(part)
    return total + 86400 * int(days or 0)


# ---- A running job on local ranks: its messages, its failures, and which failure is the cause.


_CAUSE_DELAY = 1.0  # seconds to wait for the cause if a consequence arrives first
# seconds between two checks; after longer gaps, this process or the machine was stopped
_GAP = 2.0
# seconds in which several ranks may fail with the same error; the lowest rank is named
_SAME_TIME = 0.1

_FRAMES = 12  # innermost calls that are shown
_NOT_USERS = (  # paths of files that are not the user's
    "site-packages",
    sysconfig.get_path("stdlib"),
    str(Path(__file__).parents[2]),
    '"<',
)
_STARTERS = ("launch/forkserver.py", "launch/frames.py")  # files that call the function of a job
THIS_PROCESS = -1  # instead of a rank: the process that started the ranks
_OUTPUT, _CALLS = 20, 12  # lines shown of a process's output, and of its stack
_DUMP = "Fatal Python error: "  # begin of faulthandler's output

ProcessTimes = dict[
    int, tuple[float, float]
]  # pid -> seconds on a processor, and ready but not running


class RankDied(Exception):
    """A rank raised an exception or ended; `error` is a text, `cause` its exception."""

    def __init__(self, rank: int, error: str, cause: BaseException | None = None) -> None:
        super().__init__(f"rank {rank} failed\n{error}")
        self.rank, self.error, self.cause = rank, error, cause


class Hang(Exception):
    """No rank made progress for too long; `stacks_of_ranks` are their stacks (HERE: of this
    process)."""

    def __init__(self, reason: str, stacks: Mapping[int, str]) -> None:
        names = {
            rank: "this process" if rank == THIS_PROCESS else f"rank {rank}" for rank in stacks
        }
        # this process's stack is cut already, and begins with the outermost call
        limits = {THIS_PROCESS: None}
        calls = {
            rank: stack.splitlines()[: limits.get(rank, _FRAMES)] for rank, stack in stacks.items()
        }
        lines = [line for rank in sorted(calls) for line in (f"{names[rank]}:", *calls[rank])]
        super().__init__("\n".join([reason, *lines]))
        self.why, self.stacks = reason, dict(stacks)

    def with_user_calls(self, files: Sequence[str]) -> Hang:
        """Return the same error with only the calls in files of the user, and the innermost, per
        rank.

        `files` are files that call user code: calls outside of them are dropped. A rank without
        calls of the user waits for others, which is said instead.
        """
        stacks = {THIS_PROCESS: self.stacks[THIS_PROCESS]} if THIS_PROCESS in self.stacks else {}
        for rank, stack in self.stacks.items():
            if rank == THIS_PROCESS:
                continue
            calls = [line for line in stack.splitlines() if line.lstrip().startswith("File ")]
            caller = (k for k, line in enumerate(calls) if any(f'{f}"' in line for f in files))
            inside = calls[: next(caller, None)]
            user_calls = [line for line in inside if not any(part in line for part in _NOT_USERS)]
            note = "  waits for the others: nothing of the program runs there"
            stacks[rank] = "\n".join(dict.fromkeys([*calls[:1], *(user_calls or [note])]))
        return Hang(self.why, stacks)


@dataclass
class RankProcess:
    """One process of a job: its number, the socket to it, and its log file."""

    rank: int
    sock: socket.socket
    log: Path
    pid: int = 0
    buffer: bytearray = field(default_factory=bytearray)
    open: bool = True

    def read(self) -> list[Any]:
        """Return the complete messages that have arrived; clear `open` if the other end is
        closed."""
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
class RankJob:
    """The state of a running job, in the process that started it."""

    world: int
    on_progress: Callable[[int, Any], None] | None
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[tuple[int, int, str, BaseException | None]] = field(default_factory=list)
    first_failure: float = 0.0
    last_progress: float = field(default_factory=time.monotonic)
    last_check: float = 0.0
    spent: ProcessTimes | None = None  # by pid, at the first check since the last progress
    looked: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """Start to watch: all ranks are there. The time until now, for imports, does not count."""
        self.last_progress = self.looked = time.monotonic()

    def current_time(self) -> float:
        """Return the current time; time in which this process was stopped does not count for the
        ranks."""
        current = time.monotonic()
        self.last_progress += max(0.0, current - self.looked - _GAP)
        self.looked = current
        return current

    def fail(self, weight: int, rank: int, text: str, cause: BaseException | None = None) -> None:
        """Record a failure; the lowest weight is the cause: 0 died, 1 raised, 2 a consequence."""
        self.first_failure = self.first_failure or time.monotonic()
        self.failures.append((weight, rank, text, cause))


def raise_failure(job: RankJob) -> None:
    """Raise the cause of a failure; a consequence only after a delay for the cause to arrive."""
    if not job.failures:
        return
    weight, rank, text, cause = min(job.failures, key=lambda f: f[:2])
    grace = _CAUSE_DELAY if weight == 2 else _SAME_TIME
    if weight and time.monotonic() - job.first_failure < grace:
        return
    if isinstance(cause, Refusal):
        raise cause
    raise RankDied(rank, text, cause)


def describe_end(code: int, log: Path) -> str:
    """Describe how a process ended, its last output, and its stack: the cause first.

    faulthandler writes the stacks of all threads at a signal; only the thread that got the signal,
    or else the main thread, is shown.
    """
    end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    end += " before its work was done" if code == 0 else ""
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    output, fatal, dump = text.rpartition(_DUMP) if code < 0 else (text, "", "")
    if not fatal:
        return "\n".join([end, *text.splitlines()[-_OUTPUT:]])
    threads = dump.split("hread 0x")
    failing = next(
        (part for part, previous in zip(threads[1:], threads) if previous.endswith("Current t")),
        threads[-1],
    )
    calls = [line for line in failing.splitlines()[1:] if line.startswith("  File ")]
    calls = [line for line in calls if not any(part in line for part in _STARTERS)]
    user_calls = [line for line in calls if not any(part in line for part in _NOT_USERS)]
    if user_calls and user_calls[0] not in calls[:_CALLS]:  # many calls within libraries
        calls = [*calls[:1], *user_calls]
    last = output.strip().splitlines()[-_OUTPUT:]
    return "\n".join([end, *last, fatal + dump.partition("\n")[0], *calls[:_CALLS]])


def unpickle_error(data: bytes) -> BaseException | None:
    """Return the exception that a rank sent, or None if it cannot be unpickled here."""
    try:
        error = pickle.loads(data) if data else None
    except Exception:  # its class may exist only in the rank: its text is shown
        return None
    return error if isinstance(error, BaseException) else None


# ---- Whether the ranks of a job make progress, and their stacks if none does. A rank makes
# progress when its main thread sends something (`progress`, its result), or when it or processes
# that it started use CPU time: compiling, importing and long single operators count; waiting does
# not, because gloo sleeps in a collective that nobody else joins. It is a hang if for `hang_after`
# seconds no rank sent anything, none spent 1/30 of that time on a CPU and none was running or ready
# to run for half of it: if other processes keep the processors busy, a working rank may get nearly
# nothing of them. An endless loop is not detected this way; use `timeout`.


_SLEEPING = 1 / 30  # of one core: below this a rank waits (polling a store takes 1/100)
_READY = 1 / 2  # of the time on a run queue: above this it works, but others use the processors
_DUMPING = 5.0  # seconds for a rank to write its stack
_POLL = 0.25  # seconds between two reads of its log


def check_progress(job: RankJob, ranks: Sequence[RankProcess], hang_after: float) -> None:
    """Raise Hang if no rank made progress for `hang_after` seconds."""
    current = job.current_time()
    pause = max(min(1.0, hang_after / 4), hang_after / 10)
    if current - max(job.last_progress, job.last_check) < pause or job.failures:
        return  # a check reads a file for each thread of each rank
    job.last_check, times = current, _spent_since(ranks)
    previous = job.spent = job.spent or times
    if any(has_worked(times[pid], previous.get(pid, (0.0, 0.0)), hang_after) for pid in times):
        job.last_progress, job.spent = current, times
    elif current - job.last_progress > hang_after:
        raise Hang(f"no rank made progress for {hang_after:g} s", stacks_of_ranks(job, ranks))


def _spent_since(ranks: Sequence[RankProcess]) -> ProcessTimes:
    """Return for each process of these ranks the seconds on a processor and in run queues so
    far, without threads that only wait for others: gloo's may poll for a send that was dropped."""
    times = {}
    for pid in (rank.pid for rank in ranks if rank.pid):
        polled = thread_seconds(pid, _threads_named(pid, "gloo_tcp_loop"))
        spent = cpu_seconds([pid]), queued_seconds([pid])
        times[pid] = spent[0] - polled[0], spent[1] - polled[1]
    return times


def _threads_named(pid: int, name: str) -> list[int]:
    """Return the ids of a process's threads with a name; none if the system does not tell."""
    threads = []
    for comm in (_PROC / str(pid) / "task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended
            threads += [int(comm.parent.name)] if comm.read_text().strip() == name else []
    return threads


def has_worked(now: tuple[float, float], earlier: tuple[float, float], hang_after: float) -> bool:
    """Return whether a process works, by its seconds on a processor and in run queues since
    `earlier`."""
    running, queued = now[0] - earlier[0], now[1] - earlier[1]
    return running >= _SLEEPING * hang_after or running + queued >= _READY * hang_after


def stacks_of_ranks(job: RankJob, ranks: Sequence[RankProcess]) -> dict[int, str]:
    """Return the stack of the main thread of each unfinished rank, innermost call first."""
    waiting = [r for r in ranks if r.pid and r.rank not in job.results]
    sizes = {r.rank: r.log.stat().st_size for r in waiting}
    for rank in waiting:
        os.kill(rank.pid, signal.SIGUSR1)
    end = time.monotonic() + _DUMPING
    return {r.rank: _main_thread(_read_dump(r.log, sizes[r.rank], end)) for r in waiting}


def _read_dump(log: Path, start: int, end: float) -> str:
    """Read what a rank writes about its threads from `start` on, until there is no more."""
    previous, current = "", log.read_bytes()[start:].decode(errors="replace")
    while (current != previous or not current) and time.monotonic() < end:
        time.sleep(_POLL)
        previous, current = current, log.read_bytes()[start:].decode(errors="replace")
    return current


def _main_thread(text: str) -> str:
    """Return the calls of the main thread, which is the last."""
    return "\n".join(text.split("hread 0x")[-1].splitlines()[1:])


# -- a time limit for a whole piece of work --------------------------------------------------------


_REPEAT = 10.0  # seconds until the alarm is repeated, if the exception was swallowed
_ORDERLY = 30.0  # seconds after the limit for an orderly end


class TimeIsUp(BaseException):
    """The limit has passed; a BaseException, so that no `except Exception` of a model catches
    it."""


@dataclass
class TimeLimit:
    """A time limit; `watching`: a pool enforces it on its ranks, or the work is done."""

    seconds: float
    end: float
    watching: bool = False
    stack: str = ""

    @property
    def remaining(self) -> float:
        """Seconds that remain; negative after the limit."""
        return self.end - time.monotonic()

    @property
    def message(self) -> str:
        """The message for work that did not end in time."""
        return f"not finished after {self.seconds:g} s"


_limit: ContextVar[TimeLimit | None] = ContextVar("limit", default=None)


def current_limit() -> TimeLimit | None:
    """Return the limit of this context, if there is one."""
    return _limit.get()


@contextmanager
def limit_time(seconds: float | None, hard: Callable[[str], None] | None = None) -> Iterator[None]:
    """Raise Hang, with the stack of this process or of each rank, after this time.

    Outside the main thread only ranks are limited: Python can interrupt no other thread. With
    `hard`, this process is ended a while after the limit in any case; `hard` gets the text first.
    """
    if seconds is None:
        yield
        return
    limit = TimeLimit(seconds, time.monotonic() + seconds)
    token = _limit.set(limit)
    last = _last_resort(limit, hard) if hard is not None else None
    try:
        with _alarm(limit):
            yield
    except TimeIsUp:
        raise Hang(limit.message, {THIS_PROCESS: limit.stack}) from None
    finally:
        _limit.reset(token)
        if last is not None:
            last.cancel()


def lift_limit() -> None:
    """Lift the current limit: the work is done, only its report is left."""
    if (limit := current_limit()) is not None:
        limit.watching = True


@contextmanager
def _alarm(limit: TimeLimit) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def ring(_number: int, frame: Any) -> None:
        if not limit.watching:
            limit.stack = limit.stack or "".join(traceback.format_stack(frame)[-_FRAMES:]).rstrip()
            raise TimeIsUp

    handler = signal.signal(signal.SIGALRM, ring)
    previous = signal.setitimer(signal.ITIMER_REAL, max(limit.seconds, 1e-3), _REPEAT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *previous)
        signal.signal(signal.SIGALRM, handler)


def _last_resort(limit: TimeLimit, tell: Callable[[str], None]) -> threading.Timer:
    """Start a timer that ends this process, and so its ranks, if the exception does not get
    through."""
    main = threading.main_thread().ident

    def end() -> None:
        frame = sys._current_frames().get(main or 0)
        stack = "".join(traceback.format_stack(frame)[-_FRAMES:]).rstrip() if frame else ""
        tell(str(Hang(limit.message, {THIS_PROCESS: limit.stack or stack})))
        os._exit(3)

    timer = threading.Timer(limit.seconds + _ORDERLY, end)
    timer.daemon = True
    timer.start()
    return timer
