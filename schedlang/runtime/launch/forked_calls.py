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
from typing import Any, NoReturn, TypeVar

from schedlang.runtime.launch.forkserver import can_fork

T = TypeVar("T")
MAX_PROCESSES = 4
PATIENCE = 5.0  # seconds, beside twice the time of the calls in this process


def call_side_by_side(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of functions, in their order; most of them run in forks of this process.

    Preconditions: the functions leave nothing that later code reads, and their results can be
    pickled. Where this process cannot be forked, and where a fork fails or is late, the functions
    are called here: so errors are raised here, too.
    """
    if len(functions) < 2 or not can_fork() or len(os.sched_getaffinity(0)) < 2:
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


class _Fork:
    """A fork of this process that calls functions, and sends their results."""

    def __init__(self, functions: Sequence[Callable[[], Any]]) -> None:
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
        data = bytearray()
        while True:
            seconds = max(0.0, deadline - time.monotonic())
            if not select.select([self._results], [], [], seconds)[0]:
                return None
            chunk = os.read(self._results, 1 << 20)
            if not chunk:
                break
            data += chunk
        try:
            results: list[Any] = pickle.loads(data)
        except Exception:  # it has ended before it had sent all
            return None
        return results

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
        data = pickle.dumps([function() for function in functions])
        sys.stdout.flush()
        with open(sending, "wb") as pipe:
            pipe.write(data)
    finally:
        os._exit(0)  # without the exit handlers of the process that has forked
