"""A job's store that is out of reach ends the ranks that need it.

torch's client waits for an answer without an end: where the machine of the store is cut off, or the
process that keeps it is stopped, no request returns, neither this project's nor torch's own.  So
one thread asks again and again, and another one looks when it was last answered.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from schedlang.diagnostics.diagnostic import Refusal

LOST = 25.0  # seconds without an answer
ENDS = 3  # the exit code: it could not be checked, or done
_LOOK = 1.0  # seconds between two looks
_STILL = 2.0  # seconds beyond that; more, and this process or the whole machine was stopped
_KEY = "schedlang/reach"


WATCHERS: set[int] = set()  # threads that only look, as the system numbers them
_kept = False


def keep(connect: Callable[[], Any]) -> None:
    """Watch the job's store until this process ends; once.

    connect  makes a connection to it, in another thread: that, too, can wait without an end
    """
    global _kept
    if _kept:
        return
    _kept = True
    reach = Reach(connect, LOST, _end)
    names = {reach.ask: "asks", reach.run: "looks"}
    threads = [
        threading.Thread(target=one, name=f"schedlang: the store, {name}", daemon=True)
        for one, name in names.items()
    ]
    for thread in threads:
        thread.start()
    atexit.register(reach.stop, threads)  # one that comes back while Python ends would abort it


class Reach:
    """Watches when a store has answered last; where it does not, `end` is called, once."""

    def __init__(
        self, connect: Callable[[], Any], lost: float, end: Callable[[float], None]
    ) -> None:
        self.connect, self.lost, self.end = connect, lost, end
        self.ended = threading.Event()
        self.heard = self.looked = time.monotonic()

    def stop(self, threads: list[threading.Thread]) -> None:
        """End both threads; one that still waits for the store is left."""
        self.ended.set()
        for thread in threads:
            thread.join(2 * _LOOK)

    def ask(self) -> None:
        """Ask again and again.  A store that is closed ends it: what that means others see."""
        WATCHERS.add(threading.get_native_id())
        with suppress(RuntimeError):
            store = self.connect()
            while not self.ended.wait(_LOOK):
                store.add(_KEY, 0)
                self.heard = time.monotonic()
        self.ended.set()

    def run(self) -> None:
        """Look again and again, until the process ends or the store is closed."""
        WATCHERS.add(threading.get_native_id())
        while not self.ended.wait(_LOOK):
            self.look()

    def look(self) -> None:
        """End if the store has not answered for so long, time apart in which nothing ran here."""
        now = time.monotonic()
        stood, self.looked = now - self.looked - _LOOK, now
        if stood > _STILL:
            self.heard += stood
        if now - self.heard > self.lost:
            self.ended.set()
            self.end(self.lost)


def refused(seconds: float) -> Refusal:
    """Say that the store's keeper does not answer."""
    where = ":".join(filter(None, map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT"))))
    at = f" at {where}" if where else ""
    return Refusal.of(
        "S651",
        f"the store of this job{at} has not answered for {seconds:g} s",
        notes=("its machine is unreachable or down, or the process of the store is stopped",),
        helps=("let torchrun start the job again: `torchrun --max-restarts 100 ...`",),
    )


def _end(seconds: float) -> None:
    """End this process, whose main thread waits for ever; one rank of each node tells why."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(refused(seconds), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(ENDS)
