"""The record of a rank, in two files: its steps, its communication and waits, and its stack.

A thread writes the files each second, so that there is a record of a rank that hangs; the last
second before a kill is lost. Past operations are written if there are new ones; the stack is
written always. A waiting rank must not look as if it worked (`heart`), so little is written.
`schedlang doctor` reads the files of all ranks.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import sysconfig
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch import nn

from schedlang.runtime.launch.rank_job import RECORD

VERSION = 1
OPS, STEPS, FRAMES = 2048, 256, 20  # the number of last entries that are kept
_EVERY, _LOOK = 1.0, 0.2  # seconds between two writes, and between two samples of the main thread
_CALL = nn.Module._call_impl.__code__
_NOT_USERS = ("site-packages", sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]), "<")

# text of the rows for a module and the ranks of a group, or of no group
RowText = Callable[[str, Sequence[int]], str]


class Op:
    """One collective or message of this rank.

    `number` counts the operations of its group, or the messages between its `ends`; `ended` 0:
    still running.
    """

    __slots__ = (
        *("lane", "number", "op", "whose", "size", "ends"),
        *("backward", "waits", "began", "ended", "beside"),
    )

    def __init__(self, lane: str, number: int, op: str, whose: str, size: int) -> None:
        self.lane, self.number, self.op, self.whose, self.size = lane, number, op, whose, size
        self.ends: tuple[int, int] | None = None
        self.backward = self.waits = self.beside = False
        self.began, self.ended = time.time(), 0.0


class RankRecord:
    """Operations and steps of this rank, and the thread that writes them."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.path, self.rank, self.world = folder / f"rank{rank}.json", rank, world
        self.device = "cpu"
        self.began = time.time()
        self.lanes: dict[str, tuple[int, ...]] = {}
        self.ops: deque[Op] = deque(maxlen=OPS)
        self.counts: Counter[tuple[str, str, tuple[int, int] | None]] = Counter()
        self.steps: deque[tuple[int, float, float]] = deque(maxlen=STEPS)
        # samples of the main thread while it worked, by module and line
        self.where: Counter[tuple[str, str]] = Counter()
        self.modules: dict[int, str] = {}
        self.parameters: dict[int, str] = {}
        self.row: RowText = lambda whose, ranks: ""
        self.waited, self.waiting, self._last = 0.0, 0, self.began
        self.step, self.over = -1, False
        self.events, self._written = 0, -1  # the number of events so far, and at the last write
        self._rows: dict[tuple[str, str], str] = {}
        self._ended = threading.Event()
        self.thread = 0  # native id
        self._main = threading.main_thread().ident or 0

    # -- called by the main thread
    # --------------------------------------------------------------------

    def begin_operation(
        self, lane: str, op: str, whose: str, size: int, ends: tuple[int, int] | None
    ) -> Op:
        """Record the begin of a collective or a message."""
        key = (lane, "" if ends is None else op, ends)
        self.counts[key] += 1
        operation = Op(lane, self.counts[key], op, whose, size)
        operation.ends, operation.beside = ends, threading.get_ident() != self._main
        self.ops.append(operation)
        self.events += 1
        return operation

    def begin_wait(self, op: Op) -> float:
        """Record that this rank waits for an operation; return the time."""
        op.waits = True
        self.events += 1
        self.waiting += not op.beside
        return time.time()

    def end_operation(self, op: Op, since: float) -> None:
        """Record the end of an operation, and the time waited for it since `since`."""
        op.ended, op.waits = time.time(), False
        self.events += 1
        if not op.beside:
            self.waiting -= 1
            self.waited += op.ended - since

    def end_step(self, number: int) -> None:
        """Record the end of a step: its duration, and the part of it spent waiting."""
        now = time.time()
        if self.step >= 0:
            self.steps.append((number, now - self._last, self.waited))
        self.step, self._last, self.waited = number, now, 0.0
        self.events += 1

    # -- the thread ------------------------------------------------------------------------------

    def run(self) -> None:
        """Sample and write until the process ends."""
        due, self.thread = 0.0, threading.get_native_id()
        while not self._ended.wait(_LOOK):
            self._look()
            if time.monotonic() >= due:
                with suppress(OSError):  # a full disk must not stop training
                    self.write()
                due = time.monotonic() + _EVERY

    def close(self) -> None:
        """Write a last time: this rank has ended normally, or by the error that Python reports."""
        self._ended.set()
        self.over = True
        with suppress(OSError):
            self.write()

    def _look(self) -> None:
        """Sample where the main thread works, unless it waits for others."""
        frame = sys._current_frames().get(self._main)
        if frame is not None and not self.waiting:
            self.where[self._place(frame)] += 1

    def _place(self, frame: FrameType) -> tuple[str, str]:
        """Return the running module, and the innermost line of user code."""
        innermost, line, module = "", "", ""
        caller: FrameType | None = frame
        while caller is not None and not (line and module):
            code = caller.f_code
            text = f"{code.co_filename}:{caller.f_lineno} in {code.co_name}"
            innermost = innermost or text
            if not line and not any(part in code.co_filename for part in _NOT_USERS):
                line = text
            module = module or self.module_of(caller)
            caller = caller.f_back
        return module, line or innermost

    def module_of(self, frame: FrameType) -> str:
        """Return the path of the module whose call a frame is; else ""."""
        if frame.f_code is not _CALL:
            return ""
        return self.modules.get(id(frame.f_locals.get("self")), "")

    # -- the file --------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the files that have changed."""
        if self.events != self._written:
            self._written = self.events
            _replace(self.path, self._done())
        _replace(self.path.with_suffix(".now.json"), self._now())

    def _now(self) -> dict[str, Any]:
        error = getattr(sys, "last_value", None) if self.over else None
        return {
            "written": time.time(),
            "over": self.over,
            "error": f"{type(error).__name__}: {error}" if error is not None else "",
            "where": [
                [*line, self._row(line[0], ""), count] for line, count in self.where.most_common(3)
            ],
            "stack": self._stack(),
        }

    def _done(self) -> dict[str, Any]:
        ops = [self._told(op) for op in list(self.ops)]
        return {
            "version": VERSION,
            "rank": self.rank,
            "world": self.world,
            "host": socket.gethostname(),
            "device": self.device,
            "began": self.began,
            "step": self.step,
            "steps": list(self.steps),
            "lanes": {name: list(ranks) for name, ranks in list(self.lanes.items())},
            "counts": [[*key, n] for key, n in list(self.counts.items())],
            "ops": ops,
        }

    def _told(self, op: Op) -> list[Any]:
        row = self._row(op.whose, op.lane)
        flags = [op.backward, op.waits, op.beside]
        head = [op.lane, op.number, op.op, op.whose, row, op.size, op.ends]
        return [*head, *flags, op.began, op.ended]

    def _row(self, whose: str, lane: str) -> str:
        key = (whose, lane)
        if key not in self._rows:
            self._rows[key] = self.row(whose, self.lanes.get(lane, ()))
        return self._rows[key]

    def _stack(self) -> list[str]:
        """Return the calls of the main thread, innermost first."""
        calls: list[str] = []
        frame = sys._current_frames().get(self._main)
        while frame is not None and len(calls) < FRAMES:
            code: CodeType = frame.f_code
            calls.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
            frame = frame.f_back
        return calls


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file atomically."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(content, separators=(",", ":")))
    temporary.replace(path)


_here: list[RankRecord] = []


def current_record() -> RankRecord | None:
    """Return the record of this process; None if there is none."""
    return _here[0] if _here else None


def begin_record(rank: int, world: int) -> RankRecord | None:
    """Start the record of this rank, if the environment names a folder; once for a job."""
    folder = os.environ.get(RECORD)
    if not folder:
        return None
    if _here and (_here[0].rank, _here[0].world, _here[0].over) == (rank, world, False):
        return _here[0]
    end_record()
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    record = RankRecord(path, rank, world)
    thread = threading.Thread(
        target=record.run, name="schedlang: the record of a rank", daemon=True
    )
    _here[:] = [record]
    thread.start()
    atexit.register(record.close)
    return record


def end_record() -> None:
    """End the record of this rank, if there is one."""
    while _here:
        _here.pop().close()


def name_modules(
    device: str, modules: Mapping[int, str], parameters: Mapping[int, str], row: RowText
) -> None:
    """Give the record this rank's device, names of modules and parameters, and the text of rows."""
    for record in _here:
        record.device, record.modules, record.parameters = device, dict(modules), dict(parameters)
        record.row, record._rows = row, {}
