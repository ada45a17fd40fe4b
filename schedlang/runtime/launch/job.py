"""A running job on local ranks: what they said, what failed first, whether they get on in time."""

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
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.launch.forkserver import HEADER

# ---- CPU time of processes and all that they started: what they had so far, what they waited
# for.


RECORD = "SCHEDLANG_RECORD"  # the variable that names the folder of records, on every rank
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
    return sum(thread_seconds(pid)[1] for pid in _family(pids))


def thread_seconds(pid: int, threads: Iterable[int] | None = None) -> tuple[float, float]:
    """Seconds that living threads of a process (some, by their numbers; None: all) had of a
    processor, and that they waited for one; 0 where the system does not count it."""
    tasks = _PROC / str(pid) / "task"
    files = (tasks / str(one) / "schedstat" for one in threads or ())
    ran = queued = 0
    for stat in tasks.glob("*/schedstat") if threads is None else files:
        try:
            both = stat.read_text().split()
            ran, queued = ran + int(both[0]), queued + int(both[1])
        except (OSError, IndexError):  # the thread has ended, or nothing is counted
            continue
    return ran / 1e9, queued / 1e9


def _family(pids: Iterable[int]) -> Iterator[int]:
    """These processes and their living descendants."""
    todo = list(pids)
    while todo:
        pid = todo.pop()
        yield pid
        todo += _children(pid)


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


# ---- A running job on local ranks: what they said, what failed, and which failure is the cause.


_GRACE = 1.0  # seconds to wait for the cause when a consequence arrives first
_STILL = 2.0  # seconds between two looks; more, and this process or the whole machine was stopped
_MOMENT = 0.1  # seconds in which several ranks may fail alike; the lowest is named

_FRAMES = 12  # innermost calls that are told
_NOT_USERS = (  # where files lie that no user wrote
    "site-packages",
    sysconfig.get_path("stdlib"),
    str(Path(__file__).parents[2]),
    '"<',
)
_STARTERS = ("launch/forkserver.py", "launch/frames.py")  # call what a job is
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
        cut = {HERE: None}  # this process's are cut, and begin with the outermost
        told = {
            rank: stack.splitlines()[: cut.get(rank, _FRAMES)] for rank, stack in stacks.items()
        }
        lines = [line for rank in sorted(told) for line in (f"{who[rank]}:", *told[rank])]
        super().__init__("\n".join([why, *lines]))
        self.why, self.stacks = why, dict(stacks)

    def of_users(self, by: Sequence[str]) -> Hang:
        """The same, but of each rank's calls only those in files of the user's, and the innermost.

        `by` are files that call what a user wrote: what is outside of them is left out. A rank that
        stands in no call of the user's waits for others: so much is said instead.
        """
        told = {HERE: self.stacks[HERE]} if HERE in self.stacks else {}
        for rank, stack in self.stacks.items():
            if rank == HERE:
                continue
            calls = [line for line in stack.splitlines() if line.lstrip().startswith("File ")]
            caller = (k for k, line in enumerate(calls) if any(f'{one}"' in line for one in by))
            inside = calls[: next(caller, None)]
            own = [line for line in inside if not any(part in line for part in _NOT_USERS)]
            waits = "  waits for the others: nothing of the program runs there"
            told[rank] = "\n".join(dict.fromkeys([*calls[:1], *(own or [waits])]))
        return Hang(self.why, told)


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
    """The state of a running job, as its starter knows it."""

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
    """Describe how a process ended, its last words, and where it stood: the cause stands first.

    What faulthandler writes of all threads, once a signal has come, is as long as there are
    threads; of it the one is told in which the signal came, or else the main one.
    """
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    how += " before its work was done" if code == 0 else ""
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    words, fatal, dump = text.rpartition(_DUMP) if code < 0 else (text, "", "")
    if not fatal:
        return "\n".join([how, *text.splitlines()[-_WORDS:]])
    threads = dump.split("hread 0x")
    where = next(
        (one for one, before in zip(threads[1:], threads) if before.endswith("Current t")),
        threads[-1],
    )
    calls = [line for line in where.splitlines()[1:] if line.startswith("  File ")]
    own = [line for line in calls if not any(one in line for one in _STARTERS)][:_CALLS]
    last = words.strip().splitlines()[-_WORDS:]
    return "\n".join([how, *last, fatal + dump.partition("\n")[0], *own])


def unpickled(data: bytes) -> BaseException | None:
    """The exception in what a rank sent, or None if there is none that can be read here."""
    try:
        error = pickle.loads(data) if data else None
    except Exception:  # it may be of a class that only the rank has: its text is shown
        return None
    return error if isinstance(error, BaseException) else None


# ---- Whether the ranks of a job get on, and where each of them stands if none does.
# A rank gets on when its main thread sends something (`progress`, its result), or when CPU time is
# spent by it or by processes that it started: compiling, importing and long single operators
# count, waiting does not, because gloo sleeps in a collective that nobody else joins. It is a hang
# if during `hang_after` seconds no rank sent anything, none spent 1/30 of that time on a CPU and
# none had, or queued for, one for half of it: where others keep the processors busy, a rank that
# works may get next to nothing of them. An endless loop is not recognised so; `timeout` is for
# that.


_SLEEPING = 1 / 30  # of one core: below this a rank waits (one that polls a store takes 1/100)
_WANTING = 1 / 2  # of the time on a run queue: above this it works, and others take the processors
_DUMPING = 5.0  # seconds for a rank to write where it stands
_POLL = 0.25  # seconds between two looks at what it has written


def doubt(job: Job, ranks: Sequence[Rank], hang_after: float) -> None:
    """Raise Hang if no rank got on for `hang_after` seconds."""
    now = job.look()
    pause = max(min(1.0, hang_after / 4), hang_after / 10)
    if now - max(job.moved, job.asked) < pause or job.failures:
        return  # asking reads a file for each thread of each rank
    job.asked, times = now, _spent_since(ranks)
    before = job.spent = job.spent or times
    if any(works(times[pid], before.get(pid, (0.0, 0.0)), hang_after) for pid in times):
        job.moved, job.spent = now, times
    elif now - job.moved > hang_after:
        raise Hang(f"no rank made progress for {hang_after:g} s", stacks(job, ranks))


def _spent_since(ranks: Sequence[Rank]) -> Times:
    """Seconds that each process of these ranks had, and waited for, so far."""
    pids = [[rank.pid] for rank in ranks if rank.pid]
    return {one[0]: (cpu_seconds(one), queued_seconds(one)) for one in pids}


def works(now: tuple[float, float], then: tuple[float, float], hang_after: float) -> bool:
    """Return whether a process that had so much of a processor, and waited so long for one,
    works."""
    ran, queued = now[0] - then[0], now[1] - then[1]
    return ran >= _SLEEPING * hang_after or ran + queued >= _WANTING * hang_after


def stacks(job: Job, ranks: Sequence[Rank]) -> dict[int, str]:
    """Return the stack of the main thread of each unfinished rank, innermost call first."""
    waiting = [r for r in ranks if r.pid and r.rank not in job.results]
    sizes = {r.rank: r.log.stat().st_size for r in waiting}
    for rank in waiting:
        os.kill(rank.pid, signal.SIGUSR1)
    end = time.monotonic() + _DUMPING
    return {r.rank: _main_thread(_dumped(r.log, sizes[r.rank], end)) for r in waiting}


def _dumped(log: Path, start: int, end: float) -> str:
    """Read what a rank writes of its threads from `start` on, until nothing more comes."""
    text, more = "", log.read_bytes()[start:].decode(errors="replace")
    while (more != text or not more) and time.monotonic() < end:
        time.sleep(_POLL)
        text, more = more, log.read_bytes()[start:].decode(errors="replace")
    return more


def _main_thread(text: str) -> str:
    """The calls of the main thread, which comes last."""
    return "\n".join(text.split("hread 0x")[-1].splitlines()[1:])


# -- a limit of time for a whole piece of work -----------------------------------------------------


_AGAIN = 10.0  # seconds after which the alarm comes again, where something holds on
_LAST = 30.0  # seconds beyond the limit for all to end in order


class TimeIsUp(BaseException):
    """The limit has passed; no `except Exception` of a model's takes it for its own."""


@dataclass
class Limit:
    """A time limit, in seconds from a point of time; `watching` while a pool holds its ranks to
    it."""

    seconds: float
    end: float
    watching: bool = False
    stack: str = ""

    @property
    def left(self) -> float:
        """Seconds from now on; below zero where it has passed."""
        return self.end - time.monotonic()

    @property
    def why(self) -> str:
        """The message for work that did not end in time."""
        return f"not finished after {self.seconds:g} s"


_limit: ContextVar[Limit | None] = ContextVar("limit", default=None)


def current() -> Limit | None:
    """The limit under which this runs, if there is one."""
    return _limit.get()


@contextmanager
def limited(seconds: float | None, hard: Callable[[str], None] | None = None) -> Iterator[None]:
    """Raise Hang, saying where this process or each rank stands, once the time is over.

    Off the main thread only ranks are held to it: Python interrupts no other.  With `hard` this
    process ends, whatever it does, a while after the limit; the account is given to it first.
    """
    if seconds is None:
        yield
        return
    limit = Limit(seconds, time.monotonic() + seconds)
    token = _limit.set(limit)
    last = _last_resort(limit, hard) if hard is not None else None
    try:
        with _alarm(limit):
            yield
    except TimeIsUp:
        raise Hang(limit.why, {HERE: limit.stack}) from None
    finally:
        _limit.reset(token)
        if last is not None:
            last.cancel()


def let_go() -> None:
    """Lift the limit of now: the work is done but for telling of it."""
    if (limit := current()) is not None:
        limit.watching = True


@contextmanager
def _alarm(limit: Limit) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def ring(_number: int, frame: Any) -> None:
        if not limit.watching:
            limit.stack = limit.stack or "".join(traceback.format_stack(frame)[-_FRAMES:]).rstrip()
            raise TimeIsUp

    handler = signal.signal(signal.SIGALRM, ring)
    before = signal.setitimer(signal.ITIMER_REAL, max(limit.seconds, 1e-3), _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


def _last_resort(limit: Limit, tell: Callable[[str], None]) -> threading.Timer:
    """Start a timer that ends this process, and so its ranks, where no exception gets through."""
    main = threading.main_thread().ident

    def end() -> None:
        frame = sys._current_frames().get(main or 0)
        stack = "".join(traceback.format_stack(frame)[-_FRAMES:]).rstrip() if frame else ""
        tell(str(Hang(limit.why, {HERE: limit.stack or stack})))
        os._exit(3)

    timer = threading.Timer(limit.seconds + _LAST, end)
    timer.daemon = True
    timer.start()
    return timer
