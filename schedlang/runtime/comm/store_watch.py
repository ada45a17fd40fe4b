"""End ranks whose job store no longer answers; see which ranks of this node have ended.

torch's client waits for an answer without a timeout: if the store's machine is cut off or its
process is stopped, no request returns. So one thread keeps asking the store, and another checks
when it last answered.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schedlang.diagnostics.diagnostic import Refusal

LOST_AFTER = 25.0  # seconds without an answer
EXIT_CODE = 3  # exit code: could not be checked or done
_CHECK = 1.0  # seconds between two checks
_GAP = 2.0  # additional seconds; after longer gaps, this process or the machine was stopped
_KEY = "schedlang/reach"


WATCHERS: set[int] = set()  # native ids of threads that only watch
_watching = False


def watch_store(connect: Callable[[], Any]) -> None:
    """Watch the job's store until this process ends; later calls do nothing.

    connect  makes a connection to the store; called in another thread, since it may wait forever
    """
    global _watching
    if _watching:
        return
    _watching = True
    watch = StoreWatch(connect, LOST_AFTER, _end)
    names = {watch.poll_store: "asks", watch.check_repeatedly: "looks"}
    threads = [
        threading.Thread(target=target, name=f"schedlang: the store, {name}", daemon=True)
        for target, name in names.items()
    ]
    for thread in threads:
        thread.start()
    # a thread that returns while Python ends would abort the process
    atexit.register(watch.stop, threads)


class StoreWatch:
    """Watches when a store last answered; calls `end`, once, if it does not."""

    def __init__(
        self, connect: Callable[[], Any], lost_after: float, end: Callable[[float], None]
    ) -> None:
        self.connect, self.lost, self.end = connect, lost_after, end
        self.ended = threading.Event()
        self.heard = self.looked = time.monotonic()

    def stop(self, threads: list[threading.Thread]) -> None:
        """End both threads; do not wait for one that waits for the store."""
        self.ended.set()
        for thread in threads:
            thread.join(2 * _CHECK)

    def poll_store(self) -> None:
        """Keep asking the store; end if the store is closed, which other code reports."""
        WATCHERS.add(threading.get_native_id())
        with suppress(RuntimeError):
            store = self.connect()
            while not self.ended.wait(_CHECK):
                store.add(_KEY, 0)
                self.heard = time.monotonic()
        self.ended.set()

    def check_repeatedly(self) -> None:
        """Keep checking, until the process ends or the store is closed."""
        WATCHERS.add(threading.get_native_id())
        while not self.ended.wait(_CHECK):
            self.check()

    def check(self) -> None:
        """Call `end` if the store has not answered in time; time in which this process stood is
        excluded."""
        now = time.monotonic()
        stopped, self.looked = now - self.looked - _CHECK, now
        if stopped > _GAP:
            self.heard += stopped
        if now - self.heard > self.lost:
            self.ended.set()
            self.end(self.lost)


@dataclass
class Siblings:
    """The ranks of this node, as processes that the same torchrun has started (Linux only)."""

    ended: tuple[int, ...] = ()
    _seen: tuple[int, ...] = ()
    _looked: float = field(default_factory=time.monotonic)

    def have_ended(self) -> bool:
        """Return whether some are gone, at two looks: torchrun may still be starting them."""
        if time.monotonic() - self._looked > _CHECK:
            seen, self._looked = self._seen, time.monotonic()
            self._seen = self._gone()
            self.ended = tuple(rank for rank in self._seen if rank in seen)
        return bool(self.ended)

    def _gone(self) -> tuple[int, ...]:
        rank, living = int(os.environ["RANK"]), set[int]()
        job = f"TORCHELASTIC_RUN_ID={os.environ.get('TORCHELASTIC_RUN_ID')}".encode()
        own, launcher = {job, f"RANK={rank}".encode()}, os.getppid()
        with suppress(OSError):  # none that this process may look at
            while own <= _variables(launcher):  # a script around this rank
                status = Path(f"/proc/{launcher}/stat").read_text()
                launcher = int(status.rpartition(")")[2].split()[1])
            for listing in Path(f"/proc/{launcher}/task").glob("*/children"):
                for child in listing.read_text().split():
                    with suppress(OSError):  # it ends now
                        named = _variables(int(child))
                        ranks = (text[5:] for text in named if text.startswith(b"RANK="))
                        living.update(map(int, ranks if job in named else ()))
        if rank not in living:  # torchrun has started it in another way
            return ()
        first = rank - int(os.environ.get("LOCAL_RANK", rank))
        local = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return tuple(peer for peer in local if peer not in living)


def _variables(process: int) -> set[bytes]:
    """Return the environment with which a process was started."""
    return set(Path(f"/proc/{process}/environ").read_bytes().split(b"\0"))


def lost_store_refusal(seconds: float) -> Refusal:
    """Return the refusal S651: the job's store does not answer."""
    address = ":".join(filter(None, map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT"))))
    location = f" at {address}" if address else ""
    return Refusal.of(
        "S651",
        f"the store of this job{location} has not answered for {seconds:g} s",
        notes=("its machine is unreachable or down, or the process of the store is stopped",),
        helps=("let torchrun start the job again: `torchrun --max-restarts 100 ...`",),
    )


def _end(seconds: float) -> None:
    """End this process, whose main thread waits forever; one rank of each node prints why."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(lost_store_refusal(seconds), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_CODE)
