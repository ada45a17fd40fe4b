"""Sources and spans: a named text, and a place in it (a schedule file or a Python file).

Also bounded reading of regular files, which never blocks on a pipe or device.
"""

from __future__ import annotations

import errno
import linecache
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import BinaryIO

MAX_FILE_BYTES = 2**28  # bytes; a table of eight million operations has a third of it


@contextmanager
def open_regular(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for reading; raises OSError also for a device or a pipe."""
    with open(path, "rb", opener=_open_nonblocking) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file


def read_bytes(path: str | Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """Return the bytes of a regular file; raises OSError also for more than `limit` bytes."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"more than {limit // 2**20} MiB", str(path))
    return content


def read_utf8(path: str | Path) -> str:
    """Return the text of a regular UTF-8 file; raises UnicodeDecodeError for other encodings."""
    return read_bytes(path).decode("utf-8").replace("\r\n", "\n")


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without waiting for a writer of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # schedlang/


@dataclass(frozen=True)
class Source:
    """A text and the name shown for it; `python`: the text is a program, not a schedule."""

    name: str
    text: str = field(repr=False)
    python: bool = False

    @property
    def lines(self) -> list[str]:
        """The lines without their ends, split as the language splits them."""
        return self.text.replace("\r\n", "\n").split("\n")

    def line(self, number: int) -> str:
        """Return line `number`, counted from 1; "" if the text has no such line."""
        lines = self.lines
        return lines[number - 1] if 0 < number <= len(lines) else ""


@dataclass(frozen=True)
class Span:
    """A place in a source: lines and columns count from 1, the end column is exclusive."""

    source: Source
    line: int
    col: int
    end_line: int
    end_col: int

    def __bool__(self) -> bool:
        return self.line > 0

    def __str__(self) -> str:
        return f"{self.source.name}:{self.line}" if self else "nowhere"

    def to(self, other: Span) -> Span:
        """Return the span from the start of this one to the end of `other`, which lies after it."""
        return Span(self.source, self.line, self.col, other.end_line, other.end_col)

    def to_json(self) -> dict[str, object]:
        """Return file, lines and columns as plain values."""
        return {
            "file": self.source.name,
            "line": self.line,
            "col": self.col,
            "end_line": self.end_line,
            "end_col": self.end_col,
        }


NOWHERE = Span(Source("", ""), 0, 0, 0, 0)


@lru_cache(maxsize=64)
def _interned(name: str, text: str) -> Source:
    """Return one object per text, so that a pickled plan holds each file once."""
    return Source(name, text, python=True)


def relative_path(filename: str) -> str:
    """Return a path relative to the working directory, if it is below it."""
    cwd = os.getcwd() + os.sep
    return filename.removeprefix(cwd)


# packages that call our functions: a message is for their callers
CALLING_PACKAGES = {
    "contextlib",
    "copy",
    "functools",
    "safetensors",
    "schedlang",  # code without a file
    "torch",
}
# packages that run verbs, tests and ranks: no line of the user's is beyond them
RUNNERS = {
    "_pytest",
    "asyncio",
    "click",
    "multiprocessing",
    "pluggy",
    "pygls",
    "threading",
    "typer",
}
RANK_RUNNER_MARK = "__runs_ranks__"  # a global of modules that call a function on every rank


def _is_ours(frame: FrameType) -> bool:
    filename = os.path.abspath(frame.f_code.co_filename)
    return filename.startswith(HOME + os.sep) or _package_name(frame) in CALLING_PACKAGES


def _package_name(frame: FrameType) -> str:
    """Return the name of the package whose code a frame runs."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _users_frame() -> FrameType | None:
    """Return the nearest frame outside of this package; None if there is none, as on our own
    ranks."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _is_ours(frame) and RANK_RUNNER_MARK not in frame.f_globals:
        frame = frame.f_back
    if frame is None or RANK_RUNNER_MARK in frame.f_globals or _package_name(frame) in RUNNERS:
        return None
    return frame


def python_span() -> Span:
    """Return the place in the caller's Python code: the nearest frame of the user's."""
    frame = _users_frame()
    if frame is None:
        return NOWHERE
    filename = frame.f_code.co_filename
    linecache.checkcache(filename)  # the script may have been edited since, in the same process
    source = _interned(
        relative_path(filename), "".join(linecache.getlines(filename, frame.f_globals))
    )
    positions = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    line, end_line, col, end_col = positions
    if line is None or end_line is None or col is None or end_col is None:
        return Span(source, frame.f_lineno, 1, frame.f_lineno, len(source.line(frame.f_lineno)) + 1)
    return Span(source, line, col + 1, end_line, end_col + 1)
