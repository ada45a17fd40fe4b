"""A limit of time for a whole piece of work: what this process does, and what its ranks do."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from schedlang.runtime.launch.job import HERE, Hang

_AGAIN = 10.0  # seconds after which the alarm comes again, where something holds on
_LAST = 30.0  # seconds beyond the limit for all to end in order
_FRAMES = 12  # innermost calls that are told


class TimeIsUp(BaseException):
    """The limit has passed; no `except Exception` of a model's takes it for its own."""


@dataclass
class Limit:
    """So many seconds from a point of time on; `watching` while a pool holds its ranks to it."""

    seconds: float
    end: float
    watching: bool = False
    stack: str = ""

    @property
    def left(self) -> float:
        """Seconds from now on; below zero where it has passed."""
        return self.end - time.monotonic()

    @property
    def why(self) -> str:
        """What is said of work that did not end in time."""
        return f"not finished after {self.seconds:g} s"


_limit: ContextVar[Limit | None] = ContextVar("limit", default=None)


def current() -> Limit | None:
    """The limit under which this runs, if there is one."""
    return _limit.get()


@contextmanager
def limited(seconds: float | None, hard: Callable[[str], None] | None = None) -> Iterator[None]:
    """Raise Hang, saying where this process or each rank stands, once the time is over.

    Off the main thread only ranks are held to it: Python interrupts no other.  With `hard` this
    process ends, whatever it does, a while after the limit; the account is given to it first.
    """
    if seconds is None:
        yield
        return
    limit = Limit(seconds, time.monotonic() + seconds)
    token = _limit.set(limit)
    last = _last_resort(limit, hard) if hard is not None else None
    try:
        with _alarm(limit):
            yield
    except TimeIsUp:
        raise Hang(limit.why, {HERE: limit.stack}) from None
    finally:
        _limit.reset(token)
        if last is not None:
            last.cancel()


def let_go() -> None:
    """What comes now may take its time: the work is done but for telling of it."""
    if (limit := current()) is not None:
        limit.watching = True


@contextmanager
def _alarm(limit: Limit) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def ring(_number: int, frame: Any) -> None:
        if not limit.watching:
            limit.stack = limit.stack or "".join(traceback.format_stack(frame)[-_FRAMES:]).rstrip()
            raise TimeIsUp

    handler = signal.signal(signal.SIGALRM, ring)
    before = signal.setitimer(signal.ITIMER_REAL, max(limit.seconds, 1e-3), _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


def _last_resort(limit: Limit, tell: Callable[[str], None]) -> threading.Timer:
    """What ends this process where no exception gets through; its ranks end with it."""
    main = threading.main_thread().ident

    def end() -> None:
        frame = sys._current_frames().get(main or 0)
        stack = "".join(traceback.format_stack(frame)[-_FRAMES:]).rstrip() if frame else ""
        tell(str(Hang(limit.why, {HERE: limit.stack or stack})))
        os._exit(3)

    timer = threading.Timer(limit.seconds + _LAST, end)
    timer.daemon = True
    timer.start()
    return timer
