"""A warm pool of local gloo ranks: started once, used for many jobs, and never left behind."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import pickletools
import secrets
import select
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir.modelfile import Importing
from schedlang.runtime.adapters.hook_numbers import next_hook_number
from schedlang.runtime.adapters.torch_attention import let_kernels_travel
from schedlang.runtime.launch import forkserver, pickled
from schedlang.runtime.launch.forkserver import BASE, progress
from schedlang.runtime.launch.job import (
    Hang,
    Job,
    Rank,
    RankDied,
    account,
    current,
    doubt,
    judge,
    stacks,
    unpickled,
)

# ---- Temporary folders of a process, and the sweep of those that killed ones have left.


PREFIX = "schedlang-"
_LOCK = ".lock"  # held by the process whose folder it is, for as long as it lives


def made() -> tuple[Path, int]:
    """A new temporary folder, and what keeps it: a descriptor that is open while it is used.

    It gets its name only once it is locked, so that no other process takes it for left behind.
    """
    sweep()
    first = Path(tempfile.mkdtemp(prefix="." + PREFIX))
    kept = os.open(first / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    _locked(kept)
    folder = first.with_name(PREFIX + secrets.token_hex(6))
    first.rename(folder)
    return folder, kept


@contextlib.contextmanager
def temporary() -> Iterator[str]:
    """A folder that is gone afterwards, at the latest when the next one is made."""
    folder, kept = made()
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(kept)


def sweep() -> None:
    """Remove the folders of processes of this user that were killed."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_LOCK}"):
        folder = lock.parent
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            held = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _locked(held):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


def _locked(descriptor: int) -> bool:
    """Take the lock, if nobody has it."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# ---- A warm pool of local gloo ranks: started once, used for many jobs, and never left behind.
#     pool = Pool()
#     results = pool.run(function, 4, argument, ...)          # function(argument, ...) on 4 ranks
#
# The ranks are forked by a server that has torch imported (forkserver), functions and arguments
# travel by cloudpickle (closures and `__main__` included), and rendezvous is a file, so that no
# port is needed.


__all__ = ["Hang", "Pool", "RankDied", "progress"]

_TICK = 0.25  # seconds between two looks at the ranks
Server = subprocess.Popen[bytes] | forkserver.Forked


class Pool:
    """Local ranks, started when first needed and again after a failure.

    `preload` are modules imported before the ranks are forked, besides those that the first job
    names; `files` maps module names to files that cannot be imported by name, such as a model file.
    A command that has run nothing lets the server be `forked` from it, so that nothing is imported
    twice; so it is where this process has one thread, on Linux.
    """

    def __init__(
        self,
        preload: Sequence[str] = BASE,
        files: Mapping[str, str | Path] | None = None,
        *,
        forked: bool = False,
    ) -> None:
        if forkserver.Serving.here or Importing.now:  # each would start the next one, without end
            raise Refusal(_started_by_ranks())
        self.files: dict[str, str] = {}
        self._scratch, kept = made()  # stores, logs
        weakref.finalize(self, os.close, kept)
        self._ranks: list[Rank] = []
        self._jobs = 0
        self._lock = threading.Lock()
        self._note(files or {})
        self._start(tuple(preload), forked and forkserver.can_fork())

    def know(self, files: Mapping[str, str | Path], *, here: bool = False) -> None:
        """Let the server import more files, at once; ranks that run already do so at their job.

        Where they have been imported `here`, a server that was forked from this process, which has
        still one thread, and that has no ranks yet gives way to another fork, which has them.
        """
        self._note(files)
        forked = isinstance(self._server, forkserver.Forked)
        if here and forked and not self._ranks and forkserver.can_fork():
            self._control.close()
            self._server.wait()  # it removes the folder that the next one works in
            self._finalizer.detach()
            self._start(self._preload, forked=True)
            return
        with contextlib.suppress(OSError):  # a server that is gone is started again by `run`
            forkserver.send(self._control, ("import", (), self.files))

    def _note(self, files: Mapping[str, str | Path]) -> None:
        self.files |= {name: str(path) for name, path in files.items()}

    def _start(self, preload: tuple[str, ...], forked: bool = False) -> None:
        self._preload, self._owner = preload, os.getpid()
        self._scratch.mkdir(exist_ok=True)
        self._control, theirs = socket.socketpair()
        told = preload, self.files, str(self._scratch)
        if forked:
            forkserver.imported(preload, {})  # for this process, which needs most of it, as well
            self._server: Server = forkserver.Forked(self._control, theirs, *told)
        else:
            self._server = self._executed(theirs, *told)
        theirs.close()
        self._inbox = Rank(-1, self._control, self._scratch / "server")
        # the server ends when our end is closed, so this is all there is to tidy up
        self._finalizer = weakref.finalize(self, _end, self._control, self._server, self._scratch)

    @staticmethod
    def _executed(
        theirs: socket.socket, preload: Sequence[str], files: Mapping[str, str], scratch: str
    ) -> Server:
        """A server in a new interpreter."""
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from schedlang.runtime.launch import forkserver; "
            f"forkserver.main({theirs.fileno()}, {preload!r}, {files!r}, {scratch!r})"
        )
        return subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is for us alone
        )

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
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Call `fn(*args)` on ranks 0..world-1 of a gloo group and return their results by rank.

        `on_progress(rank, message)` is called for each `progress(message)` of a rank. Raises
        RankDied with the failed rank's own error, Hang, or the Refusal that a rank raised; then all
        ranks are gone and the next call starts new ones.

        `meanwhile` is called here once the ranks have begun, before anything that they say is
        heard: what it raises ends them, and comes before any error of theirs.
        """
        assert os.getpid() == self._owner and self._finalizer.alive, "a pool belongs to one process"
        let_kernels_travel()
        with self._lock:
            blob = pickled.sent((fn, args))
            job = Job(world, on_progress)
            self._jobs += 1
            folder = self._scratch / str(self._jobs)
            # Not in the folder, which goes while ranks may still leave: a FileStore that is let
            # go of opens its file once more, and waits for hours if the folder of it has gone.
            store = folder.with_suffix(".store")
            setup: dict[str, Any] = {"path": sys.path, "files": self.files}
            setup |= {"store": str(store), "job": str(folder / "job")}
            setup |= {"environ": dict(environ or {}), "threads": threads_each(world)}
            setup |= {"hooks": next_hook_number()}
            try:
                self._grow(world, job, blob)
                folder.mkdir()
                (folder / "job").write_bytes(blob)
                for rank in self._ranks[:world]:
                    self._send(rank, pickle.dumps((world, setup)))
                if meanwhile is not None:
                    meanwhile()
                with _watching():
                    self._watch(job, timeout, hang_after)
            except BaseException:
                self._kill()
                store.unlink(missing_ok=True)  # the last rank that leaves takes it away, else
                raise
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return [job.results[rank] for rank in range(world)]

    def _grow(self, world: int, job: Job, blob: bytes) -> None:
        """Fork ranks until there are enough; after a death between two jobs, all of them."""
        if self._server.poll() is not None:
            self._restart()
        while select.select([self._control], [], [], 0)[0]:
            self._hear_server(None)
        if any(rank.pid == 0 or not rank.open for rank in self._ranks):
            self._kill()
        if len(self._ranks) < world:  # imported once in the server, not by each rank
            forkserver.send(self._control, ("import", modules_of(blob), self.files))
        for number in range(len(self._ranks), world):
            ours, theirs = socket.socketpair()
            log = self._scratch / f"rank{number}.log"
            forkserver.send(self._control, ("fork", number, str(log)), [theirs.fileno()])
            theirs.close()
            self._ranks.append(Rank(number, ours, log))
        while any(rank.pid == 0 for rank in self._ranks):
            self._hear_server(job)

    def _restart(self) -> None:
        for rank in self._ranks:
            rank.sock.close()
        self._ranks = []
        self._finalizer.detach()
        self._control.close()
        self._start(self._preload)

    def _send(self, rank: Rank, data: bytes) -> None:
        try:
            forkserver.send_bytes(rank.sock, data)
        except ConnectionError:
            rank.open = False  # the server will say how it died

    def _hear_server(self, job: Job | None) -> bool:
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
                    job.fail(0, rank.rank, account(message[3], rank.log))
        return killed

    def _known(self, number: int, pid: int) -> Rank | None:
        """The rank if this process is still the one that we mean."""
        rank = self._ranks[number] if number < len(self._ranks) else None
        return rank if rank is not None and rank.pid == pid else None

    def _watch(self, job: Job, timeout: float | None, hang_after: float) -> None:
        """Watch the ranks until all results are there; raise what went wrong."""
        end, why = None if timeout is None else time.monotonic() + timeout, ""
        limit = current()
        if limit is not None and (end is None or limit.end < end):
            end, why = limit.end, limit.why
        ranks = self._ranks[: job.world]
        job.begin()
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ, None)
            for rank in ranks:
                selector.register(rank.sock, selectors.EVENT_READ, rank)
            while len(job.results) < job.world:
                for key, _ in selector.select(_TICK):
                    if key.data is None:
                        self._hear_server(job)
                    else:
                        self._hear_rank(job, key.data)
                        if not key.data.open:
                            selector.unregister(key.data.sock)
                judge(job)
                if end is not None and time.monotonic() > end:
                    raise Hang(why or f"not finished after {timeout:g} s", stacks(job, ranks))
                doubt(job, ranks, hang_after)

    def _hear_rank(self, job: Job, rank: Rank) -> None:
        for kind, *what in rank.read():
            job.moved, job.spent = time.monotonic(), None
            if kind == "done":
                with open(what[0], "rb") as file:
                    job.results[rank.rank] = pickle.load(file)
            elif kind == "error":
                cause = unpickled(what[2])
                job.fail(2 if what[1] else 1, rank.rank, what[0], cause)
            elif job.on_progress is not None and what[0] is not None:
                job.on_progress(rank.rank, what[0])
                job.moved = time.monotonic()  # ranks are not asked how long that took

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


@contextmanager
def _watching() -> Iterator[None]:
    """Leave the current limit, for the time of a block, to the watcher of the ranks."""
    limit = current()
    if limit is None:
        yield
        return
    before, limit.watching = limit.watching, True
    try:
        yield
    finally:
        limit.watching = before


def threads_each(world: int) -> int:
    """The threads of each of so many ranks here: together as many as torch takes.

    A world of one then takes just as many, and sums in the same order: the gradient of a norm
    differs in its last bit between numbers of threads.
    """
    torch = sys.modules.get("torch")
    threads = int(torch.get_num_threads()) if torch else os.cpu_count() or 1
    return max(1, (_threads.get() or threads) // world)


@contextmanager
def threads_of_ranks(world: int) -> Iterator[None]:
    """Compute with as many threads as each of so many ranks has; ranks that are started within have
    as many as ever.

    The more threads share a sum, the shorter its chains of roundings, and the less its error.  And
    threads that wait for the next sum do so actively, on the processors of whoever runs beside.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads_each(world))
    taken = _threads.set(_threads.get() or before)
    try:
        yield
    finally:
        _threads.reset(taken)
        torch.set_num_threads(before)


# what torch takes where nothing is shared out
_threads: ContextVar[int | None] = ContextVar("_threads", default=None)


def modules_of(blob: bytes) -> tuple[str, ...]:
    """The modules imported here that a pickle names."""
    words = {arg for _, arg, _ in pickletools.genops(blob) if isinstance(arg, str)}
    return tuple(sorted(word for word in words if word in sys.modules and word != "__main__"))


def _started_by_ranks() -> Diagnostic:
    return Diagnostic(
        "S905",
        "this file starts ranks: each of them would start ranks again when it imports the file",
        notes=("ranks import the files that hold the model, the loss and the optimizer",),
        helps=('put the code that it runs under `if __name__ == "__main__":`',),
    )


def _end(control: socket.socket, server: Server, scratch: Path) -> None:
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
