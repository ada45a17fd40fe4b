"""Progress of long work: one changing line on a terminal, else a plain line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

FIRST, EVERY = 2.0, 10.0  # seconds until the first plain line, and between two
REFRESH = 0.5  # of the line on a terminal
UNNAMED = 10.0  # seconds until the first plain line before any stage has begun


class ProgressLine:
    """Prints the current stage, the elapsed and the remaining time: `progress("4 ranks", 3, 9)`.

    A thread prints, so that a step of minutes is not silent. The remaining time is estimated from
    the finished steps of the stage.
    """

    def __init__(self, quiet: bool = False, *, first: float = FIRST, every: float = EVERY) -> None:
        self.live = sys.stderr.isatty()
        self.first, self.every = (REFRESH, REFRESH) if self.live else (first, every)
        self.start = self.since = time.perf_counter()
        self.stage, self.done, self.total = "", 0, 0
        self.quiet, self._stop = quiet, threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Begin a stage, or report the number of its finished steps."""
        if stage != self.stage:
            self.since = time.perf_counter()
        self.stage, self.done, self.total = stage, done, total

    def __str__(self) -> str:
        now = time.perf_counter()
        parts = [f"{now - self.start:5.1f} s  {self.stage or 'reading the model'}"]
        if self.total:
            parts.append(f"step {self.done} of {self.total}")
        if 0 < self.done < self.total:
            left = (now - self.since) / self.done * (self.total - self.done)
            parts.append(f"about {max(1, round(left))} s left")
        return ", ".join(parts)

    def __enter__(self) -> ProgressLine:
        self._start_thread()
        return self

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the thread during the block, so that this process may be forked."""
        self.close()
        try:
            yield
        finally:
            self._start_thread()

    def _start_thread(self) -> None:
        self._stop.clear()
        if not self.quiet:
            self._thread = threading.Thread(target=self._print_loop, daemon=True)
            self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop printing; clear the line on a terminal."""
        self._stop.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
            if self.live:
                print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _print_loop(self) -> None:
        wait = self.first
        while not self._stop.wait(wait):
            if not (self.live or self.stage or time.perf_counter() - self.start > UNNAMED):
                wait = REFRESH  # no ranks run yet; most refusals come before that
                continue
            wait = self.every
            line = f"\r\033[K {self} ..." if self.live else f" {self} ..."
            print(line, end="" if self.live else "\n", file=sys.stderr, flush=True)
