"""Watch a torchrun job for hangs: whether its ranks make progress, and their stacks if none does.

A thread of each rank checks whether its rank makes progress, by the rule for local ranks
(`launch/rank_job.py`), and if so increments a counter in the job's store. If no rank has
incremented it for `HANG_AFTER` seconds, one rank asks all for their stacks and prints them, and
the job ends. A rank outside of `waits_for_ranks`, where it runs its own script and may wait,
counts as making progress, unless the script calls a collective of torch itself: there it waits for
ranks, too. A rank under a debugger counts as making progress.

Only on CPUs: a rank may wait for a busy GPU without using CPU time.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from schedlang.runtime import device
from schedlang.runtime.comm import store_watch
from schedlang.runtime.comm import world as comm
from schedlang.runtime.comm.agreement import clone_store, poll_until, round_name
from schedlang.runtime.launch import rank_record
from schedlang.runtime.launch.rank_job import (
    RECORD,
    Hang,
    cpu_seconds,
    has_worked,
    queued_seconds,
    thread_seconds,
)

HANG_AFTER = 30.0  # seconds without progress of any rank
EXIT_CODE = 3  # exit code: could not be checked or done
_CHECK = 1.0  # seconds between two checks
_GAP = 2.0  # additional seconds; after longer gaps, this process or the machine was stopped
_ANSWER = 5.0  # seconds for all ranks to answer
_ASKED = 1 << 40  # added to the counter once a rank asks for stacks
_FRAMES = 20  # innermost calls that are shown
_COLLECTIVES = "torch.distributed.distributed_c10d"  # the module of torch's collectives
_DEBUGGERS = {"bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy", "ipdb"}

_watched, _depth = False, 0


class waits_for_ranks(ContextDecorator):  # noqa: N801  (reads as a function: `with inside():`)
    """A block in which this rank waits for other ranks only."""

    def __enter__(self) -> None:
        global _depth
        _depth += 1

    def __exit__(self, *error: object) -> None:
        global _depth
        _depth -= 1


def watch_ranks() -> None:
    """Watch the ranks of this job from now on, if torchrun has started it, on CPUs."""
    global _watched
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and threading.current_thread() is _main()
    job = comm.job_world()
    unwatchable = (
        job.size == 1 or job.is_dry_run
    )  # an elastic job makes dry runs before its ranks are there
    if _watched or not by_torchrun or unwatchable or device.accelerator() is not None:
        return
    store = clone_store()  # the main thread may be waiting in the store's own connection
    store_watch.watch_store(store.clone)
    watch = HangWatch(store, job.rank, job.size, HANG_AFTER)
    thread = threading.Thread(target=watch.run, name="schedlang: do the ranks get on", daemon=True)
    thread.start()
    _watched = True
    # a thread that returns while Python ends would abort the process
    atexit.register(watch.stop, thread)


def _main() -> threading.Thread:
    return threading.main_thread()


class HangWatch:
    """The watcher of this rank, in a thread of its own."""

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
        # at the first check since the last progress
        self.spent: tuple[float, float, int] | None = None

    def stop(self, thread: threading.Thread) -> None:
        """End the thread."""
        self.ended.set()
        thread.join(_ANSWER)

    def run(self) -> None:
        """Check repeatedly, until the process ends or the job's store is gone."""
        store_watch.WATCHERS.add(threading.get_native_id())
        with suppress(RuntimeError):
            while not self.ended.wait(_CHECK):
                self.check()

    def check(self) -> None:
        """Report progress of this rank, check for progress of any rank, and end the job if there is
        none."""
        beat = int(self.makes_progress())
        beats = self.store.add(self.key, beat)
        if beats >= _ASKED:
            self.answer()
            return
        now = time.monotonic()
        stopped, self.looked = now - self.looked - _CHECK, now
        if stopped > _GAP:
            self.moved += stopped  # this time says nothing about the ranks
        if beats != self.beats:
            self.beats, self.moved, self.spent = beats, now, None
        elif now - self.moved > self.hang_after:
            self.collect_stacks()

    # -- of this rank ------------------------------------------------------------------------------

    def makes_progress(self) -> bool:
        """Return whether this rank has worked since the last progress of any rank, or is not
        inside."""
        modules = {str(frame.f_globals.get("__name__", "")) for frame in _frames()}
        waits = _depth or _COLLECTIVES in modules
        if not waits or not _DEBUGGERS.isdisjoint(name.partition(".")[0] for name in modules):
            return True
        usage = self.usage()
        previous = self.spent = self.spent or usage
        return usage[2] != previous[2] or has_worked(usage[:2], previous[:2], self.hang_after)

    def usage(self) -> tuple[float, float, int]:
        """Return seconds on a processor and in run queues so far, and bytes read from and written
        to disks."""
        pid = os.getpid()
        # on an overloaded machine the watching threads would look like work
        cpu, waited = thread_seconds(pid, store_watch.WATCHERS)
        return cpu_seconds([pid]) - cpu, queued_seconds([pid]) - waited, _disk_bytes()

    def answer(self) -> None:
        """Write the stack of this rank, and end with the others."""
        self.store.set(f"{self.key}/stack/{self.rank}", _stack())
        key = f"{self.key}/told"
        poll_until(lambda: self.store.check([key]), 2 * _ANSWER)
        text = self.store.get(key).decode() if self.store.check([key]) else None
        self.end(text if self.rank == 0 else None)

    # -- of all ------------------------------------------------------------------------------------

    def collect_stacks(self) -> None:
        """Ask all ranks for their stacks, unless another rank has asked, and print them."""
        if self.store.add(self.key, _ASKED) >= 2 * _ASKED:
            self.answer()
            return
        keys = {rank: f"{self.key}/stack/{rank}" for rank in range(self.world)}
        self.store.set(keys[self.rank], _stack())
        poll_until(lambda: self.store.check(list(keys.values())), _ANSWER)
        stacks = {
            rank: self.store.get(key).decode()
            if self.store.check([key])
            else "  no answer: its process is stopped, or has ended"
            for rank, key in keys.items()
        }
        text = str(Hang(f"no rank made progress for {self.hang_after:g} s", stacks))
        if folder := os.environ.get(RECORD):
            text += f"\nwho did not come to what: schedlang doctor {folder}"
        prints = self.rank == 0 or not self.store.check([keys[0]])
        self.store.set(f"{self.key}/told", text)
        self.end(text if prints else None)


def _end(text: str | None) -> None:
    """End this process, whose main thread waits forever; one of the ranks prints why."""
    if text is not None:
        print(text, file=sys.stderr, flush=True)
    else:
        time.sleep(
            _CHECK
        )  # torchrun ends all ranks with the first: the rank that prints ends first
    sys.stdout.flush()
    os._exit(EXIT_CODE)


def _stack() -> str:
    """Return the innermost calls of the main thread, in the format of local ranks."""
    frame = sys._current_frames().get(_main().ident or 0)
    calls = list(reversed(traceback.extract_stack(frame)))[:_FRAMES]
    return "\n".join(f'  File "{c.filename}", line {c.lineno} in {c.name}' for c in calls)


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the main thread, the innermost first."""
    frame: FrameType | None = sys._current_frames().get(_main().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _disk_bytes() -> int:
    """Return bytes read from and written to disks so far, without the record's; 0 if not
    counted."""
    record = rank_record.current_record()
    record_bytes = _read_io(f"/proc/self/task/{record.thread}/io") if record is not None else 0
    return _read_io("/proc/self/io") - record_bytes


def _read_io(path: str) -> int:
    with suppress(OSError, ValueError):
        lines = Path(path).read_text().splitlines()
        counters = dict(line.split(": ") for line in lines)
        return int(counters["read_bytes"]) + int(counters["write_bytes"])
    return 0
