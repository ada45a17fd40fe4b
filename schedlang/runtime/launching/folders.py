"""Temporary folders of a process, and the sweep of those that killed ones have left."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
