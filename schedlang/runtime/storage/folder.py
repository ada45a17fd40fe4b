"""A folder that all ranks of a job write, and that is replaced completely or not at all."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.runtime.comm import world

# ---- A lock: one job at a time writes into a folder.


LOCK, CLAIM = ".schedlang-lock", ".schedlang-claim"
# errors of file systems without such locks
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


class LockHeld(Exception):
    """Another job writes into the folder: its process and host, if the lock file has them."""

    def __init__(self, holder: str) -> None:
        pid, _, host = holder.strip().partition(" ")
        self.pid, self.host = (pid, host) if pid.isdigit() and host else ("", "")
        super().__init__(holder)

    def diagnostic(self, folder: Path) -> Diagnostic:
        """Return the message that another job writes into this folder."""
        holder = f"process {self.pid} on `{self.host}`" if self.pid else "another job"
        return Diagnostic(
            "S638",
            f"another job is saving into `{folder}`",
            notes=(f"it is {holder}", "nothing was changed"),
            helps=(
                "use a different folder for each job",
                "if it is an older run of this job, stop it",
            ),
        )


@contextmanager
def lock_file(file: Path, stays: bool = True) -> Iterator[None]:
    """Hold the lock of a file within a block; raises LockHeld at once, or OSError.

    The lock is a kernel lock of the open file: it ends with the process that holds it, however that
    ends. With `stays=False` the holder removes the file.
    """
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockHeld(os.pread(handle, 256, 0).decode(errors="replace")) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            with _claim_by_link(file.with_name(CLAIM if stays else f"{file.name}.claim")):
                yield
            if not stays:
                file.unlink(missing_ok=True)
            return
        if not _is_same_file(handle, file):  # the former holder has removed it
            with lock_file(file, stays):
                yield
            return
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, _holder_line(), 0)
            yield
        finally:
            if not stays:
                file.unlink(missing_ok=True)
            fcntl.flock(handle, fcntl.LOCK_UN)  # also for descriptors that a fork has inherited
    finally:
        os.close(handle)


def _is_same_file(handle: int, file: Path) -> bool:
    """Return whether the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(handle), file.lstat())
    except FileNotFoundError:
        return False


def _holder_line() -> bytes:
    return f"{os.getpid()} {socket.gethostname()}\n".encode()


@contextmanager
def _claim_by_link(path: Path) -> Iterator[None]:
    """Hold a lock by a file that only one process can create, on file systems without locks.

    A file of a dead process of this host is taken over; a file of another host is respected.
    """
    own_file = path.with_name(f"{path.name}.{os.getpid()}.{socket.gethostname()}")
    own_file.write_bytes(_holder_line())  # complete before it gets its name
    try:
        try:
            os.link(own_file, path)
        except FileExistsError:
            holder = path.read_text(errors="replace") if path.is_file() else ""
            if not _holder_died(LockHeld(holder)):
                raise LockHeld(holder) from None
            os.replace(own_file, path)
            if path.read_bytes() != _holder_line():  # another process has taken it over, too
                raise LockHeld(path.read_text(errors="replace")) from None
    finally:
        own_file.unlink(missing_ok=True)
    try:
        yield
    finally:
        if path.is_file() and path.read_bytes() == _holder_line():
            path.unlink()


def _holder_died(lock: LockHeld) -> bool:
    """Return whether the holder was a process of this host that has ended."""
    if lock.host != socket.gethostname() or not lock.pid:
        return False
    try:
        os.kill(int(lock.pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


# ---- Exchange of two names on the disk: in one move if the system can, else in three.
# Linux (`renameat2`) and macOS (`renamex_np`) can on most file systems; Python has no call for it.


_HERE = -100  # AT_FDCWD: paths are relative to the working folder
_EXCHANGE = 2  # RENAME_EXCHANGE; macOS' RENAME_SWAP has the same number
# errors of file systems and kernels that cannot
_NO_EXCHANGE = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV}


def exchange_names(first: Path, second: Path, between: Path) -> None:
    """Exchange two names. Raises OSError; then both keep their own.

    If that takes three moves, `second` has the name `between` meanwhile.
    """
    if _exchange_atomically(first, second):
        return
    second.rename(between)
    try:
        first.rename(second)
    except OSError:
        between.rename(second)
        raise
    between.rename(first)


def _exchange_atomically(first: Path, second: Path) -> bool:
    """Exchange two names in one move; False if the system cannot."""
    names = os.fsencode(first), os.fsencode(second)
    library = ctypes.CDLL(None, use_errno=True)
    try:
        if sys.platform == "darwin":
            failed = library.renamex_np(*names, _EXCHANGE)
        else:
            failed = library.renameat2(_HERE, names[0], _HERE, names[1], _EXCHANGE)
    except AttributeError:  # an older C library, or another system
        return False
    if failed and (number := ctypes.get_errno()) not in _NO_EXCHANGE:
        raise OSError(number, os.strerror(number), str(first), None, str(second))
    return not failed


# ---- A folder that is replaced completely or not at all, by all ranks of a job.


T = TypeVar("T")
SAVING, REPLACED = ".saving", ".replaced"  # endings of temporary folders beside the target


def run_on_all_ranks(
    step: Callable[[], T],
    diagnose: Callable[[BaseException], Diagnostic],
    failures: tuple[type[BaseException], ...] = (OSError,),
) -> T:
    """Return the result of a step; if it fails on any rank, raise the same Refusal on all."""
    refusal, value = None, None
    try:
        value = step()
    except Refusal as error:
        refusal = error
    except failures as error:
        refusal = Refusal(diagnose(error))
    if world.any_rank(refusal is not None):
        raise next(problem for problem in world.distinct_objects(refusal) if problem is not None)
    return value  # type: ignore[return-value]


def fill_folder(
    rank: int,
    begin: Callable[[], Path],
    fill: Callable[[Path], None],
    publish: Callable[[Path], None],
    diagnose: Callable[[BaseException], Diagnostic],
) -> None:
    """Let all ranks fill a new folder; rank 0 creates it, and renames it when it is complete.

    Raises the same Refusal on all ranks; the new folder is then removed.
    """
    new_folder: Path | None = None

    def on_first(step: Callable[[], T]) -> T | None:
        return run_on_all_ranks(step if rank == 0 else lambda: None, diagnose)

    try:
        new_folder = world.broadcast_object(0, on_first(begin))
        assert new_folder is not None
        folder: Path = new_folder
        run_on_all_ranks(lambda: _check_visible(folder), diagnose)
        fill(folder)
        on_first(lambda: publish(folder))
    except BaseException:
        if rank == 0 and new_folder is not None:
            shutil.rmtree(new_folder, ignore_errors=True)
        raise


def replace_folder(
    target: Path,
    rank: int,
    fill: Callable[[Path], None],
    *,
    marks: Sequence[str],
    diagnose: Callable[[BaseException], Diagnostic],
    failures: tuple[type[BaseException], ...],
) -> None:
    """Let all ranks fill a new folder, then put it in the place of the target.

    The old folder keeps its name until the new one is on the disk; `marks` are file names, one of
    which a replaceable folder must have. A lock excludes other jobs meanwhile. Raises the same
    Refusal on all ranks, and leaves everything unchanged.
    """
    with ExitStack() as stack:
        fill_folder(
            rank,
            lambda: _make_folder(target, marks, stack),
            lambda new_folder: run_on_all_ranks(lambda: fill(new_folder), diagnose, failures),
            lambda new_folder: _publish(target, new_folder),
            diagnose,
        )


def temporary_name(target: Path, ending: str) -> Path:
    """Return a new name beside the target, for a folder that is not in place yet, or no more."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}{ending}")


def leftovers(target: Path, ending: str) -> list[Path]:
    """Return the temporary folders beside the target of jobs that died."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}{re.escape(ending)}")
    return [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]


def _make_folder(target: Path, marks: Sequence[str], stack: ExitStack) -> Path:
    """Lock the target, remove leftovers of dead jobs, and create the new folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        stack.enter_context(lock_file(target.with_name(f".{target.name}.lock"), stays=False))
    except LockHeld as lock_held:
        raise Refusal(lock_held.diagnostic(target)) from None
    if not os.path.lexists(target):  # a job died between the moves of an exchange
        former = [path for path in leftovers(target, REPLACED) if path.is_dir()]
        if former:
            max(former, key=lambda path: path.stat().st_mtime_ns).rename(target)
    if target.exists() and not _is_replaceable(target, marks):
        raise Refusal.of(
            "S632",
            f"`{target}` exists, and is not a checkpoint",
            notes=("only a checkpoint or an empty folder may be replaced",),
            helps=("give the path of another folder",),
        )
    _remove_leftovers(target)
    new_folder = temporary_name(target, SAVING)
    new_folder.mkdir()
    return new_folder


def _remove_leftovers(target: Path) -> None:
    for ending in (SAVING, REPLACED):
        for leftover in leftovers(target, ending):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_replaceable(target: Path, marks: Sequence[str]) -> bool:
    has_mark = target.is_dir() and any((target / mark).is_file() for mark in marks)
    return has_mark or (target.is_dir() and not any(target.iterdir()))


def _check_visible(folder: Path) -> None:
    if not folder.is_dir():
        raise Refusal.of(
            "S631",
            f"not all ranks see `{folder.parent}`",
            notes=("each rank writes its shards into this folder",),
            helps=("give a path on a file system that all nodes share",),
        )


def _publish(target: Path, new_folder: Path) -> None:
    """Flush the new folder to disk, exchange it with the old one, and remove that."""
    sync_tree(new_folder)
    former = target.exists()
    if former:
        exchange_names(new_folder, target, temporary_name(target, REPLACED))
    else:
        new_folder.rename(target)
    try:
        sync(target.parent)
    except BaseException:  # undo
        if former:
            exchange_names(new_folder, target, temporary_name(target, REPLACED))
        else:
            target.rename(new_folder)
        raise
    _remove_leftovers(target)


def sync_tree(folder: Path) -> None:
    """Flush all files below a folder, and their names, to disk."""
    for inner, _, names in os.walk(folder):
        for name in (*names, "."):
            sync(Path(inner, name))


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
