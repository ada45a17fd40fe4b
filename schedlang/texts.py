"""Reading files whole: regular ones, of a bounded size.  Nothing waits for a pipe, or for ever."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

MOST = 2**28  # bytes; a table of eight million operations has a third of it


@contextmanager
def regular(path: str | Path) -> Iterator[BinaryIO]:
    """A file to read from; OSError also where it is a device or a pipe."""
    with open(path, "rb", opener=_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file


def bytes_of(path: str | Path, most: int = MOST) -> bytes:
    """All that a regular file holds; OSError also where that is too much."""
    with regular(path) as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EFBIG, f"more than {most // 2**20} MiB", str(path))
    return found


def text_of(path: str | Path, most: int = MOST) -> str:
    """The same, as the UTF-8 text that it is; UnicodeDecodeError where it is none."""
    return bytes_of(path, most).decode("utf-8").replace("\r\n", "\n")


def _at_once(path: str, flags: int) -> int:
    """Open a file without waiting until somebody writes into a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
