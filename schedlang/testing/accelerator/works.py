"""Operations of the simulated collective library: launched, on their way, and published."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from schedlang.testing.accelerator import transfers
from schedlang.testing.accelerator.boards import Board
from schedlang.testing.accelerator.queues import Item, Transfer

if TYPE_CHECKING:
    from schedlang.testing.accelerator.collectives import Communicator

BACKEND = "simccl"
_KIND = torch._C._autograd.DeviceType.PrivateUse1.value


class Deadlock(RuntimeError):
    """Ranks that wait for each other: none of them can go on."""


class Mismatch(RuntimeError):
    """Ranks of a group that do not do the same."""


class State:
    """What this process knows of all its communicators."""

    core: Any = None
    tickets = itertools.count(1)
    open: dict[int, Work] = {}
    world: Board | None = None
    me = 0
    waits = itertools.count(1)
    stuck = False  # a deadlock was told here, and the others still have to see why


def publish(ticket: int) -> None:
    """The results of a work are asked for: a stream, or the host, is ordered after it."""
    work = State.open.get(ticket)
    if work is not None:
        work.publish()


class Work:
    """One operation: launched, its inputs copied; its results come when a stream waits for it."""

    def __init__(
        self,
        group: Communicator,
        name: str,
        ins: Sequence[Tensor],
        outs: Sequence[Tensor],
        asynchronous: bool,
        told: Any = None,
        device: int | None = None,
    ) -> None:
        core = State.core
        self.group, self.name, self.outs = group, name, list(outs)
        self.device = group.checked(name, [*ins, *outs]) if device is None else device
        now = core.current_stream(self.device)
        self.stream = group.stream(self.device) if asynchronous else now
        if asynchronous:
            core.stream_waits(self.device, self.stream, core.snapshot(self.device, now))
            stream = torch.Stream(
                stream_id=self.stream, device_index=self.device, device_type=_KIND
            )
            for t in (*ins, *outs):  # NCCL's works keep their tensors until they are done
                t.record_stream(stream)
        group.publish_before(self, [*ins, *outs])
        self.staged_in = [core.alias(t.detach()).clone() for t in ins]
        self.staged_out = [torch.empty(t.shape, dtype=t.dtype) for t in outs]
        index, when = core.launch(self.device, self.stream, f"{BACKEND}.{name}", ins, outs)
        for t in outs:
            if t.numel():
                core.alias(t.detach()).view(-1).view(torch.uint8).fill_(0xFF)
        self.clock = core.snapshot(self.device, self.stream)
        self.ticket = next(State.tickets)
        self.number = group.describe(name, told, self.device)
        self.item: Item | None = None
        self.transfer: Transfer | None = None
        self.gloo: list[Any] = []
        self.finish: Callable[[], None] = lambda: None
        self.started, self.host_waits = False, False
        self.finished = False
        self._lock = threading.RLock()
        State.open[self.ticket] = self
        core.opened(self.ticket, index, when)

    def start(self, begin: Callable[[], transfers.Started]) -> Work:
        """Hand the data to gloo, in its turn."""
        queue = self.group.whole
        if queue.idle():
            self.gloo, self.finish = begin()
            self.group.latest = self.gloo
            return self

        def later() -> None:
            self.gloo, self.finish = begin()
            for work in self.gloo:
                work.wait()

        self.item = Item([], later)
        queue.put(self.item)
        return self

    def publish(self) -> None:
        """Wait until the data is there, and put it into the memory of the device."""
        with self._lock:
            if self.finished:
                if self.group.failed is not None and self.staged_out:
                    raise self.group.failed
                return
            self.finished = True
            State.open.pop(self.ticket, None)
            State.core.closed(self.ticket)
            self.group.wait_for(self)
            self.finish()
            for out, staged in zip(self.outs, self.staged_out):
                if out.numel() and out.untyped_storage().size():
                    State.core.alias(out.detach()).copy_(staged)
            self.staged_in, self.staged_out = [], []

    def wait(self) -> bool:
        """The current stream comes after this operation."""
        core = State.core
        self.publish()
        now = core.current_stream(self.device)
        core.stream_waits(self.device, now, self.clock)
        if self.host_waits:
            core.synchronise("barrier", self.device, now)
        return True

    def is_completed(self) -> bool:
        """Whether the results are there."""
        return self.finished

    def result(self) -> list[Tensor]:
        """The tensors that it writes."""
        return self.outs

    def __str__(self) -> str:
        if self.transfer is not None:
            return f"{self.transfer} in {self.group}"
        shapes = ", ".join(
            f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in self.outs
        )
        return f"{self.name} of {shapes or 'nothing'}, number {self.number} of {self.group}"


class Together:
    """Works that were launched as one."""

    def __init__(self, works: Sequence[Work], device: int, stream: int) -> None:
        self.works, self.device, self.stream = list(works), device, stream

    def wait(self) -> bool:
        """The current stream comes after all of them."""
        for work in self.works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Whether all results are there."""
        return all(work.finished for work in self.works)

    def result(self) -> list[Tensor]:
        """The tensors that they write."""
        return [t for work in self.works for t in work.outs]


def span(t: Tensor) -> tuple[int, int]:
    """Its first byte, and one past its last."""
    start = t.data_ptr()
    return start, start + t.numel() * t.element_size()
