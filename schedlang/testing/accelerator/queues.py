"""Serial queues of a communicator: what was launched first runs first, and blocks what follows."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from schedlang.testing.accelerator import transfers


class Transfer:
    """A tensor on its way between this rank and a peer: the `number`-th of its queue that way."""

    def __init__(
        self, kind: str, staged: Tensor, device: int, peer: int, number: int, base: int, whom: int
    ) -> None:
        self.kind, self.staged, self.peer, self.number = kind, staged, peer, number
        self.device = device
        self.whom = whom  # the peer as the world counts
        self.tag = base + 2 * number  # what NCCL matches by order, gloo matches by this
        self.dtype = str(staged.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        toward = "to" if self.kind == "send" else "from"
        return f"{self.kind} {self.dtype}{list(self.staged.shape)} {toward} rank {self.whom}"


class Item:
    """What a queue runs at once: one transfer, a batch of them, or a collective."""

    def __init__(self, transfers: Sequence[Transfer], collective: Any = None) -> None:
        self.transfers, self.collective = list(transfers), collective
        self.after: list[Any] = []  # works of gloo that came before
        self.done = threading.Event()
        self.error: BaseException | None = None

    def described(self) -> list[Any]:
        """What other ranks may read about it."""
        return [[one.kind, one.peer, one.number, str(one)] for one in self.transfers]


class Queue:
    """One serial queue of this rank; its head is written where other ranks can read it."""

    def __init__(self, gloo: Any, show: Callable[[Any], None]) -> None:
        self._gloo, self._show = gloo, show
        self._items: collections.deque[Item] = collections.deque()
        self._more = threading.Condition()
        self._thread: threading.Thread | None = None
        self.closed = False

    def idle(self) -> bool:
        """Whether nothing is waiting or running."""
        return not self._items

    def head(self) -> Item | None:
        """What runs now."""
        return self._items[0] if self._items else None

    def put(self, item: Item) -> None:
        """Add at the end."""
        with self._more:
            self._items.append(item)
            if len(self._items) == 1:
                self._show(item.described())
            self._more.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End, whatever is still in it."""
        with self._more:
            self.closed = True
            self._more.notify()

    def _serve(self) -> None:
        while True:
            with self._more:
                while not self._items and not self.closed:
                    self._more.wait()
                if self.closed:
                    return
                item = self._items[0]
            try:
                self._run(item)
            except BaseException as error:
                item.error = error
            with self._more:
                self._items.popleft()
                self._show(self._items[0].described() if self._items else None)
            item.done.set()

    def _run(self, item: Item) -> None:
        for work in item.after:
            work.wait()
        if item.collective is not None:
            item.collective()
            return
        self._meet(item.transfers)
        moves = [
            (transfers.send if one.kind == "send" else transfers.receive)(
                self._gloo, one.staged, one.peer, one.tag
            )
            for one in item.transfers
            if one.staged.numel()
        ]
        for work in moves:
            work.wait()

    def _meet(self, ones: Sequence[Transfer]) -> None:
        """Both ends say what they have: each waits for the other, and both find what differs."""
        greetings = []
        for one in ones:
            code = [one.staged.numel(), one.staged.element_size(), one.device]
            ours = torch.tensor([*code, sum(map(ord, one.dtype))])
            theirs = torch.empty_like(ours)
            first, second = one.tag + 1, one.tag + (1 << 20) + 1
            out, back = (first, second) if one.kind == "send" else (second, first)
            works = [
                self._gloo.send([ours], one.peer, out),
                self._gloo.recv([theirs], one.peer, back),
            ]
            greetings.append((one, ours, theirs, works))
        for one, ours, theirs, works in greetings:
            for work in works:
                work.wait()
            if theirs[2] == ours[2]:
                raise DuplicateDevice(one.peer, int(ours[2]))
            if theirs[0] != ours[0] or theirs[3] != ours[3]:
                raise Unequal(one, int(theirs[0]), int(theirs[0] * theirs[1]))


class Unequal(Exception):
    """A transfer whose two ends have other sizes or dtypes."""

    def __init__(self, one: Transfer, numel: int, size: int) -> None:
        super().__init__(str(one), one.peer, numel, size)
        self.one, self.peer, self.numel, self.bytes = str(one), one.peer, numel, size


class DuplicateDevice(Exception):
    """A peer is on the same device."""

    def __init__(self, peer: int, device: int) -> None:
        super().__init__(peer, device)
        self.peer, self.device = peer, device
