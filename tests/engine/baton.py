"""One rank computes at a time: whoever has to wait hands the baton on, in a fixed order.

So runs are the same every time, what is global to a process can be changed with the rank (`swap`),
and that no rank can get on is known at once, without a timeout.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any


class Aborted(BaseException):
    """This rank has to end because another one failed."""


class Deadlock(Exception):
    """Every rank that has not ended waits for something that will not come."""


class Baton:
    """Whose turn it is; each rank computes in its own state of what is global to a process."""

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
        self.failure: tuple[int, BaseException] | None = None  # the first one, and whose it is
        self.switches = 0
        for rank in range(len(states)):
            self._waits[rank] = (lambda: True, "its start")
            self._turns[rank].acquire()

    def begin(self) -> None:
        """Let the first rank run."""
        self._hand_on(-1)

    def end(self, error: BaseException) -> None:
        """Give up: whoever waits is woken, all at once, whatever the others do."""
        self.fail(-1, error)
        self.ended = True
        for turn in self._turns:
            with contextlib.suppress(RuntimeError):  # free already
                turn.release()

    def enter(self, rank: int) -> None:
        """Wait for this rank's first turn."""
        self._await_turn(rank)

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let others run until `ready()`; raises Aborted if another rank failed meanwhile."""
        self.check()
        if ready():
            return
        self._waits[rank] = (ready, what)
        self._states[rank] = self._save()
        self._hand_on(rank)
        self._await_turn(rank)

    def check(self) -> None:
        """Raise Aborted if a rank failed."""
        if self.failure is not None:
            raise Aborted

    def fail(self, rank: int, error: BaseException) -> None:
        """Let all ranks end; the first failure is the cause."""
        if self.failure is None:
            self.failure = (rank, error)

    def leave(self, rank: int) -> None:
        """This rank has ended."""
        self._hand_on(rank)

    def waiting(self) -> dict[int, str]:
        """What each rank that does not run waits for."""
        return {rank: what for rank, (_, what) in sorted(self._waits.items())}

    def _await_turn(self, rank: int) -> None:
        self._turns[rank].acquire()
        if not self.ended:  # then what is global is the caller's again
            self._restore(self._states[rank])
        self.check()

    def _hand_on(self, last: int) -> None:
        if not self._waits or self.ended:  # then all have their turn
            return
        there = sorted(self._waits, key=lambda rank: (rank <= last, rank))
        able = [r for r in there if self.failure is not None or self._waits[r][0]()]
        if not able:
            lines = [f"rank {rank} waits for {what}" for rank, what in self.waiting().items()]
            self.fail(there[0], Deadlock("\n".join(["no rank can get on", *lines])))
            able = there
        rank = able[0] if self._random is None else self._random.choice(able)
        del self._waits[rank]
        self.switches += 1
        self._turns[rank].release()
