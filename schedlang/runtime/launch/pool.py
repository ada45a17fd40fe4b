"""A pool of warm local ranks with gloo: started once, used for many jobs, and always cleaned up."""

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
from schedlang.ir.modelfile import ImportState
from schedlang.runtime.adapters.hook_numbers import next_hook_number
from schedlang.runtime.adapters.torch_attention import make_kernel_names_picklable
from schedlang.runtime.launch import forkserver, pickling
from schedlang.runtime.launch.forkserver import BASE_MODULES, report_progress
from schedlang.runtime.launch.rank_job import (
    Hang,
    RankDied,
    RankJob,
    RankProcess,
    check_progress,
    current_limit,
    describe_end,
    raise_failure,
    stacks_of_ranks,
    unpickle_error,
)

# ---- Temporary folders of a process, and removal of those that killed processes have left.


PREFIX = "schedlang-"
_LOCK = ".lock"  # locked by the process that owns the folder, as long as it lives


def make_folder() -> tuple[Path, int]:
    """Make a new temporary folder; return it and a descriptor that is open while it is used.

    The folder gets its name only once it is locked, so that no other process removes it.
    """
    remove_abandoned()
    hidden = Path(tempfile.mkdtemp(prefix="." + PREFIX))
    lock = os.open(hidden / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    _try_lock(lock)
    folder = hidden.with_name(PREFIX + secrets.token_hex(6))
    hidden.rename(folder)
    return folder, lock


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """Yield a folder that is removed afterwards, at the latest when the next one is made."""
    folder, lock = make_folder()
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned() -> None:
    """Remove the folders of killed processes of this user."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_LOCK}"):
        folder = lock.parent
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _try_lock(descriptor):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Take the lock, if no process has it; return whether it was taken."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# ---- A pool of warm local ranks. The ranks are forked by a server that has torch imported
# (forkserver); functions and arguments are sent by cloudpickle (closures and `__main__` included);
# and rendezvous is a file, so that no port is needed.


__all__ = ["Hang", "Pool", "RankDied", "report_progress"]

_TICK = 0.25  # seconds between two checks of the ranks
Server = subprocess.Popen[bytes] | forkserver.ForkedServer


class Pool:
    """Local ranks, started at the first job and again after a failure.

    preload  modules imported before the ranks are forked, besides those named by the first job
    files    module name -> a file that cannot be imported by name, such as a model file
    forked   a command that has run nothing yet lets the server be forked from its process, so that
             nothing is imported twice; only on Linux, for a process with one thread
    """

    def __init__(
        self,
        preload: Sequence[str] = BASE_MODULES,
        files: Mapping[str, str | Path] | None = None,
        *,
        forked: bool = False,
    ) -> None:
        # each rank would start the next pool, without end
        if forkserver.ServerProcess.is_server or ImportState.active:
            raise Refusal(_started_by_ranks())
        self.files: dict[str, str] = {}
        self._scratch, lock = make_folder()  # for stores and logs
        weakref.finalize(self, os.close, lock)
        self._ranks: list[RankProcess] = []
        self._jobs = 0
        self._lock = threading.Lock()
        self._note(files or {})
        self._start(tuple(preload), forked and forkserver.can_fork())

    def import_files(self, files: Mapping[str, str | Path], *, here: bool = False) -> None:
        """Let the server import more files now; running ranks import them at their next job.

        `here`: this process has imported the files. Then a server that was forked from this
        process, and has no ranks yet, is replaced by a new fork that has them; this needs a process
        with one thread.
        """
        self._note(files)
        forked = isinstance(self._server, forkserver.ForkedServer)
        if here and forked and not self._ranks and forkserver.can_fork():
            self._control.close()
            self._server.wait()  # it removes its folder, which the next server uses
            self._finalizer.detach()
            self._start(self._preload, forked=True)
            return
        with contextlib.suppress(OSError):  # `run` restarts a dead server
            forkserver.send(self._control, ("import", (), self.files))

    def _note(self, files: Mapping[str, str | Path]) -> None:
        self.files |= {name: str(path) for name, path in files.items()}

    def _start(self, preload: tuple[str, ...], forked: bool = False) -> None:
        self._preload, self._owner = preload, os.getpid()
        self._scratch.mkdir(exist_ok=True)
        self._control, server_sock = socket.socketpair()
        setup = preload, self.files, str(self._scratch)
        if forked:
            forkserver.import_modules(preload, {})  # in this process, which needs most of it too
            self._server: Server = forkserver.ForkedServer(self._control, server_sock, *setup)
        else:
            self._server = self._executed(server_sock, *setup)
        server_sock.close()
        self._inbox = RankProcess(-1, self._control, self._scratch / "server")
        # the server ends when our socket is closed, so no other cleanup is needed
        self._finalizer = weakref.finalize(self, _end, self._control, self._server, self._scratch)

    @staticmethod
    def _executed(
        server_sock: socket.socket, preload: Sequence[str], files: Mapping[str, str], scratch: str
    ) -> Server:
        """Start a server in a new interpreter."""
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from schedlang.runtime.launch import forkserver; "
            f"forkserver.main({server_sock.fileno()}, {preload!r}, {files!r}, {scratch!r})"
        )
        return subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[server_sock.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is for this process only
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

        `meanwhile` is called here once the ranks have begun, before their messages are read: an
        exception in it ends the ranks, and is raised before any error of theirs.
        """
        assert os.getpid() == self._owner and self._finalizer.alive, "a pool belongs to one process"
        make_kernel_names_picklable()
        with self._lock:
            blob = pickling.dump_job((fn, args))
            job = RankJob(world, on_progress)
            self._jobs += 1
            folder = self._scratch / str(self._jobs)
            # Not in the folder, which is removed while ranks may still be leaving: a FileStore
            # opens its file once more when it is dropped, and waits for hours if the file's folder
            # is gone.
            store = folder.with_suffix(".store")
            setup: dict[str, Any] = {"path": sys.path, "files": self.files}
            setup |= {"store": str(store), "job": str(folder / "job")}
            setup |= {"environ": dict(environ or {}), "threads": threads_per_rank(world)}
            setup |= {"hooks": next_hook_number()}
            try:
                self._grow(world, job, blob)
                folder.mkdir()
                (folder / "job").write_bytes(blob)
                for rank in self._ranks[:world]:
                    self._send(rank, pickle.dumps((world, setup)))
                if meanwhile is not None:
                    meanwhile()
                with _pause_limit():
                    self._watch(job, timeout, hang_after)
            except BaseException:
                self._kill()
                store.unlink(missing_ok=True)  # else the last leaving rank removes it
                raise
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return [job.results[rank] for rank in range(world)]

    def _grow(self, world: int, job: RankJob, blob: bytes) -> None:
        """Fork ranks until there are enough; after a death between two jobs, fork all anew."""
        if self._server.poll() is not None:
            self._restart()
        while select.select([self._control], [], [], 0)[0]:
            self._hear_server(None)
        if any(rank.pid == 0 or not rank.open for rank in self._ranks):
            self._kill()
        if len(self._ranks) < world:  # imported once in the server, not in each rank
            forkserver.send(self._control, ("import", modules_of(blob), self.files))
        for number in range(len(self._ranks), world):
            own_sock, rank_sock = socket.socketpair()
            log = self._scratch / f"rank{number}.log"
            forkserver.send(self._control, ("fork", number, str(log)), [rank_sock.fileno()])
            rank_sock.close()
            self._ranks.append(RankProcess(number, own_sock, log))
        while any(rank.pid == 0 for rank in self._ranks):
            self._hear_server(job)

    def _restart(self) -> None:
        for rank in self._ranks:
            rank.sock.close()
        self._ranks = []
        self._finalizer.detach()
        self._control.close()
        self._start(self._preload)

    def _send(self, rank: RankProcess, data: bytes) -> None:
        try:
            forkserver.send_bytes(rank.sock, data)
        except ConnectionError:
            rank.open = False  # the server will report how it died

    def _hear_server(self, job: RankJob | None) -> bool:
        """Process the server's messages; return True once it confirms a kill."""
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
                    job.fail(0, rank.rank, describe_end(message[3], rank.log))
        return killed

    def _known(self, number: int, pid: int) -> RankProcess | None:
        """Return the rank if its process is still the current one."""
        rank = self._ranks[number] if number < len(self._ranks) else None
        return rank if rank is not None and rank.pid == pid else None

    def _watch(self, job: RankJob, timeout: float | None, hang_after: float) -> None:
        """Watch the ranks until all results are there; raise errors."""
        end, reason = None if timeout is None else time.monotonic() + timeout, ""
        limit = current_limit()
        if limit is not None and (end is None or limit.end < end):
            end, reason = limit.end, limit.message
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
                raise_failure(job)
                if end is not None and time.monotonic() > end:
                    raise Hang(
                        reason or f"not finished after {timeout:g} s", stacks_of_ranks(job, ranks)
                    )
                check_progress(job, ranks, hang_after)

    def _hear_rank(self, job: RankJob, rank: RankProcess) -> None:
        for kind, *content in rank.read():
            job.last_progress, job.spent = time.monotonic(), None
            if kind == "done":
                with open(content[0], "rb") as file:
                    job.results[rank.rank] = pickle.load(file)
            elif kind == "error":
                cause = unpickle_error(content[2])
                job.fail(2 if content[1] else 1, rank.rank, content[0], cause)
            elif job.on_progress is not None and content[0] is not None:
                job.on_progress(rank.rank, content[0])
                job.last_progress = (
                    time.monotonic()
                )  # the time of the callback does not count as a hang

    def _kill(self) -> None:
        """Let the server end all ranks and wait for their end."""
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
def _pause_limit() -> Iterator[None]:
    """Leave the current time limit, within the block, to the code that watches the ranks."""
    limit = current_limit()
    if limit is None:
        yield
        return
    previous, limit.watching = limit.watching, True
    try:
        yield
    finally:
        limit.watching = previous


def threads_per_rank(world: int) -> int:
    """Return the threads of each of `world` local ranks: together as many as torch uses.

    A world of one then uses the same number, and sums in the same order: the gradient of a norm
    differs in its last bit between numbers of threads.
    """
    torch = sys.modules.get("torch")
    threads = int(torch.get_num_threads()) if torch else os.cpu_count() or 1
    return max(1, (_threads.get() or threads) // world)


@contextmanager
def use_threads_of_ranks(world: int) -> Iterator[None]:
    """Compute within the block with as many threads as each rank has; ranks started within are
    unaffected.

    With fewer threads a sum has longer chains of roundings, so another error. And threads that wait
    for the next sum spin on processors that other processes need.
    """
    import torch

    previous = torch.get_num_threads()
    torch.set_num_threads(threads_per_rank(world))
    token = _threads.set(_threads.get() or previous)
    try:
        yield
    finally:
        _threads.reset(token)
        torch.set_num_threads(previous)


# torch's number of threads where none is set
_threads: ContextVar[int | None] = ContextVar("_threads", default=None)


def modules_of(blob: bytes) -> tuple[str, ...]:
    """Return the modules imported in this process that a pickle names."""
    strings = {arg for _, arg, _ in pickletools.genops(blob) if isinstance(arg, str)}
    return tuple(sorted(text for text in strings if text in sys.modules and text != "__main__"))


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


def shared_pool() -> Pool:
    """Return the pool of this process, started at the first call."""
    global _shared
    if _shared is None or not _shared._finalizer.alive or _shared._owner != os.getpid():
        _shared = Pool()
        atexit.register(_shared.close)
    return _shared
