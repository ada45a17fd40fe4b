"""The process that local ranks are forked from, and what a rank does: wait for jobs, run them."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from schedlang.ir.modelfile import module_of
from schedlang.runtime.launch import pickled
from schedlang.runtime.launch.frames import in_one_piece
from schedlang.uncollected import seldom

# ---- What ranks would import one by one while they run a program, imported once before the
# forks.
# Named are files that import the rest: the program with torch's DTensor, FSDP and checkpoints,
# what sharding, recomputation and offloading run, and dynamo, which torch's optimizers and its
# checkpoint import at their first call.  None of them starts a thread: forking after that
# deadlocks.


BASE = ("torch", "torch.distributed", "cloudpickle")
PROGRAMS = (
    "schedlang.passes.lower.build",
    "schedlang.runtime.program",
    "schedlang.runtime.propagation.narrowed",
    "schedlang.runtime.fusion.fuse",
    "schedlang.runtime.offload.saved_tensors",
    "schedlang.runtime.activation_memory.recompute",
    "schedlang.runtime.activation_memory.quantized",
    "schedlang.runtime.moe.choices",
    "schedlang.runtime.sharding.leaf",
    "schedlang.runtime.pipeline.arguments",
    "schedlang.runtime.grad_reduction.batch_statistics",
    "schedlang.runtime.initial.sources",
    "numpy.ma",  # by numpy's `unique`, at its first call
    "torch._dynamo",
)
_PASSES = "schedlang.passes."  # a job that names one of these will build a program


def wanted(names: Iterable[str]) -> tuple[str, ...]:
    """The modules that a server imports where these are named: them, and what programs need."""
    named = tuple(names)
    return named + PROGRAMS * any(name.startswith(_PASSES) for name in named)


# ---- The process that local ranks are forked from, and what a rank does: wait for jobs and run
# them.
# The server imports torch and what else is named once, runs nothing with it (forking after threads
# have started deadlocks), and forks a rank whenever it is told to. It is an interpreter of its own,
# or a fork of a command that has done no more than import. It owns the ranks: it alone
# kills and reaps them, each with all processes that it started, and ends with them when its parent
# ends, for whatever reason.


__runs_ranks__ = True  # no line of a user's stands above a rank's own function
HEADER = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1
# what a rank says when it is another that failed
_CONSEQUENCE = re.compile(
    r"[Cc]onnection (closed|reset|refused)|Broken pipe|[Tt]imed? ?out|connectFullMesh|gloo", re.M
)


def send(sock: socket.socket, message: object, fds: Sequence[int] = ()) -> None:
    """Write one framed message, pickled; `fds` go along with its first byte."""
    send_bytes(sock, pickle.dumps(message), fds)


def send_bytes(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Write one framed message that is pickled already."""
    header = HEADER.pack(len(data))
    if fds:
        socket.send_fds(sock, [header], fds)
    else:
        sock.sendall(header)
    sock.sendall(data)


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    """Read one framed message and the descriptors with it; EOFError at the end."""
    head, fds, _, _ = socket.recv_fds(sock, HEADER.size, 1)
    head += _exactly(sock, HEADER.size - len(head)) if head else b""
    if not head:
        raise EOFError
    return pickle.loads(_exactly(sock, HEADER.unpack(head)[0])), list(fds)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


# ---- the server ----------------------------------------------------------------------------------


def can_fork() -> bool:
    """Whether a server may be forked from this process: on Linux, while it has a single thread.

    A fork has no other thread, but the locks that these hold: those of torch's own are for ever.
    """
    return sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1


class Forked:
    """A server forked from this process, asked as a `Popen` is."""

    def __init__(
        self,
        ours: socket.socket,
        theirs: socket.socket,
        preload: Sequence[str],
        files: Mapping[str, str],
        scratch: str,
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()  # an interrupt at the terminal is for the parent alone
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                ours.close()  # else its end is never seen
                main(theirs.detach(), preload, files, scratch)
            finally:
                os._exit(0)  # without what the parent does at its exit
        self._ended = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended; raises subprocess.TimeoutExpired."""
        if self.poll() is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("the fork server", timeout or 0.0)
        code = self.poll()
        assert code is not None, "it was seen to end"
        return code

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Serving:
    """Whether this process is the server, or a rank that it forked."""

    here = False


def main(control_fd: int, preload: Sequence[str], files: Mapping[str, str], scratch: str) -> None:
    """Serve on an inherited socket until its other end is closed or the parent is gone."""
    Serving.here = True
    seldom()  # ranks do, and behind each job they look for all of it
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    imported(preload, files)
    alive: dict[int, int] = {}
    try:
        _serve(control, alive)
    except (EOFError, OSError):
        pass  # the parent is gone
    finally:
        _kill(alive)
        shutil.rmtree(scratch, ignore_errors=True)  # a parent that was killed cannot


def imported(names: Sequence[str], files: Mapping[str, str]) -> None:
    """Import what ranks need, and keep the collector from all that is there, for good."""
    gc.disable()  # imports leave next to no garbage, and it would look at all of them
    with contextlib.suppress(Exception):  # a rank that needs it will say why it fails
        load_files(files)
    for name in wanted(names):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()  # keep the collector from touching, and so copying, what the ranks share
    gc.enable()


def _serve(control: socket.socket, alive: dict[int, int]) -> None:
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w)
    parent = os.getppid()
    sources: list[Any] = [control, wake_r]
    while os.getppid() == parent:
        ready, _, _ = select.select(sources, [], [], 1.0)
        if wake_r in ready:
            os.read(wake_r, 1024)
        _reap(alive, control)
        if control not in ready:
            continue
        message, fds = receive(control)
        if message[0] == "import":
            imported(message[1], message[2])
            continue
        if message[0] == "kill":
            _kill(alive)
            _reap(alive, control, wait=True)
            send(control, ("killed",))
            continue
        _, rank, log = message
        pid = os.fork()
        if pid == 0:
            _become_rank(rank, log, fds[0], (control.fileno(), wake_r, wake_w))
        os.close(fds[0])
        alive[pid] = rank
        send(control, ("pid", rank, pid))


def _reap(alive: dict[int, int], control: socket.socket, wait: bool = False) -> None:
    """Collect dead ranks, end what they started, and tell the parent."""
    for pid, rank in list(alive.items()):
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG))
        if info is not None:
            _kill({pid: rank})
            _, status = os.waitpid(pid, 0)
            del alive[pid]
            send(control, ("dead", rank, pid, os.waitstatus_to_exitcode(status)))


def _kill(alive: Mapping[int, int]) -> None:
    for pid in alive:  # not reaped yet, so the number is still theirs
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may not have become the leader of its group yet


# ---- a rank --------------------------------------------------------------------------------------


class Kept:
    """The number of modules imported when what lives here was last kept from the collector."""

    modules = 0


class Outbox:
    """The receiver of `progress` of this process; None outside a rank."""

    tell: Callable[[object], None] | None = None


def progress(message: object = None) -> None:
    """Tell the parent of this rank that it got on, and what it did; nothing outside a rank."""
    if Outbox.tell is not None:
        Outbox.tell(message)


def load_files(files: Mapping[str, str]) -> None:
    """Import files under the module names that they have in the parent, once."""
    for name, path in files.items():
        if name not in sys.modules:
            _, load = module_of(name, path)
            try:
                load()
            except BaseException:
                del sys.modules[name]
                raise


def _become_rank(rank: int, log: str, fd: int, close: Sequence[int]) -> None:
    code = 1
    try:
        _detach(close)
        stderr = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(stderr, 2)
        faulthandler.enable(2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        sock = socket.socket(fileno=fd)
        Outbox.tell = lambda message: send(sock, ("progress", message))
        while True:
            try:
                job, _ = receive(sock)
            except (EOFError, OSError):
                code = 0
                break
            _work(sock, rank, *job)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # without the server's exit handlers


def _detach(close: Sequence[int]) -> None:
    server = os.getppid()
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd in close:
        os.close(fd)


def _work(sock: socket.socket, rank: int, world: int, setup: dict[str, Any]) -> None:
    """Run one job; write its result, or send its error as text and, if it can be sent, itself.

    What is large goes by files: through a socket it would be copied from buffer to buffer.
    """
    try:
        sys.path[:] = setup["path"]
        os.environ.update(setup["environ"])
        load_files(setup["files"])
        _join(rank, world, setup["store"], setup["threads"])
        from schedlang.runtime.adapters.hook_numbers import number_hooks_from

        number_hooks_from(setup["hooks"])  # those that the model brings have lower ones
        with open(setup["job"], "rb") as file:
            fn, args = pickle.load(file)
        send(sock, ("progress", None))
        result = in_one_piece(fn, *args)
        with open(made := f"{setup['job']}.{rank}", "wb") as file:
            pickled.dump(result, file)
        send(sock, ("done", made))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        consequence = is_consequence(error)
        try:
            itself = pickled.dumps(error)
        except Exception:  # an error may hold what cannot be sent: its text goes alone
            itself = b""
        send(sock, ("error", text, consequence, itself))
    else:
        _leave()


def is_consequence(error: BaseException) -> bool:
    """Whether an error of a rank comes of another rank's, as far as it tells."""
    of_others = isinstance(error, RuntimeError) and bool(_CONSEQUENCE.search(str(error)))
    return of_others or bool(getattr(error, "consequence", False))  # it says so


def _join(rank: int, world: int, store: str, threads: int) -> None:
    """A process group of gloo over a file, without a port to agree on."""
    import torch

    from schedlang.runtime.comm import agreement

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    # all ranks are local: names of the machine need not resolve
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    agreement.join_locally(rank, world, store)


def _leave() -> None:
    from schedlang.runtime.comm import agreement
    from schedlang.runtime.launch import record

    record.end()
    with contextlib.suppress(RuntimeError):
        agreement.leave()
    gc.collect()
    if len(sys.modules) != Kept.modules:  # what was imported stays: it is not walked again
        Kept.modules = len(sys.modules)
        gc.freeze()
