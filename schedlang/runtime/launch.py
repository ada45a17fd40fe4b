"""A warm pool of local gloo ranks: started once, used for many jobs, and never left behind.

    pool = Pool()
    results = pool.run(function, 4, argument, ...)          # function(argument, ...) on 4 ranks

The ranks are forked by a server that has torch imported (forkserver), functions and arguments
travel by cloudpickle (closures and `__main__` included), and rendezvous is a file, so that no port
is needed.

How a hang is told from slow work. A rank gets on when its main thread sends something (`progress`,
its result), or when CPU time is spent by it or by processes that it started: compiling, importing
and long single operators count, waiting does not, because gloo sleeps in a collective that nobody
else joins. It is a hang if during `hang_after` seconds no rank sent anything and none spent 1/30 of
that time on a CPU. The error says where each rank stands. An endless loop is not recognised so;
`timeout` is for that.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schedlang.diagnostic import Refusal
from schedlang.runtime import forkserver
from schedlang.runtime.cpu import cpu_seconds
from schedlang.runtime.forkserver import progress

__all__ = ["Hang", "Pool", "RankDied", "progress"]

_TICK = 0.25  # seconds between two looks at the ranks
_GRACE = 1.0  # seconds to wait for the cause when a consequence arrives first
_SLEEPING = 1 / 30  # of one core: below this a rank waits (one that polls a store takes 1/100)


class RankDied(Exception):
    """A rank raised an exception or ended; `error` is its account, `cause` its exception."""

    def __init__(self, rank: int, error: str, cause: BaseException | None = None) -> None:
        super().__init__(f"rank {rank} failed\n{error}")
        self.rank, self.error, self.cause = rank, error, cause


class Hang(Exception):
    """No rank got on for too long; `stacks` says where each of them stands."""

    def __init__(self, why: str, stacks: Mapping[int, str]) -> None:
        lines = [f"rank {rank}:\n{stack}" for rank, stack in sorted(stacks.items())]
        super().__init__("\n".join([why, *lines]))
        self.why, self.stacks = why, dict(stacks)


@dataclass
class _Rank:
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
    size = forkserver.HEADER.size
    while len(buffer) >= size:
        end = size + forkserver.HEADER.unpack(buffer[:size])[0]
        if len(buffer) < end:
            break
        messages.append(pickle.loads(buffer[size:end]))
        del buffer[:end]
    return messages


@dataclass
class _Job:
    """What is known of a running job."""

    world: int
    on_progress: Callable[[int, Any], None] | None
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[tuple[int, int, str, BaseException | None]] = field(default_factory=list)
    first_failure: float = 0.0
    moved: float = field(default_factory=time.monotonic)
    spent: dict[int, float] = field(default_factory=dict)  # CPU seconds by process, then

    def fail(self, weight: int, rank: int, text: str, cause: BaseException | None = None) -> None:
        """Note a failure; the lightest is the cause: 0 died, 1 raised, 2 a consequence."""
        self.first_failure = self.first_failure or time.monotonic()
        self.failures.append((weight, rank, text, cause))


class Pool:
    """Local ranks, started when first needed and again after a failure.

    `preload` are modules imported once before the ranks are forked; `files` maps module names to
    files that cannot be imported by name, such as a model file; both only make starting faster or
    unpickling possible.
    """

    def __init__(
        self,
        preload: Sequence[str] = ("torch", "torch.distributed", "cloudpickle"),
        files: Mapping[str, str | Path] | None = None,
    ) -> None:
        self.files = {name: str(path) for name, path in (files or {}).items()}
        self._scratch = Path(forkserver.scratch())
        self._ranks: list[_Rank] = []
        self._jobs = 0
        self._lock = threading.Lock()
        self._start(tuple(preload))

    def _start(self, preload: tuple[str, ...]) -> None:
        self._preload, self._owner = preload, os.getpid()
        self._control, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from schedlang.runtime import forkserver; "
            f"forkserver.main({theirs.fileno()}, {preload!r}, {self.files!r})"
        )
        self._server = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is for us alone
        )
        theirs.close()
        self._inbox = _Rank(-1, self._control, self._scratch / "server")
        # the server ends when our end is closed, so this is all there is to tidy up
        self._finalizer = weakref.finalize(self, _end, self._control, self._server, self._scratch)

    def close(self) -> None:
        """End the server and all ranks; the pool cannot be used afterwards."""
        self._finalizer()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., Any],
        world: int,
        *args: Any,
        timeout: float | None = None,
        hang_after: float = 30.0,
        on_progress: Callable[[int, Any], None] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `fn(*args)` on ranks 0..world-1 of a gloo group and return their results by rank.

        `on_progress(rank, message)` is called for each `progress(message)` of a rank. Raises
        RankDied with the failed rank's own error, Hang, or the Refusal that a rank raised; then all
        ranks are gone and the next call starts new ones.
        """
        import cloudpickle  # type: ignore[import-untyped]

        assert os.getpid() == self._owner and self._finalizer.alive, "a pool belongs to one process"
        with self._lock:
            blob = cloudpickle.dumps((fn, args))
            job = _Job(world, on_progress)
            self._jobs += 1
            store = self._scratch / f"store{self._jobs}"
            setup = {"path": sys.path, "files": self.files, "store": str(store)}
            setup["environ"] = dict(environ or {})
            try:
                self._grow(world, job)
                for rank in self._ranks[:world]:
                    self._send(rank, pickle.dumps((world, setup, blob)))
                self._watch(job, timeout, hang_after)
            except BaseException:
                self._kill()
                raise
            finally:
                store.unlink(missing_ok=True)
            return [job.results[rank] for rank in range(world)]

    def _grow(self, world: int, job: _Job) -> None:
        """Fork ranks until there are enough; after a death between two jobs, all of them."""
        if self._server.poll() is not None:
            self._restart()
        while select.select([self._control], [], [], 0)[0]:
            self._hear_server(None)
        if any(rank.pid == 0 or not rank.open for rank in self._ranks):
            self._kill()
        for number in range(len(self._ranks), world):
            ours, theirs = socket.socketpair()
            log = self._scratch / f"rank{number}.log"
            forkserver.send(self._control, ("fork", number, str(log)), [theirs.fileno()])
            theirs.close()
            self._ranks.append(_Rank(number, ours, log))
        while any(rank.pid == 0 for rank in self._ranks):
            self._hear_server(job)

    def _restart(self) -> None:
        for rank in self._ranks:
            rank.sock.close()
        self._ranks = []
        self._finalizer.detach()
        self._control.close()
        self._start(self._preload)

    def _send(self, rank: _Rank, data: bytes) -> None:
        try:
            forkserver.send_bytes(rank.sock, data)
        except ConnectionError:
            rank.open = False  # the server will say how it died

    def _hear_server(self, job: _Job | None) -> bool:
        """Take in what the server says; True once it confirms a kill."""
        killed = False
        messages = self._inbox.read()
        if not self._inbox.open:
            raise RankDied(-1, f"the fork server ended with code {self._server.wait()}")
        for message in messages:
            if message[0] == "pid":
                self._ranks[message[1]].pid = message[2]
            elif message[0] == "killed":
                killed = True
            elif rank := self._known(message[1], message[2]):
                rank.open, rank.pid = False, 0
                if job and rank.rank < job.world and rank.rank not in job.results:
                    job.fail(0, rank.rank, _account(message[3], rank.log))
        return killed

    def _known(self, number: int, pid: int) -> _Rank | None:
        """The rank if this process is still the one that we mean."""
        rank = self._ranks[number] if number < len(self._ranks) else None
        return rank if rank is not None and rank.pid == pid else None

    def _watch(self, job: _Job, timeout: float | None, hang_after: float) -> None:
        """Until all results are there; raises what went wrong."""
        end = None if timeout is None else time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ, None)
            for rank in self._ranks[: job.world]:
                selector.register(rank.sock, selectors.EVENT_READ, rank)
            while len(job.results) < job.world:
                for key, _ in selector.select(_TICK):
                    if key.data is None:
                        self._hear_server(job)
                    else:
                        self._hear_rank(job, key.data)
                        if not key.data.open:
                            selector.unregister(key.data.sock)
                _judge(job)
                self._doubt(job, end, timeout, hang_after)

    def _hear_rank(self, job: _Job, rank: _Rank) -> None:
        for kind, *what in rank.read():
            job.moved, job.spent = time.monotonic(), self._spent(job)
            if kind == "done":
                job.results[rank.rank] = pickle.loads(what[0])
            elif kind == "error":
                cause = _unpickled(what[2])
                job.fail(2 if what[1] else 1, rank.rank, what[0], cause)
            elif job.on_progress is not None and what[0] is not None:
                job.on_progress(rank.rank, what[0])

    def _spent(self, job: _Job) -> dict[int, float]:
        return {r.pid: cpu_seconds([r.pid]) for r in self._ranks[: job.world] if r.pid}

    def _doubt(
        self, job: _Job, end: float | None, timeout: float | None, hang_after: float
    ) -> None:
        """Raise Hang if no rank gets on, see the top of this file."""
        now = time.monotonic()
        if end is not None and now > end:
            raise Hang(f"not finished after {timeout:g} s", self._stacks(job))
        if now - job.moved < min(1.0, hang_after / 4) or job.failures:
            return
        spent = self._spent(job)
        most = max((spent[p] - job.spent.get(p, 0) for p in spent), default=0)
        if most >= _SLEEPING * hang_after:
            job.moved, job.spent = now, spent
        elif now - job.moved > hang_after:
            raise Hang(f"no rank got on for {hang_after:g} s", self._stacks(job))

    def _stacks(self, job: _Job) -> dict[int, str]:
        """Where the main thread of each unfinished rank stands, innermost call first."""
        waiting = [r for r in self._ranks[: job.world] if r.pid and r.rank not in job.results]
        sizes = {r.rank: r.log.stat().st_size for r in waiting}
        for rank in waiting:
            os.kill(rank.pid, signal.SIGUSR1)
        time.sleep(0.5)
        found = {}
        for rank in waiting:
            text = rank.log.read_bytes()[sizes[rank.rank] :].decode(errors="replace")
            frames = text.split("hread 0x")[-1].splitlines()[1:]  # the main thread comes last
            found[rank.rank] = "\n".join(frames[:12])
        return found

    def _kill(self) -> None:
        """End all ranks, by the server, which waits until they are gone."""
        try:
            forkserver.send(self._control, ("kill",))
            while not self._hear_server(None):
                pass
        except (RankDied, OSError):
            pass  # the server is gone, and the ranks with it
        for rank in self._ranks:
            rank.sock.close()
        self._ranks = []


def _judge(job: _Job) -> None:
    """Raise the cause of a failure: if it is a consequence, once the others had time to speak."""
    if not job.failures:
        return
    weight, rank, text, cause = min(job.failures, key=lambda f: f[:2])
    grace = _GRACE if weight == 2 else _TICK / 2
    if weight and time.monotonic() - job.first_failure < grace:
        return
    if isinstance(cause, Refusal):
        raise cause
    raise RankDied(rank, text, cause)


def _account(code: int, log: Path) -> str:
    """How a process ended, and its last words."""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    words = log.read_text(errors="replace").strip().splitlines()[-20:] if log.exists() else []
    return "\n".join([how, *words])


def _unpickled(data: bytes) -> BaseException | None:
    try:
        error = pickle.loads(data) if data else None
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


def _end(control: socket.socket, server: subprocess.Popen[bytes], scratch: Path) -> None:
    control.close()
    try:
        server.wait(5)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    shutil.rmtree(scratch, ignore_errors=True)


_shared: Pool | None = None


def shared() -> Pool:
    """The pool of this process, started at the first call."""
    global _shared
    if _shared is None or not _shared._finalizer.alive or _shared._owner != os.getpid():
        _shared = Pool()
        atexit.register(_shared.close)
    return _shared
