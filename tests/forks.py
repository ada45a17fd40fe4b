"""Fork processes from one that has done all imports, so that each starts at once.

    done = forks.run("-m", "schedlang", "verify", "x.sched", cwd=folder)

is `subprocess.run([sys.executable, ...], capture_output=True, text=True)`, without the two seconds
for the start of the interpreter and its imports.  Off Linux, and where environment variables could
change what an import does, a new interpreter is started.  Tests of the process itself, its hash
seed or its imports start one themselves.  Ranks of a forked torchrun are forked as well.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import linecache
import os
import pickle
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from schedlang import primitives
from schedlang.garbage_collection import collect_less_often
from schedlang.runtime.launch import forkserver
from schedlang.runtime.launch.pool import Pool

EXECUTED = Pool._executed  # a server in a new interpreter
IMPORTED = (
    *forkserver.modules_to_import(
        ("torch", "torch.distributed", "cloudpickle", "schedlang.passes.prove")
    ),
    *("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"),
    *(f"schedlang.verbs.{verb}" for verb in ("check", "plan", "run", "verify")),
    *("typer.main", "rich.console", "schedlang.equivalence", "schedlang.schedule"),
    # what ranks that make a schedule or build a program by themselves would import one by one
    *(f"schedlang.primitives.{info.name}" for info in pkgutil.iter_modules(primitives.__path__)),
    *("schedlang.pipeline.schedules", "schedlang.runtime.initial.sources", "numpy.ma"),
    *("schedlang.runtime.propagation.dry_run", "schedlang.runtime.propagation.sources"),
    *("schedlang.runtime.sequence_pipelining.trial", "schedlang.runtime.context_parallel.probe"),
)
# variables that no import reads, or that are set anew in the fork
FREE = {
    *("PYTHONPATH", "OMP_NUM_THREADS", "PWD", "OLDPWD", "TMPDIR", "HOME"),
    *("COLUMNS", "LINES", "TERM", "NO_COLOR", "FORCE_COLOR", "CI"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    # torch sets these in this process when it first compiles, and reads them then
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUBLAS_WORKSPACE_CONFIG"),
    *("KMP_DUPLICATE_LIB_OK", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "TORCH_WARM_POOL"),
    *("SCHEDLANG_RECORD", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",  # of torchrun, for process groups that are made later
}
FREE_PREFIXES = ("GITHUB_", "PYTEST_", "TORCHELASTIC_", "GROUP_", "ROLE_")
_MOST = 1 << 20  # bytes of a message


# ---- in the process of the tests -----------------------------------------------------------------


class Fork:
    """A forked process, with the interface of `Popen`."""

    def __init__(self, pid: int, ended: socket.socket) -> None:
        self.pid, self._ended = pid, ended
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            answer = self._ended.recv(_MOST)
            self.returncode = int(answer) if answer else -signal.SIGKILL  # its parent is gone
            self._ended.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; raises subprocess.TimeoutExpired."""
        if self.poll() is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        code = self.poll()
        assert code is not None, "it was seen to end"
        return code

    def kill(self) -> None:
        """Kill the process."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """Controls the process that the others are forked from; the first fork starts it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._environ: dict[str, str] = {}
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None  # ends with this one

    def can(self, environ: Mapping[str, str]) -> bool:
        """Whether a process with these variables may be forked."""
        if sys.platform != "linux":
            return False
        variables = self._environ or dict(os.environ)
        changed = {name for name, _ in set(variables.items()) ^ set(environ.items())}
        return all(name in FREE or name.startswith(FREE_PREFIXES) for name in changed)

    def fork(self, task: tuple[Any, ...], environ: Mapping[str, str], fds: Sequence[int]) -> Fork:
        """Fork a process for a task; `fds`: stdin, stdout, stderr, and for a server its socket."""
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        message = pickle.dumps((task, dict(environ), os.getcwd()))
        with child_end, self._lock:
            self._begin()
            assert self._control is not None, "it has begun"
            socket.send_fds(self._control, [message], [child_end.fileno(), *fds])
        return Fork(int(parent_end.recv(_MOST)), parent_end)

    def go_on(
        self, control: socket.socket, import_environ: dict[str, str], environ: dict[str, str]
    ) -> None:
        """In a forked process: use the process that it was forked from for further forks."""
        self._control, self._owner = control, os.getpid()
        threads = {name: environ[name] for name in THREADS if name in environ}
        self._environ = {n: v for n, v in import_environ.items() if n not in THREADS} | threads

    def _begin(self) -> None:
        if self._owner == os.getpid():
            return
        self._owner, self._environ = os.getpid(), dict(os.environ)
        self._control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = (
            "import sys; plain = sys.path[1:]; "
            f"sys.path[:] = {sys.path!r}; from tests import forks; forks.serve(plain)"
        )
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=child_end,
                stdout=subprocess.DEVNULL,
                cwd=Path(__file__).parents[1],
                env={**os.environ, **dict.fromkeys(THREADS, "1")},
                start_new_session=True,
            )


# libraries start threads as they are imported, which a fork would not have
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

FORKS = ForkServer()


def start_server(
    server_end: socket.socket, preload: Sequence[str], files: Mapping[str, str], scratch: str
) -> Any:
    """Fork a server of ranks, which `Pool` would start in a new interpreter."""
    if not FORKS.can(os.environ):
        return EXECUTED(server_end, preload, files, scratch)
    with open(os.devnull) as nothing:
        return FORKS.fork(
            ("server", list(sys.path), tuple(preload), dict(files), scratch),
            os.environ,
            [nothing.fileno(), 1, 2, server_end.fileno()],
        )


def run_interpreter(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in a new interpreter, and capture its output."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


class ForkedCommand:
    """A forked command whose output goes to files, with the interface of `Popen` with pipes."""

    def __init__(self, arguments: list[str], cwd: str, environ: Mapping[str, str]) -> None:
        self._said = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        with open(os.devnull) as nothing:
            fds = [nothing.fileno(), *(file.fileno() for file in self._said)]
            self._process = FORKS.fork(("command", cwd, arguments), environ, fds)
        self.pid, self.kill = self._process.pid, self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end and return stdout and stderr."""
        self._process.wait(timeout)
        for file in self._said:
            file.seek(0)
        output, err = (file.read().decode().replace("\r\n", "\n") for file in self._said)
        return output, err


def start_python(
    *arguments: object, cwd: Path | str | None = None, env: Mapping[str, str] | None = None
) -> ForkedCommand | subprocess.Popen[str]:
    """Start Python with these arguments: `-m`, `-c` or a file first."""
    texts, environ = list(map(str, arguments)), os.environ if env is None else env
    if FORKS.can(environ):
        return ForkedCommand(texts, str(cwd or os.getcwd()), environ)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *texts], cwd=cwd, env=env, text=True, **pipes)


def run(
    *arguments: object,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, and capture its output."""
    process = start_python(*arguments, cwd=cwd, env=env)
    try:
        output = process.communicate(timeout)
    except BaseException:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        raise
    assert process.returncode is not None, "it has ended"
    return subprocess.CompletedProcess(
        [sys.executable, *map(str, arguments)], process.returncode, *output
    )


# ---- in the process that is forked ---------------------------------------------------------------


def serve(module_paths: Sequence[str]) -> None:
    """Import, then fork a process for each message until the tests have ended.

    The argument is this interpreter's original `sys.path`.
    """
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    for name in IMPORTED:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()
    collect_less_often()
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has none of the other threads"
    alive: dict[int, socket.socket] = {}
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    clients = [control]  # the tests, and every forked command
    while True:
        ready, _, _ = select.select([*clients, wake], [], [])
        if wake in ready:
            os.read(wake, 1024)
            _reap(alive)
        for client in [client for client in clients if client in ready]:
            message, fds, _, _ = socket.recv_fds(client, _MOST, 8)
            if message:
                clients.append(_fork_one(message, fds, module_paths, clients, (wake, wakes), alive))
            elif client is control:
                os._exit(0)
            else:
                clients.remove(client)
                client.close()


def _fork_one(
    message: bytes,
    fds: list[int],
    module_paths: Sequence[str],
    clients: Sequence[socket.socket],
    pipe: tuple[int, int],
    alive: dict[int, socket.socket],
) -> socket.socket:
    """Fork a process for the task of a message; return the socket of its own requests."""
    reply_to = socket.socket(fileno=fds.pop(0))
    parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        for open_socket in (*clients, *alive.values(), reply_to, parent_end):
            open_socket.close()
        for end in pipe:
            os.close(end)
        _run_forked(*pickle.loads(message), fds, module_paths, child_end)
    child_end.close()
    for fd in fds:
        os.close(fd)
    alive[pid] = reply_to
    reply_to.send(str(pid).encode())
    return parent_end


def _reap(alive: dict[int, socket.socket]) -> None:
    for pid in list(alive):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with alive.pop(pid) as reply_to, contextlib.suppress(OSError):
                reply_to.send(str(os.waitstatus_to_exitcode(status)).encode())


def _run_forked(
    task: tuple[Any, ...],
    environ: dict[str, str],
    cwd: str,
    fds: list[int],
    module_paths: Sequence[str],
    control: socket.socket,
) -> None:
    """In the new process: do the task, then exit."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
            os.close(fd)
        old_environ = dict(os.environ)
        os.environ.clear()
        os.environ.update(environ)
        tempfile.tempdir = None  # asked for anew
        _set_threads(old_environ.get("OMP_NUM_THREADS"), environ.get("OMP_NUM_THREADS"))
        kind, *task_arguments = task
        if kind == "server":
            path, *arguments = task_arguments
            os.chdir(cwd)
            sys.path[:] = path
            forkserver.main(fds[3], *arguments)
            code = 0
        else:
            paths = old_environ.get("PYTHONPATH", "").split(os.pathsep)
            FORKS.go_on(control, old_environ, environ)
            Pool._executed = staticmethod(start_server)  # type: ignore[method-assign]
            code = _run_command(
                [path_entry for path_entry in module_paths if path_entry not in paths],
                *task_arguments,
            )
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _set_threads(old_count: str | None, new_count: str | None) -> None:
    """Set torch's number of threads if OMP_NUM_THREADS differs from its value at import."""
    if new_count != old_count:
        import torch

        torch.set_num_threads(int(new_count) if new_count else os.cpu_count() or 1)


def _run_command(module_paths: Sequence[str], cwd: str, arguments: list[str]) -> int:
    """Run `-m`, `-c` or a file as the interpreter does, and return its exit code."""
    os.chdir(cwd)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, paths), *module_paths]
    importlib.invalidate_caches()
    unbuffered = arguments[0] == "-u"
    arguments = arguments[unbuffered:]
    sys.stdout, sys.stderr = (_text_stream(fd, unbuffered) for fd in (1, 2))
    try:
        if arguments[0] == "-m":
            if arguments[1] == "torch.distributed.run":
                _fork_ranks()
            elif arguments[1] == "schedlang.testing.gpu":
                _fork_parts()
            sys.path.insert(0, cwd)
            sys.argv[:] = ["-m", *arguments[2:]]
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        elif arguments[0] == "-c":
            sys.path.insert(0, "")
            sys.argv[:] = ["-c", *arguments[2:]]
            if sys.version_info >= (3, 13):  # a traceback shows the lines of such a text, too
                lines = arguments[1].splitlines(keepends=True)
                linecache.cache["<string>"] = (len(arguments[1]), None, lines, "<string>")
            exec(compile(arguments[1], "<string>", "exec"), vars(main))
        else:
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            sys.argv[:] = arguments
            file = os.path.abspath(arguments[0])  # so it is in an interpreter
            vars(main)["__file__"] = file
            exec(compile(Path(file).read_bytes(), file, "exec"), vars(main))
        code = 0
    except SystemExit as exit_request:
        code = (
            exit_request.code
            if isinstance(exit_request.code, int)
            else int(exit_request.code is not None)
        )
        if exit_request.code is not None and not isinstance(exit_request.code, int):
            print(exit_request.code, file=sys.stderr)
    except BaseException as error:
        code = 1
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code & 0xFF


def _text_stream(fd: int, unbuffered: bool) -> TextIO:
    """A text stream as the interpreter opens it: stderr by lines, with `-u` unbuffered."""
    error_mode = "backslashreplace" if fd == 2 else "strict"
    if unbuffered:
        raw: Any = os.fdopen(fd, "wb", buffering=0)
        return io.TextIOWrapper(raw, errors=error_mode, write_through=True)
    return os.fdopen(fd, "w", buffering=1 if fd == 2 else -1, errors=error_mode)


def _fork_ranks() -> None:
    """Let torchrun in this process fork its ranks instead of starting interpreters."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    original = subprocess_handler.SubprocessHandler._popen

    def forked(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        if args[:2] != (sys.executable, "-u") or not FORKS.can(env):
            return original(self, args, env)
        with open(os.devnull) as nothing:
            fds = [
                nothing.fileno(),
                *(f.fileno() if f else n for n, f in ((1, self._stdout), (2, self._stderr))),
            ]
            return FORKS.fork(("command", os.getcwd(), list(args[1:])), env, fds)

    subprocess_handler.SubprocessHandler._popen = forked  # type: ignore[method-assign]


def _fork_parts() -> None:
    """Let the command that tests a GPU fork its parts instead of starting interpreters."""
    from schedlang.testing.gpu import driver

    def popen(args: list[str], **options: Any) -> Any:
        if not FORKS.can(options["env"]):  # Triton's interpreter is chosen as it is imported
            return subprocess.Popen(args, **options)
        with open(os.devnull) as nothing:
            fds = [nothing.fileno(), options["stdout"].fileno(), options["stderr"].fileno()]
            return FORKS.fork(("command", os.getcwd(), args[1:]), options["env"], fds)

    vars(driver)["subprocess"] = types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})
