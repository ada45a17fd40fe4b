"""A folder that is replaced whole or not at all, by all ranks of a job."""

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

# ---- A folder, or the place of one, that one job at a time writes into.


LOCK, CLAIM = ".schedlang-lock", ".schedlang-claim"
# a file system that has no such locks
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


class LockHeld(Exception):
    """Another job writes into the folder: its process and host, as far as it has said."""

    def __init__(self, holder: str) -> None:
        pid, _, host = holder.strip().partition(" ")
        self.pid, self.host = (pid, host) if pid.isdigit() and host else ("", "")
        super().__init__(holder)

    def diagnostic(self, folder: Path) -> Diagnostic:
        """The message that another job is at work in, or on, this folder."""
        who = f"process {self.pid} on `{self.host}`" if self.pid else "another job"
        return Diagnostic(
            "S638",
            f"another job is saving into `{folder}`",
            notes=(f"it is {who}", "nothing was changed"),
            helps=(
                "use a different folder for each job",
                "if it is an older run of this job, stop it",
            ),
        )


@contextmanager
def locked(file: Path, stays: bool = True) -> Iterator[None]:
    """Nobody else has the lock of this file meanwhile.  Raises LockHeld at once, or OSError.

    The lock is the kernel's, of the open file: it ends with the process that holds it, whatever
    ends that.  A file that does not stay is removed by who holds it.
    """
    handle = _opened(file)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockHeld(os.pread(handle, 256, 0).decode(errors="replace")) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            with _claimed(file.with_name(CLAIM if stays else f"{file.name}.claim")):
                yield
            if not stays:
                file.unlink(missing_ok=True)
            return
        if not _is(handle, file):  # who held it has removed it: another may have made it anew
            with locked(file, stays):
                yield
            return
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, _me(), 0)
            yield
        finally:
            if not stays:
                file.unlink(missing_ok=True)
            fcntl.flock(handle, fcntl.LOCK_UN)  # also of what a fork meanwhile has inherited
    finally:
        os.close(handle)


def _opened(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _is(handle: int, file: Path) -> bool:
    """Return whether the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(handle), file.lstat())
    except FileNotFoundError:
        return False


def _me() -> bytes:
    return f"{os.getpid()} {socket.gethostname()}\n".encode()


@contextmanager
def _claimed(path: Path) -> Iterator[None]:
    """The same by a file that only one can make, where the file system has no locks.

    What a process of this host has left that is gone is taken over; of other hosts it is believed.
    """
    own = path.with_name(f"{path.name}.{os.getpid()}.{socket.gethostname()}")
    own.write_bytes(_me())  # whole before it has its name
    try:
        try:
            os.link(own, path)
        except FileExistsError:
            holder = path.read_text(errors="replace") if path.is_file() else ""
            if not _gone(LockHeld(holder)):
                raise LockHeld(holder) from None
            os.replace(own, path)
            if path.read_bytes() != _me():  # another has taken it over at the same time
                raise LockHeld(path.read_text(errors="replace")) from None
    finally:
        own.unlink(missing_ok=True)
    try:
        yield
    finally:
        if path.is_file() and path.read_bytes() == _me():
            path.unlink()


def _gone(held: LockHeld) -> bool:
    """Return whether the holder was a process of this host that is no more."""
    if held.host != socket.gethostname() or not held.pid:
        return False
    try:
        os.kill(int(held.pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


# ---- Two names on the disk exchanged: in one move where the system can, else in three.
# Linux (`renameat2`) and macOS (`renamex_np`) can, on most of their file systems; Python does not
# offer it.


_HERE = -100  # AT_FDCWD: paths are seen from the working folder
_EXCHANGE = 2  # RENAME_EXCHANGE; macOS' RENAME_SWAP has the same number
# a file system, or a kernel, that cannot
_NO_EXCHANGE = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV}


def exchange(one: Path, other: Path, between: Path) -> None:
    """Each gets the name of the other.  Raises OSError; then both have their own.

    Where it takes three moves, the other one has the name `between` meanwhile.
    """
    if _at_once(one, other):
        return
    other.rename(between)
    try:
        one.rename(other)
    except OSError:
        between.rename(other)
        raise
    between.rename(one)


def _at_once(one: Path, other: Path) -> bool:
    """Exchange them in one move; False where that cannot be done here."""
    names = os.fsencode(one), os.fsencode(other)
    library = ctypes.CDLL(None, use_errno=True)
    try:
        if sys.platform == "darwin":
            failed = library.renamex_np(*names, _EXCHANGE)
        else:
            failed = library.renameat2(_HERE, names[0], _HERE, names[1], _EXCHANGE)
    except AttributeError:  # a C library of before, or another system
        return False
    if failed and (number := ctypes.get_errno()) not in _NO_EXCHANGE:
        raise OSError(number, os.strerror(number), str(one), None, str(other))
    return not failed


# ---- A folder that is replaced whole or not at all, by all ranks of a job.


T = TypeVar("T")
SAVING, REPLACED = ".saving", ".replaced"  # endings of what lies beside the folder meanwhile


def together(
    step: Callable[[], T],
    diagnose: Callable[[BaseException], Diagnostic],
    failures: tuple[type[BaseException], ...] = (OSError,),
) -> T:
    """The step's result; if it fails on any rank, the same Refusal on all of them."""
    refusal, value = None, None
    try:
        value = step()
    except Refusal as error:
        refusal = error
    except failures as error:
        refusal = Refusal(diagnose(error))
    if world.any_rank(refusal is not None):
        raise next(found for found in world.distinct_objects(refusal) if found is not None)
    return value  # type: ignore[return-value]


def fill_folder(
    rank: int,
    begin: Callable[[], Path],
    fill: Callable[[Path], None],
    publish: Callable[[Path], None],
    diagnose: Callable[[BaseException], Diagnostic],
) -> None:
    """Let all ranks fill a new folder; rank 0 makes it, and gives it its name when it is whole.

    Raises the same Refusal on all ranks; then the new folder is gone again.
    """
    beside: Path | None = None

    def on_first(step: Callable[[], T]) -> T | None:
        return together(step if rank == 0 else lambda: None, diagnose)

    try:
        beside = world.broadcast_object(0, on_first(begin))
        assert beside is not None
        there: Path = beside
        together(lambda: _see(there), diagnose)
        fill(there)
        on_first(lambda: publish(there))
    except BaseException:
        if rank == 0 and beside is not None:
            shutil.rmtree(beside, ignore_errors=True)
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
    """Let all ranks fill a new folder, then put it in the target's place.

    What stood there before stays, under its own name, until the new one is on the disk; one of
    `marks` is a file that such a folder has.  Nobody else replaces it meanwhile.  Raises the same
    Refusal on all ranks, leaving everything as it was.
    """
    with ExitStack() as held:
        fill_folder(
            rank,
            lambda: _begin(target, marks, held),
            lambda beside: together(lambda: fill(beside), diagnose, failures),
            lambda beside: _publish(target, beside),
            diagnose,
        )


def beside_of(target: Path, ending: str) -> Path:
    """A new name beside the target, by which what is not in its place yet, or no more, is known."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}{ending}")


def leftovers(target: Path, ending: str) -> list[Path]:
    """The leftovers of jobs that died beside the target."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}{re.escape(ending)}")
    return [path for path in target.parent.iterdir() if ours.fullmatch(path.name)]


def _begin(target: Path, marks: Sequence[str], held: ExitStack) -> Path:
    """Make the new folder, alone; what replacements that died have left is swept away."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        held.enter_context(locked(target.with_name(f".{target.name}.lock"), stays=False))
    except LockHeld as other:
        raise Refusal(other.diagnostic(target)) from None
    if not os.path.lexists(target):  # one that took three moves has died after the first
        former = [path for path in leftovers(target, REPLACED) if path.is_dir()]
        if former:
            max(former, key=lambda path: path.stat().st_mtime_ns).rename(target)
    if target.exists() and not _replaceable(target, marks):
        raise Refusal.of(
            "S632",
            f"`{target}` exists, and is not a checkpoint",
            notes=("only a checkpoint or an empty folder may be replaced",),
            helps=("give the path of another folder",),
        )
    _sweep(target)
    beside = beside_of(target, SAVING)
    beside.mkdir()
    return beside


def _sweep(target: Path) -> None:
    for ending in (SAVING, REPLACED):
        for left in leftovers(target, ending):
            shutil.rmtree(left, ignore_errors=True)


def _replaceable(target: Path, marks: Sequence[str]) -> bool:
    found = target.is_dir() and any((target / mark).is_file() for mark in marks)
    return found or (target.is_dir() and not any(target.iterdir()))


def _see(beside: Path) -> None:
    if not beside.is_dir():
        raise Refusal.of(
            "S631",
            f"not all ranks see `{beside.parent}`",
            notes=("each rank writes its shards into this folder",),
            helps=("give a path on a file system that all nodes share",),
        )


def _publish(target: Path, beside: Path) -> None:
    """Put the new folder, once it is on the disk, in the old one's place, which then goes."""
    settle(beside)
    former = target.exists()
    if former:
        exchange(beside, target, beside_of(target, REPLACED))
    else:
        beside.rename(target)
    try:
        sync(target.parent)
    except BaseException:  # and back
        if former:
            exchange(beside, target, beside_of(target, REPLACED))
        else:
            target.rename(beside)
        raise
    _sweep(target)


def settle(folder: Path) -> None:
    """All files below a folder, and their names, reach the disk."""
    for inner, _, names in os.walk(folder):
        for name in (*names, "."):
            sync(Path(inner, name))


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
