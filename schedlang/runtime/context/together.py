"""Functions that run one at a time, in turns: each goes on when all have come to the same point."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Parted(Exception):
    """Some came to a point at which others never arrive."""


class Together:
    """Runs functions in threads of their own, of which one at a time is awake.

    So parts of one graph of autograd can be made side by side, each by a forward of the whole
    model; their order is always the same.
    """

    def __init__(self, count: int) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(count)]
        self._back = threading.Semaphore(0)
        self._waiting: dict[int, Any] = {}
        self._met: list[Any] = []
        self._failed = False

    def meet(self, place: int, value: Any) -> list[Any]:
        """What all have brought here, by place."""
        self._waiting[place] = value
        self._rest(place)
        return self._met

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """What the functions give; the first exception of one ends all, and is raised."""
        made: dict[int, Any] = {}
        errors: list[BaseException] = []
        default = torch.get_default_dtype()  # one for all threads: each finds its own when it wakes

        def body(place: int) -> None:
            self._turns[place].acquire()
            torch.set_default_dtype(default)
            try:
                if not self._failed:
                    made[place] = functions[place]()
            except BaseException as error:  # noqa: BLE001  (it is raised again below)
                errors.append(error)
                self._failed = True
            self._back.release()

        threads = [threading.Thread(target=body, args=(k,)) for k in range(len(functions))]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self._round(threads, made)
        torch.set_default_dtype(default)
        if errors:
            raise errors[0]
        return [made[place] for place in range(len(functions))]

    def _round(self, threads: Sequence[threading.Thread], made: dict[int, Any]) -> None:
        """Wake all that are not done, one after the other, until each has come somewhere."""
        there = [place for place, thread in enumerate(threads) if place not in made
                 and thread.is_alive()]  # fmt: skip
        for place in there:
            self._turns[place].release()
            self._back.acquire()
            if place in made or place not in self._waiting:
                threads[place].join()
        if len(self._waiting) not in (0, len(threads)):
            self._failed = True
        self._met = [self._waiting[place] for place in sorted(self._waiting)]
        self._waiting = {}

    def _rest(self, place: int) -> None:
        mine = torch.get_default_dtype()
        self._back.release()
        self._turns[place].acquire()
        torch.set_default_dtype(mine)
        if self._failed:
            raise Parted("the parts do not call attention equally often")
