"""Calls that do not depend on each other, side by side in processes forked from this one."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, NoReturn, TypeVar

from schedlang.runtime.launch.forkserver import can_fork

T = TypeVar("T")
MAX_PROCESSES = 4
PATIENCE = 5.0  # seconds, beside twice the time of the calls in this process
SIZE_BYTES = 8  # before each result: how many bytes it has


def call_side_by_side(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of functions, in their order; most of them run in forks of this process.

    Preconditions: the functions leave nothing that later code reads, and their results can be
    pickled. Where this process cannot be forked, and where a fork fails or is late, the functions
    are called here: so errors are raised here, too.
    """
    if len(functions) < 2 or not _may_fork():
        return [function() for function in functions]
    count = min(len(functions), MAX_PROCESSES)
    forks = list[_Fork]()
    try:
        forks += [_Fork(functions[index::count]) for index in range(1, count)]
        start = time.monotonic()
        by_process = [[function() for function in functions[::count]]]
        end = time.monotonic()
        deadline = end + 2 * (end - start) + PATIENCE
        for index, fork in enumerate(forks, 1):
            results = fork.results(deadline)
            if results is None:
                results = [function() for function in functions[index::count]]
            by_process.append(results)
    finally:
        for fork in forks:
            fork.end()
    return [by_process[index % count][index // count] for index in range(len(functions))]


class CallsAhead(Generic[T]):
    """Calls of functions by index; a fork of this process calls them too, the last one first.

    For a caller that needs the results one after the other, and perhaps not all: both processes
    work until they meet.  Preconditions, and what happens where a fork fails or is late: as in
    `call_side_by_side`.
    """

    def __init__(self, functions: Sequence[Callable[[], T]]) -> None:
        self._functions, self._results = functions, dict[int, T]()
        self._due = len(functions) - 1  # the call whose result the fork sends next
        self._seconds = 0.0  # of the longest call here
        self._fork = _Fork(functions[::-1]) if len(functions) > 1 and _may_fork() else None

    def __call__(self, index: int) -> T:
        """Return the result of a function: the fork's where it has begun with it."""
        self._receive(0.0)
        if index == self._due and index not in self._results:
            self._receive(PATIENCE + 2 * self._seconds)
        if index not in self._results:
            start = time.monotonic()
            self._results[index] = self._functions[index]()
            self._seconds = max(self._seconds, time.monotonic() - start)
        return self._results[index]

    def _receive(self, seconds: float) -> None:
        """Take what the fork has sent, and wait so long for its next result."""
        while self._fork is not None:
            result = self._fork.next_result(time.monotonic() + seconds)
            if result is not None:
                self._results.setdefault(self._due, *result)
                self._due, seconds = self._due - 1, 0.0
            if self._due in self._results or self._due < 0 or self._fork.has_ended:
                self.end()
            elif seconds:
                self.end()  # it is late
            elif result is None:
                return

    def end(self) -> None:
        """End the fork; all other functions are called here."""
        if self._fork is not None:
            self._fork.end()
        self._fork, self._due = None, -1


def _may_fork() -> bool:
    """Whether a fork of this process can run beside it."""
    return can_fork() and len(os.sched_getaffinity(0)) > 1


class _Fork:
    """A fork of this process that calls functions, and sends their results."""

    def __init__(self, functions: Sequence[Callable[[], Any]]) -> None:
        self._count, self._data, self.has_ended = len(functions), bytearray(), False
        self._results, sending = os.pipe()
        sys.stdout.flush()  # else the fork would write it again
        sys.stderr.flush()
        self._pid = -1
        with suppress(OSError):  # too many processes, or no memory: it sends nothing
            self._pid = os.fork()
        if self._pid == 0:
            _send_results(functions, sending)
        os.close(sending)

    def results(self, deadline: float) -> list[Any] | None:
        """Return the results; None where the fork has failed, or is late."""
        results = [self.next_result(deadline) for _ in range(self._count)]
        return None if None in results else [result for (result,) in filter(None, results)]

    def next_result(self, deadline: float) -> tuple[Any] | None:
        """Return the next result, in a tuple; None where the fork has ended, or is late."""
        while not self.has_ended:
            end = SIZE_BYTES + int.from_bytes(self._data[:SIZE_BYTES], "little")
            if len(self._data) >= max(end, SIZE_BYTES + 1):
                data = self._data[SIZE_BYTES:end]
                del self._data[:end]
                with suppress(Exception):  # it cannot be made here
                    return (pickle.loads(data),)
                self.has_ended = True
                return None
            seconds = max(0.0, deadline - time.monotonic())
            if not select.select([self._results], [], [], seconds)[0]:
                return None
            chunk = os.read(self._results, 1 << 20)
            self._data += chunk
            self.has_ended = not chunk
        return None

    def end(self) -> None:
        """End the fork."""
        os.close(self._results)
        if self._pid > 0:
            os.kill(self._pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
            os.waitpid(self._pid, 0)


def _send_results(functions: Sequence[Callable[[], Any]], sending: int) -> NoReturn:
    """Call functions in a fork, send their results, and end; without an error of them."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        warnings.simplefilter("ignore")  # the process that has forked shows them
        with open(sending, "wb") as pipe:
            for function in functions:
                data = pickle.dumps(function())
                pipe.write(len(data).to_bytes(SIZE_BYTES, "little") + data)
                pipe.flush()
        sys.stdout.flush()
    finally:
        os._exit(0)  # without the exit handlers of the process that has forked
