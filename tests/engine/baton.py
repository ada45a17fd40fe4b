"""Rank scheduling: one thread runs at a time and passes its turn on when it must wait.

So runs are deterministic, process-wide state can be exchanged with each rank, and a deadlock is
detected at once, without a timeout.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any


class Aborted(BaseException):
    """Ends this rank because another one failed."""


class Deadlock(Exception):
    """All remaining ranks wait for something that will not come."""


class Baton:
    """Decides whose turn it is; saves and restores process-wide state when the rank changes."""

    def __init__(
        self,
        states: Sequence[Any],
        save: Callable[[], Any],
        restore: Callable[[Any], None],
        order: int | None = None,
    ) -> None:
        self._states = list(states)
        self._turns = [threading.Lock() for _ in states]  # free when it is this rank's turn
        self._waits: dict[int, tuple[Callable[[], bool], str]] = {}
        self._random = None if order is None else random.Random(order)
        self._save, self._restore = save, restore
        self.ended = False
        self.failure: tuple[int, BaseException] | None = None  # first failing rank and its error
        self.switches = 0
        for rank in range(len(states)):
            self._waits[rank] = (lambda: True, "its start")
            self._turns[rank].acquire()

    def begin(self) -> None:
        """Let the first rank run."""
        self._hand_on(-1)

    def end(self, error: BaseException) -> None:
        """Abort: wake all waiting ranks at once."""
        self.fail(-1, error)
        self.ended = True
        for turn in self._turns:
            with contextlib.suppress(RuntimeError):  # free already
                turn.release()

    def enter(self, rank: int) -> None:
        """Wait for this rank's first turn."""
        self._await_turn(rank)

    def wait(self, rank: int, ready: Callable[[], bool], reason: str) -> None:
        """Let others run until `ready()`; raises Aborted if another rank failed meanwhile."""
        self.check()
        if ready():
            return
        self._waits[rank] = (ready, reason)
        self._states[rank] = self._save()
        self._hand_on(rank)
        self._await_turn(rank)

    def check(self) -> None:
        """Raise Aborted if a rank failed."""
        if self.failure is not None:
            raise Aborted

    def fail(self, rank: int, error: BaseException) -> None:
        """Record a failure so that all ranks end; only the first is kept, as the cause."""
        if self.failure is None:
            self.failure = (rank, error)

    def leave(self, rank: int) -> None:
        """Pass the turn on from a rank that has ended."""
        self._hand_on(rank)

    def waiting(self) -> dict[int, str]:
        """Return what each waiting rank waits for."""
        return {rank: reason for rank, (_, reason) in sorted(self._waits.items())}

    def _await_turn(self, rank: int) -> None:
        self._turns[rank].acquire()
        if not self.ended:  # after the end, process-wide state is the caller's
            self._restore(self._states[rank])
        self.check()

    def _hand_on(self, last: int) -> None:
        if not self._waits or self.ended:  # then all have their turn
            return
        waiting_ranks = sorted(self._waits, key=lambda rank: (rank <= last, rank))
        ready_ranks = [r for r in waiting_ranks if self.failure is not None or self._waits[r][0]()]
        if not ready_ranks:
            lines = [f"rank {rank} waits for {reason}" for rank, reason in self.waiting().items()]
            self.fail(waiting_ranks[0], Deadlock("\n".join(["no rank can get on", *lines])))
            ready_ranks = waiting_ranks
        rank = ready_ranks[0] if self._random is None else self._random.choice(ready_ranks)
        del self._waits[rank]
        self.switches += 1
        self._turns[rank].release()
