"""A table of short texts that the ranks of one machine share: what each of them is at."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import tempfile
from typing import Any

_WIDTH = 512  # bytes of a cell: its length, then its text
_LENGTH = 4


class Board:
    """Rows by rank; each rank writes its own row, and reads all of them without asking anybody."""

    def __init__(self, store: Any, rank: int, size: int, columns: int) -> None:
        self.rank, self.size, self.columns = rank, size, columns
        if rank == 0:
            handle, path = tempfile.mkstemp(prefix="simccl-")
            os.ftruncate(handle, size * columns * _WIDTH)
            store.set("board", path)
        else:
            path = store.get("board").decode()
            handle = os.open(path, os.O_RDWR)
        self._cells = mmap.mmap(handle, size * columns * _WIDTH)
        os.close(handle)
        if store.add("boards", 1) == size:  # all have it open, and it ends with the last of them
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def write(self, column: int, value: Any) -> None:
        """Set a cell of this rank's row."""
        text = json.dumps(value).encode()
        if len(text) > _WIDTH - _LENGTH:
            text = json.dumps(None).encode()
        start = (self.rank * self.columns + column) * _WIDTH
        self._cells[start : start + _LENGTH] = bytes(_LENGTH)  # empty while it is written
        self._cells[start + _LENGTH : start + _LENGTH + len(text)] = text
        self._cells[start : start + _LENGTH] = len(text).to_bytes(_LENGTH, "little")

    def read(self, rank: int, column: int) -> Any:
        """A cell of any row; None where nothing was written yet."""
        start = (rank * self.columns + column) * _WIDTH
        length = int.from_bytes(self._cells[start : start + _LENGTH], "little")
        if not length:
            return None
        try:
            return json.loads(self._cells[start + _LENGTH : start + _LENGTH + length])
        except ValueError:
            return None  # being written just now
