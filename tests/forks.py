"""Processes forked from one that has imported what they would import: each begins at once.

    done = forks.run("-m", "schedlang", "verify", "x.sched", cwd=folder)

is `subprocess.run([sys.executable, ...], capture_output=True, text=True)`, but that the interpreter
and its imports, two seconds of a processor, are there already.  Where the variables of the
environment could change what an import does, and off Linux, it is a new interpreter.  Tests whose
subject is the process, its hash seed or its imports start one themselves.  Ranks that a forked
torchrun starts are forked alike.
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
    """A forked process, asked as a `Popen` is."""

    def __init__(self, pid: int, ended: socket.socket) -> None:
        self.pid, self._ended = pid, ended
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            said = self._ended.recv(_MOST)
            self.returncode = int(said) if said else -signal.SIGKILL  # its parent is gone
            self._ended.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended; raises subprocess.TimeoutExpired."""
        if self.poll() is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        code = self.poll()
        assert code is not None, "it was seen to end"
        return code

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Forks:
    """The process that the others are forked from, started by the first of them."""

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
        known = self._environ or dict(os.environ)
        odd = {name for name, _ in set(known.items()) ^ set(environ.items())}
        return all(name in FREE or name.startswith(FREE_PREFIXES) for name in odd)

    def fork(self, what: tuple[Any, ...], environ: Mapping[str, str], fds: Sequence[int]) -> Fork:
        """Fork one that does `what`; `fds` are its input, output and errors, and one more."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        message = pickle.dumps((what, dict(environ), os.getcwd()))
        with theirs, self._lock:
            self._begin()
            assert self._control is not None, "it has begun"
            socket.send_fds(self._control, [message], [theirs.fileno(), *fds])
        return Fork(int(ours.recv(_MOST)), ours)

    def go_on(
        self, control: socket.socket, before: dict[str, str], environ: dict[str, str]
    ) -> None:
        """Ask the process that this one was forked from; its imports found the variables before."""
        self._control, self._owner = control, os.getpid()
        threads = {name: environ[name] for name in THREADS if name in environ}
        self._environ = {n: v for n, v in before.items() if n not in THREADS} | threads

    def _begin(self) -> None:
        if self._owner == os.getpid():
            return
        self._owner, self._environ = os.getpid(), dict(os.environ)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = (
            "import sys; plain = sys.path[1:]; "
            f"sys.path[:] = {sys.path!r}; from tests import forks; forks.serve(plain)"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                cwd=Path(__file__).parents[1],
                env={**os.environ, **dict.fromkeys(THREADS, "1")},
                start_new_session=True,
            )


# libraries start threads as they are imported, which a fork would not have
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

FORKS = Forks()


def server(
    theirs: socket.socket, preload: Sequence[str], files: Mapping[str, str], scratch: str
) -> Any:
    """A server of ranks, as `Pool` starts one in a new interpreter."""
    if not FORKS.can(os.environ):
        return EXECUTED(theirs, preload, files, scratch)
    with open(os.devnull) as nothing:
        return FORKS.fork(
            ("server", list(sys.path), tuple(preload), dict(files), scratch),
            os.environ,
            [nothing.fileno(), 1, 2, theirs.fileno()],
        )


def anew(*words: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these words in a new interpreter, and take what it prints."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, **how)


class Begun:
    """A forked process whose output is kept in files, asked as a `Popen` with pipes is."""

    def __init__(self, words: list[str], cwd: str, environ: Mapping[str, str]) -> None:
        self._said = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        with open(os.devnull) as nothing:
            fds = [nothing.fileno(), *(file.fileno() for file in self._said)]
            self._process = FORKS.fork(("command", cwd, words), environ, fds)
        self.pid, self.kill = self._process.pid, self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has printed, and of errors, once it has ended."""
        self._process.wait(timeout)
        for file in self._said:
            file.seek(0)
        out, err = (file.read().decode().replace("\r\n", "\n") for file in self._said)
        return out, err


def begin(
    *words: object, cwd: Path | str | None = None, env: Mapping[str, str] | None = None
) -> Begun | subprocess.Popen[str]:
    """Start Python with these words, `-m`, `-c` or a file first."""
    texts, environ = list(map(str, words)), os.environ if env is None else env
    if FORKS.can(environ):
        return Begun(texts, str(cwd or os.getcwd()), environ)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *texts], cwd=cwd, env=env, text=True, **pipes)


def run(
    *words: object,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words, and take what it prints."""
    one = begin(*words, cwd=cwd, env=env)
    try:
        said = one.communicate(timeout)
    except BaseException:
        with contextlib.suppress(OSError):
            os.killpg(one.pid, signal.SIGKILL)
        one.kill()
        raise
    assert one.returncode is not None, "it has ended"
    return subprocess.CompletedProcess([sys.executable, *map(str, words)], one.returncode, *said)


# ---- in the process that is forked ---------------------------------------------------------------


def serve(plain: Sequence[str]) -> None:
    """Import, then fork a process for each message until the tests have ended.

    `plain` is the path of modules as this interpreter found it.
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
    asking = [control]  # the tests, and every forked command
    while True:
        ready, _, _ = select.select([*asking, wake], [], [])
        if wake in ready:
            os.read(wake, 1024)
            _reap(alive)
        for one in [one for one in asking if one in ready]:
            message, fds, _, _ = socket.recv_fds(one, _MOST, 8)
            if message:
                asking.append(_forked(message, fds, plain, asking, (wake, wakes), alive))
            elif one is control:
                os._exit(0)
            else:
                asking.remove(one)
                one.close()


def _forked(
    message: bytes,
    fds: list[int],
    plain: Sequence[str],
    asking: Sequence[socket.socket],
    pipe: tuple[int, int],
    alive: dict[int, socket.socket],
) -> socket.socket:
    """Fork one that does what the message says; what it asks for in its turn comes from here."""
    told = socket.socket(fileno=fds.pop(0))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        for one in (*asking, *alive.values(), told, ours):
            one.close()
        for end in pipe:
            os.close(end)
        _become(*pickle.loads(message), fds, plain, theirs)
    theirs.close()
    for fd in fds:
        os.close(fd)
    alive[pid] = told
    told.send(str(pid).encode())
    return ours


def _reap(alive: dict[int, socket.socket]) -> None:
    for pid in list(alive):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with alive.pop(pid) as told, contextlib.suppress(OSError):
                told.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(
    what: tuple[Any, ...],
    environ: dict[str, str],
    cwd: str,
    fds: list[int],
    plain: Sequence[str],
    control: socket.socket,
) -> None:
    """Be the process that was asked for; never return."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for place, fd in enumerate(fds[:3]):
            os.dup2(fd, place)
            os.close(fd)
        before = dict(os.environ)
        os.environ.clear()
        os.environ.update(environ)
        tempfile.tempdir = None  # asked for anew
        _threads(before.get("OMP_NUM_THREADS"), environ.get("OMP_NUM_THREADS"))
        kind, *told = what
        if kind == "server":
            path, *rest = told
            os.chdir(cwd)
            sys.path[:] = path
            forkserver.main(fds[3], *rest)
            code = 0
        else:
            paths = before.get("PYTHONPATH", "").split(os.pathsep)
            FORKS.go_on(control, before, environ)
            Pool._executed = staticmethod(server)  # type: ignore[method-assign]
            code = _command([one for one in plain if one not in paths], *told)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _threads(before: str | None, now: str | None) -> None:
    """As many threads as torch takes by its environment, which it read when it was imported."""
    if now != before:
        import torch

        torch.set_num_threads(int(now) if now else os.cpu_count() or 1)


def _command(plain: Sequence[str], cwd: str, words: list[str]) -> int:
    """As the interpreter runs `-m`, `-c` or a file, to its exit code."""
    os.chdir(cwd)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, paths), *plain]
    importlib.invalidate_caches()
    at_once = words[0] == "-u"
    words = words[at_once:]
    sys.stdout, sys.stderr = (_written(fd, at_once) for fd in (1, 2))
    try:
        if words[0] == "-m":
            if words[1] == "torch.distributed.run":
                _fork_ranks()
            elif words[1] == "schedlang.testing.gpu":
                _fork_parts()
            sys.path.insert(0, cwd)
            sys.argv[:] = ["-m", *words[2:]]
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        elif words[0] == "-c":
            sys.path.insert(0, "")
            sys.argv[:] = ["-c", *words[2:]]
            if sys.version_info >= (3, 13):  # a traceback shows the lines of such a text, too
                lines = words[1].splitlines(keepends=True)
                linecache.cache["<string>"] = (len(words[1]), None, lines, "<string>")
            exec(compile(words[1], "<string>", "exec"), vars(main))
        else:
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            sys.argv[:] = words
            file = os.path.abspath(words[0])  # so it is in an interpreter
            vars(main)["__file__"] = file
            exec(compile(Path(file).read_bytes(), file, "exec"), vars(main))
        code = 0
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if asked.code is not None and not isinstance(asked.code, int):
            print(asked.code, file=sys.stderr)
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


def _written(fd: int, at_once: bool) -> TextIO:
    """Text as an interpreter writes it: errors line by line, with `-u` all without a buffer."""
    how = "backslashreplace" if fd == 2 else "strict"
    if at_once:
        raw: Any = os.fdopen(fd, "wb", buffering=0)
        return io.TextIOWrapper(raw, errors=how, write_through=True)
    return os.fdopen(fd, "w", buffering=1 if fd == 2 else -1, errors=how)


def _fork_ranks() -> None:
    """Let torchrun, in this process, have its ranks forked instead of starting interpreters."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    started = subprocess_handler.SubprocessHandler._popen

    def forked(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        if args[:2] != (sys.executable, "-u") or not FORKS.can(env):
            return started(self, args, env)
        with open(os.devnull) as nothing:
            fds = [
                nothing.fileno(),
                *(f.fileno() if f else n for n, f in ((1, self._stdout), (2, self._stderr))),
            ]
            return FORKS.fork(("command", os.getcwd(), list(args[1:])), env, fds)

    subprocess_handler.SubprocessHandler._popen = forked  # type: ignore[method-assign]


def _fork_parts() -> None:
    """Let the command that examines a GPU, in this process, have its parts forked alike."""
    from schedlang.testing.gpu import driver

    def popen(args: list[str], **options: Any) -> Any:
        if not FORKS.can(options["env"]):  # Triton's interpreter is chosen as it is imported
            return subprocess.Popen(args, **options)
        with open(os.devnull) as nothing:
            fds = [nothing.fileno(), options["stdout"].fileno(), options["stderr"].fileno()]
            return FORKS.fork(("command", os.getcwd(), args[1:]), options["env"], fds)

    vars(driver)["subprocess"] = types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})
