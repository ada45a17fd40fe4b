"""A folder, or the place of one, that one job at a time writes into."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schedlang.diagnostic import Diagnostic

LOCK, CLAIM = ".schedlang-lock", ".schedlang-claim"
# a file system that has no such locks
_NONE = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


class Held(Exception):
    """Another job writes into the folder: its process and host, as far as it has said."""

    def __init__(self, told: str) -> None:
        pid, _, host = told.strip().partition(" ")
        self.pid, self.host = (pid, host) if pid.isdigit() and host else ("", "")
        super().__init__(told)

    def told(self, folder: Path) -> Diagnostic:
        """That another job is at work in, or on, this folder."""
        who = f"process {self.pid} on `{self.host}`" if self.pid else "another job"
        return Diagnostic(
            "S638", f"another job is saving into `{folder}`",
            notes=(f"it is {who}", "nothing was changed"),
            helps=("use a different folder for each job",
                   "if it is an older run of this job, stop it"),
        )  # fmt: skip


@contextmanager
def locked(file: Path, stays: bool = True) -> Iterator[None]:
    """Nobody else has the lock of this file meanwhile.  Raises Held at once, or OSError.

    The lock is the kernel's, of the open file: it ends with the process that holds it, whatever
    ends that.  A file that does not stay is removed by who holds it.
    """
    handle = _opened(file)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Held(os.pread(handle, 256, 0).decode(errors="replace")) from None
        except OSError as error:
            if error.errno not in _NONE:
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
    """Does the open file still have this name?"""
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
            told = path.read_text(errors="replace") if path.is_file() else ""
            if not _gone(Held(told)):
                raise Held(told) from None
            os.replace(own, path)
            if path.read_bytes() != _me():  # another has taken it over at the same time
                raise Held(path.read_text(errors="replace")) from None
    finally:
        own.unlink(missing_ok=True)
    try:
        yield
    finally:
        if path.is_file() and path.read_bytes() == _me():
            path.unlink()


def _gone(held: Held) -> bool:
    """Was the holder a process of this host that is no more?"""
    if held.host != socket.gethostname() or not held.pid:
        return False
    try:
        os.kill(int(held.pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
