"""The record of a rank: its steps, what it sends and waits for, and where it stands, in two files.

A thread writes them each second, so that they tell of a rank that hangs, too; what a rank did in
the second before it was killed is lost.  What it has done is written when there is more of it,
and where it stands always: a rank that waits must not look as if it worked (`heart`).
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

from schedlang.runtime.launch.job import RECORD

VERSION = 1
OPS, STEPS, FRAMES = 2048, 256, 20  # the last ones that are kept
_EVERY, _LOOK = 1.0, 0.2  # seconds between two writings, and between two looks at the main thread
_CALL = nn.Module._call_impl.__code__
_NOT_USERS = ("site-packages", sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]), "<")

Row = Callable[[str, Sequence[int]], str]  # of a module and the ranks of a group, or of no group


class Op:
    """One collective or message of this rank.

    `number` counts those of its group, of a message those between its `ends`; `ended` 0: not yet.
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


class Record:
    """Operations and steps of this rank, and the thread that writes them down."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.path, self.rank, self.world = folder / f"rank{rank}.json", rank, world
        self.device = "cpu"
        self.began = time.time()
        self.lanes: dict[str, tuple[int, ...]] = {}
        self.ops: deque[Op] = deque(maxlen=OPS)
        self.counts: Counter[tuple[str, str, tuple[int, int] | None]] = Counter()
        self.steps: deque[tuple[int, float, float]] = deque(maxlen=STEPS)
        self.where: Counter[tuple[str, str]] = Counter()  # looks that found it at work there
        self.modules: dict[int, str] = {}
        self.parameters: dict[int, str] = {}
        self.row: Row = lambda whose, ranks: ""
        self.waited, self.waiting, self._last = 0.0, 0, self.began
        self.step, self.over = -1, False
        self.events, self._written = 0, -1  # what was told so far, and when last written
        self._rows: dict[tuple[str, str], str] = {}
        self._ended = threading.Event()
        self.thread = 0  # as the system numbers it
        self._main = threading.main_thread().ident or 0

    # -- told by the main thread -----------------------------------------------------------------

    def op(self, lane: str, op: str, whose: str, size: int, ends: tuple[int, int] | None) -> Op:
        """A collective or a message begins."""
        key = (lane, "" if ends is None else op, ends)
        self.counts[key] += 1
        one = Op(lane, self.counts[key], op, whose, size)
        one.ends, one.beside = ends, threading.get_ident() != self._main
        self.ops.append(one)
        self.events += 1
        return one

    def wait(self, one: Op) -> float:
        """This rank waits until an operation has ended: since when."""
        one.waits = True
        self.events += 1
        self.waiting += not one.beside
        return time.time()

    def done(self, one: Op, since: float) -> None:
        """End an operation that was waited for since then."""
        one.ended, one.waits = time.time(), False
        self.events += 1
        if not one.beside:
            self.waiting -= 1
            self.waited += one.ended - since

    def stepped(self, number: int) -> None:
        """A step has ended: it took so long since the last one ended, so much of it in waiting."""
        now = time.time()
        if self.step >= 0:
            self.steps.append((number, now - self._last, self.waited))
        self.step, self._last, self.waited = number, now, 0.0
        self.events += 1

    # -- the thread ------------------------------------------------------------------------------

    def run(self) -> None:
        """Look and write until the process ends."""
        due, self.thread = 0.0, threading.get_native_id()
        while not self._ended.wait(_LOOK):
            self._look()
            if time.monotonic() >= due:
                with suppress(OSError):  # a full disk stops no training
                    self.write()
                due = time.monotonic() + _EVERY

    def close(self) -> None:
        """Write for the last time: this rank has ended in order, or by the error that Python
        tells."""
        self._ended.set()
        self.over = True
        with suppress(OSError):
            self.write()

    def _look(self) -> None:
        """Note where the main thread works, unless it waits for others."""
        frame = sys._current_frames().get(self._main)
        if frame is not None and not self.waiting:
            self.where[self._place(frame)] += 1

    def _place(self, frame: FrameType) -> tuple[str, str]:
        """The module that runs, and the innermost line of a user's."""
        innermost, line, module = "", "", ""
        at: FrameType | None = frame
        while at is not None and not (line and module):
            code = at.f_code
            told = f"{code.co_filename}:{at.f_lineno} in {code.co_name}"
            innermost = innermost or told
            if not line and not any(part in code.co_filename for part in _NOT_USERS):
                line = told
            module = module or self.module_of(at)
            at = at.f_back
        return module, line or innermost

    def module_of(self, frame: FrameType) -> str:
        """The path of the module whose call this frame is; else empty."""
        if frame.f_code is not _CALL:
            return ""
        return self.modules.get(id(frame.f_locals.get("self")), "")

    # -- the file --------------------------------------------------------------------------------

    def write(self) -> None:
        """Replace what has changed."""
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
            "where": [[*at, self._row(at[0], ""), n] for at, n in self.where.most_common(3)],
            "stack": self._stack(),
        }

    def _done(self) -> dict[str, Any]:
        ops = [self._told(one) for one in list(self.ops)]
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

    def _told(self, one: Op) -> list[Any]:
        row = self._row(one.whose, one.lane)
        flags = [one.backward, one.waits, one.beside]
        head = [one.lane, one.number, one.op, one.whose, row, one.size, one.ends]
        return [*head, *flags, one.began, one.ended]

    def _row(self, whose: str, lane: str) -> str:
        key = (whose, lane)
        if key not in self._rows:
            self._rows[key] = self.row(whose, self.lanes.get(lane, ()))
        return self._rows[key]

    def _stack(self) -> list[str]:
        """The calls of the main thread, innermost first."""
        found: list[str] = []
        frame = sys._current_frames().get(self._main)
        while frame is not None and len(found) < FRAMES:
            code: CodeType = frame.f_code
            found.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
            frame = frame.f_back
        return found


def _replace(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a file whole or not at all."""
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(facts, separators=(",", ":")))
    beside.replace(path)


_here: list[Record] = []


def here() -> Record | None:
    """The record of this process; None: nobody asked for one."""
    return _here[0] if _here else None


def begin(rank: int, world: int) -> Record | None:
    """Start the record of this rank, if the environment names a folder; once for a job."""
    folder = os.environ.get(RECORD)
    if not folder:
        return None
    if _here and (_here[0].rank, _here[0].world, _here[0].over) == (rank, world, False):
        return _here[0]
    end()
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    made = Record(path, rank, world)
    thread = threading.Thread(target=made.run, name="schedlang: the record of a rank", daemon=True)
    _here[:] = [made]
    thread.start()
    atexit.register(made.close)
    return made


def end() -> None:
    """End the record of this rank in order, where there is one."""
    while _here:
        _here.pop().close()


def knows(device: str, modules: Mapping[int, str], parameters: Mapping[int, str], row: Row) -> None:
    """Tell the record where this rank computes, the names of what runs, and the rows at them."""
    for made in _here:
        made.device, made.modules, made.parameters = device, dict(modules), dict(parameters)
        made.row, made._rows = row, {}
