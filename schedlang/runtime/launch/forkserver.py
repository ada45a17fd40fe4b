"""The server process that local ranks are forked from, and the loop of a rank that runs jobs."""

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

from schedlang.garbage_collection import ProcessState, collect_less_often
from schedlang.ir.modelfile import module_of
from schedlang.runtime.launch import pickling
from schedlang.runtime.launch.frames import call_in_one_piece

# ---- Modules that ranks need to run a program, imported once before the forks. Listed are files
# that import the rest: the program with torch's DTensor, FSDP and checkpoints; sharding,
# recomputation and offloading; and dynamo, which torch's optimizers and its checkpoint import at
# their first call. None of them starts a thread: a fork after that would deadlock.


BASE_MODULES = ("torch", "torch.distributed", "cloudpickle")
PROGRAM_MODULES = (
    "schedlang.passes.lower.build",
    "schedlang.runtime.program",
    "schedlang.runtime.propagation.argument_shards",
    "schedlang.runtime.fusion.fuse",
    "schedlang.runtime.offload.offloaded_activations",
    "schedlang.runtime.activation_memory.recompute",
    "schedlang.runtime.activation_memory.quantized",
    "schedlang.runtime.moe.discrete_choices",
    "schedlang.runtime.sharding.sharded_layer",
    "schedlang.runtime.pipeline.argument_templates",
    "schedlang.runtime.grad_reduction.batch_statistics",
    "schedlang.runtime.initial.sources",
    "numpy.ma",  # imported by numpy's `unique` at its first call
    "torch._dynamo",
)
_PASSES = "schedlang.passes."  # a job that names such a module will build a program


def modules_to_import(names: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that a server imports for these names: they, and what programs need."""
    requested = tuple(names)
    return requested + PROGRAM_MODULES * any(name.startswith(_PASSES) for name in requested)


# ---- The server process, and the loop of a rank. The server imports torch and the named modules
# once, runs nothing with them (a fork after threads have started would deadlock), and forks a rank
# on request. The server is a new interpreter, or a fork of a command that has only imported
# modules. It alone kills and reaps its ranks, each with all processes that it started, and ends
# with them when its parent ends, for any reason.


__runs_ranks__ = True  # marks that no frame of user code is above a rank's function
HEADER = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1
# errors of a rank that are caused by another rank's failure
_CONSEQUENCE = re.compile(
    r"[Cc]onnection (closed|reset|refused)|Broken pipe|[Tt]imed? ?out|connectFullMesh|gloo", re.M
)


def send(sock: socket.socket, message: object, fds: Sequence[int] = ()) -> None:
    """Send one framed message, pickled; `fds` are sent with its first byte."""
    send_bytes(sock, pickle.dumps(message), fds)


def send_bytes(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one framed message that is pickled already."""
    header = HEADER.pack(len(data))
    if fds:
        socket.send_fds(sock, [header], fds)
    else:
        sock.sendall(header)
    sock.sendall(data)


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    """Receive one framed message and its file descriptors; raises EOFError at the end."""
    head, fds, _, _ = socket.recv_fds(sock, HEADER.size, 1)
    head += _receive_exactly(sock, HEADER.size - len(head)) if head else b""
    if not head:
        raise EOFError
    return pickle.loads(_receive_exactly(sock, HEADER.unpack(head)[0])), list(fds)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


# ---- the server ----------------------------------------------------------------------------------


def can_fork() -> bool:
    """Return whether a server may be forked from this process: on Linux, with a single thread.

    A fork has no other threads, but their locks: those of torch would stay locked forever.
    """
    return sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1


class ForkedServer:
    """A server forked from this process, with the interface of a `Popen`."""

    def __init__(
        self,
        own_sock: socket.socket,
        server_sock: socket.socket,
        preload: Sequence[str],
        files: Mapping[str, str],
        scratch: str,
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()  # an interrupt at the terminal is for the parent only
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                own_sock.close()  # else its end is never noticed
                main(server_sock.detach(), preload, files, scratch)
            finally:
                os._exit(0)  # without the parent's exit handlers
        self._ended = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code; raises subprocess.TimeoutExpired."""
        if self.poll() is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("the fork server", timeout or 0.0)
        code = self.poll()
        assert code is not None, "it was seen to end"
        return code

    def kill(self) -> None:
        """Kill the server."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ServerProcess:
    """Whether this process is the server, or a rank forked from it."""

    is_server = False


def main(control_fd: int, preload: Sequence[str], files: Mapping[str, str], scratch: str) -> None:
    """Serve on an inherited socket until its other end is closed or the parent has ended."""
    ServerProcess.is_server = ProcessState.keeps_frozen = True
    collect_less_often()  # collect garbage rarely; ranks do a full collection after each job
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    import_modules(preload, files)
    alive: dict[int, int] = {}
    try:
        _serve(control, alive)
    except (EOFError, OSError):
        pass  # the parent has ended
    finally:
        _kill(alive)
        shutil.rmtree(scratch, ignore_errors=True)  # a killed parent cannot do this


def import_modules(names: Sequence[str], files: Mapping[str, str]) -> None:
    """Import modules that ranks need, and exclude all present objects from garbage collection."""
    gc.disable()  # imports leave nearly no garbage, and collections would scan all objects
    with contextlib.suppress(Exception):  # a rank that needs it will report the error
        load_files(files)
    for name in modules_to_import(names):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()  # a collection would touch, and so copy, memory that ranks share
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
            import_modules(message[1], message[2])
            continue
        if message[0] == "kill":
            _kill(alive)
            _reap(alive, control, wait=True)
            send(control, ("killed",))
            continue
        _, rank, log = message
        pid = os.fork()
        if pid == 0:
            _run_rank(rank, log, fds[0], (control.fileno(), wake_r, wake_w))
        os.close(fds[0])
        alive[pid] = rank
        send(control, ("pid", rank, pid))


def _reap(alive: dict[int, int], control: socket.socket, wait: bool = False) -> None:
    """Collect dead ranks, kill the processes that they started, and tell the parent."""
    for pid, rank in list(alive.items()):
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG))
        if info is not None:
            _kill({pid: rank})
            _, status = os.waitpid(pid, 0)
            del alive[pid]
            send(control, ("dead", rank, pid, os.waitstatus_to_exitcode(status)))


def _kill(alive: Mapping[int, int]) -> None:
    for pid in alive:  # not reaped yet, so the pid is still theirs
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may not be the leader of its group yet


# ---- a rank --------------------------------------------------------------------------------------


class FrozenModules:
    """The number of imported modules when objects were last frozen."""

    modules = 0


class Outbox:
    """The function that sends the `report_progress` messages of this process; None outside a
    rank."""

    tell: Callable[[object], None] | None = None


def report_progress(message: object = None) -> None:
    """Send a message of progress to the parent of this rank; do nothing outside a rank."""
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


def _run_rank(rank: int, log: str, fd: int, close: Sequence[int]) -> None:
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
            _run_job(sock, rank, *job)
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


def _run_job(sock: socket.socket, rank: int, world: int, setup: dict[str, Any]) -> None:
    """Run one job; write its result to a file, or send its error as text, and pickled if possible.

    Large data goes through files: a socket would copy it from buffer to buffer.
    """
    try:
        sys.path[:] = setup["path"]
        os.environ.update(setup["environ"])
        load_files(setup["files"])
        _join(rank, world, setup["store"], setup["threads"])
        from schedlang.runtime.adapters.hook_numbers import number_hooks_from

        number_hooks_from(setup["hooks"])  # hooks of received modules have lower numbers
        with open(setup["job"], "rb") as file:
            fn, args = pickle.load(file)
        send(sock, ("progress", None))
        result = call_in_one_piece(fn, *args)
        with open(result_path := f"{setup['job']}.{rank}", "wb") as file:
            pickling.dump(result, file)
        send(sock, ("done", result_path))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        consequence = is_consequence(error)
        try:
            pickled_error = pickling.dumps(error)
        # an error may contain objects that cannot be pickled: then only its text is sent
        except Exception:
            pickled_error = b""
        send(sock, ("error", text, consequence, pickled_error))
    else:
        _leave()


def is_consequence(error: BaseException) -> bool:
    """Return whether an error of a rank seems to be caused by another rank's."""
    is_remote = isinstance(error, RuntimeError) and bool(_CONSEQUENCE.search(str(error)))
    return is_remote or bool(getattr(error, "consequence", False))  # marked as a consequence


def _join(rank: int, world: int, store: str, threads: int) -> None:
    """Join a gloo process group by a file, without a port."""
    import torch

    from schedlang.runtime.comm import agreement

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    # all ranks are local: the host name need not resolve
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    agreement.join_locally(rank, world, store)


def _leave() -> None:
    from schedlang.runtime.comm import agreement
    from schedlang.runtime.launch import rank_record

    rank_record.end_record()
    with contextlib.suppress(RuntimeError):
        agreement.leave_world()
    gc.collect()
    if len(sys.modules) != FrozenModules.modules:  # imported modules stay: do not scan them again
        FrozenModules.modules = len(sys.modules)
        gc.freeze()
