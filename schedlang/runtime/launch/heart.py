"""Progress of a torchrun job: whether its ranks get on, and where each stands if none does.

A thread of each rank looks whether its rank gets on, by the rule of local ranks (`hang`), and if it
does raises a number in the job's store.  If nobody raised it for `HANG` seconds, no rank gets on:
one of them asks all where they stand, tells it, and the job ends.  Outside of `inside` a rank does
what its script wants, waiting included, and so does one that somebody debugs: these get on.

Only on CPUs: a rank may wait for a GPU that works, and spend nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ContextDecorator, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from schedlang.runtime import device
from schedlang.runtime.comm import reach
from schedlang.runtime.comm import world as comm
from schedlang.runtime.comm.agreement import own_store, round_name, until
from schedlang.runtime.launch import record
from schedlang.runtime.launch.job import (
    RECORD,
    Hang,
    cpu_seconds,
    queued_seconds,
    thread_seconds,
    works,
)

HANG = 30.0  # seconds in which no rank got on
ENDS = 3  # the exit code: it could not be checked, or done
_LOOK = 1.0  # seconds between two looks
_STILL = 2.0  # seconds beyond that; more, and this process or the whole machine was stopped
_ANSWER = 5.0  # seconds for all ranks to say where they stand
_ASKED = 1 << 40  # added to the number of beats once somebody asks
_FRAMES = 20  # innermost calls that are told
_DEBUGGERS = {"bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy", "ipdb"}

_watched, _depth = False, 0


class inside(ContextDecorator):  # noqa: N801  (reads as a function: `with inside():`)
    """A block in which this rank waits for nobody but the other ranks."""

    def __enter__(self) -> None:
        global _depth
        _depth += 1

    def __exit__(self, *error: object) -> None:
        global _depth
        _depth -= 1


def watch() -> None:
    """Watch the ranks of this job from now on, if torchrun has started it, and on CPUs."""
    global _watched
    apart = "TORCHELASTIC_RUN_ID" in os.environ and threading.current_thread() is _main()
    job = comm.job()
    alone = job.size == 1 or job.played  # an elastic job plays steps before its ranks are there
    if _watched or not apart or alone or device.accelerator() is not None:
        return
    store = own_store()  # the main thread may wait in the store's own connection
    reach.keep(store.clone)
    heart = Heart(store, job.rank, job.size, HANG)
    thread = threading.Thread(target=heart.run, name="schedlang: do the ranks get on", daemon=True)
    thread.start()
    _watched = True
    atexit.register(heart.stop, thread)  # a thread that comes back while Python ends would abort it


def _main() -> threading.Thread:
    return threading.main_thread()


class Heart:
    """This rank's look at itself and at all."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        hang_after: float,
        end: Callable[[str | None], None] | None = None,
    ) -> None:
        self.store, self.rank, self.world, self.hang_after = store, rank, world, hang_after
        self.end = end or _end
        self.ended = threading.Event()
        self.key = f"schedlang/heart/{round_name()}"
        self.beats = 0
        self.moved = self.looked = time.monotonic()
        self.spent: tuple[float, float, int] | None = None  # when first looked at since then

    def stop(self, thread: threading.Thread) -> None:
        """End the thread."""
        self.ended.set()
        thread.join(_ANSWER)

    def run(self) -> None:
        """Look again and again, until the process ends or the job's store is gone."""
        reach.WATCHERS.add(threading.get_native_id())
        with suppress(RuntimeError):
            while not self.ended.wait(_LOOK):
                self.look()

    def look(self) -> None:
        """Tell that this rank gets on, see whether any does, and end the job if none."""
        beat = int(self.gets_on())
        beats = self.store.add(self.key, beat)
        if beats >= _ASKED:
            self.answer()
            return
        now = time.monotonic()
        stood, self.looked = now - self.looked - _LOOK, now
        if stood > _STILL:
            self.moved += stood  # what passed meanwhile tells of no rank
        if beats != self.beats:
            self.beats, self.moved, self.spent = beats, now, None
        elif now - self.moved > self.hang_after:
            self.ask()

    # -- of this rank ------------------------------------------------------------------------------

    def gets_on(self) -> bool:
        """Return whether this rank has worked since any rank last did, or is about something
        else."""
        if not _depth or _debugged():
            return True
        now = self.now()
        before = self.spent = self.spent or now
        return now[2] != before[2] or works(now[:2], before[:2], self.hang_after)

    def now(self) -> tuple[float, float, int]:
        """Seconds that it had and waited for so far, and what it read from and wrote to disks."""
        here = os.getpid()
        # on a machine with too much to do those that look would seem to work, and to want to
        ran, queued = thread_seconds(here, reach.WATCHERS)
        return cpu_seconds([here]) - ran, queued_seconds([here]) - queued, _stored()

    def answer(self) -> None:
        """Say where this rank stands, and end with the others."""
        self.store.set(f"{self.key}/stack/{self.rank}", _stack())
        told = f"{self.key}/told"
        until(lambda: self.store.check([told]), 2 * _ANSWER)
        text = self.store.get(told).decode() if self.store.check([told]) else None
        self.end(text if self.rank == 0 else None)

    # -- of all ------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask all ranks where they stand, if nobody has asked yet, and tell what they say."""
        if self.store.add(self.key, _ASKED) >= 2 * _ASKED:
            self.answer()
            return
        keys = {rank: f"{self.key}/stack/{rank}" for rank in range(self.world)}
        self.store.set(keys[self.rank], _stack())
        until(lambda: self.store.check(list(keys.values())), _ANSWER)
        stacks = {
            rank: self.store.get(key).decode()
            if self.store.check([key])
            else "  no answer: its process is stopped, or has ended"
            for rank, key in keys.items()
        }
        text = str(Hang(f"no rank made progress for {self.hang_after:g} s", stacks))
        if folder := os.environ.get(RECORD):
            text += f"\nwho did not come to what: schedlang doctor {folder}"
        speaks = self.rank == 0 or not self.store.check([keys[0]])
        self.store.set(f"{self.key}/told", text)
        self.end(text if speaks else None)


def _end(text: str | None) -> None:
    """End this process, whose main thread waits for ever; one of the ranks tells why."""
    if text is not None:
        print(text, file=sys.stderr, flush=True)
    else:
        time.sleep(_LOOK)  # torchrun ends all with the first: whoever tells comes first
    sys.stdout.flush()
    os._exit(ENDS)


def _stack() -> str:
    """The innermost calls of the main thread, as those of local ranks are told."""
    frame = sys._current_frames().get(_main().ident or 0)
    calls = list(reversed(traceback.extract_stack(frame)))[:_FRAMES]
    return "\n".join(f'  File "{c.filename}", line {c.lineno} in {c.name}' for c in calls)


def _debugged() -> bool:
    """Return whether a debugger holds the main thread."""
    frame: FrameType | None = sys._current_frames().get(_main().ident or 0)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _stored() -> int:
    """Bytes from and to disks so far, but for the record's; 0 where the system counts none."""
    made = record.here()
    beside = _bytes_of(f"/proc/self/task/{made.thread}/io") if made is not None else 0
    return _bytes_of("/proc/self/io") - beside


def _bytes_of(path: str) -> int:
    with suppress(OSError, ValueError):
        lines = Path(path).read_text().splitlines()
        found = dict(line.split(": ") for line in lines)
        return int(found["read_bytes"]) + int(found["write_bytes"])
    return 0
