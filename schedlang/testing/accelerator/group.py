"""A group of ranks on simulated devices: its operations, NCCL's rules, and the detection of
deadlocks.

Each rank writes what it launches to a shared table, so that differing collectives and circles of
waiting ranks are reported by name.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from schedlang.testing.accelerator.transfers import (
    DuplicateDevice,
    Item,
    Queue,
    Started,
    Transfer,
    Unequal,
)

# -- a table of short texts that the ranks of one machine share: the current work of each -----

_WIDTH = 512  # bytes of a cell: its length, then its text
_LENGTH = 4


class Board:
    """Rows by rank in shared memory; each rank writes its own row, and reads all rows directly."""

    def __init__(self, store: Any, rank: int, size: int, columns: int) -> None:
        self.rank, self.size, self.columns = rank, size, columns
        if rank == 0:
            handle, path = tempfile.mkstemp(prefix="simccl-")
            os.ftruncate(handle, size * columns * _WIDTH)
            store.set("board", path)
        else:
            path = store.get("board").decode()
            handle = os.open(path, os.O_RDWR)
        self._cells = mmap.mmap(handle, size * columns * _WIDTH)
        os.close(handle)
        # all ranks have opened it; it is freed with the last one
        if store.add("boards", 1) == size:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def write(self, column: int, value: Any) -> None:
        """Set a cell of this rank's row."""
        text = json.dumps(value).encode()
        if len(text) > _WIDTH - _LENGTH:
            text = json.dumps(None).encode()
        start = (self.rank * self.columns + column) * _WIDTH
        self._cells[start : start + _LENGTH] = bytes(_LENGTH)  # empty while it is written
        self._cells[start + _LENGTH : start + _LENGTH + len(text)] = text
        self._cells[start : start + _LENGTH] = len(text).to_bytes(_LENGTH, "little")

    def read(self, rank: int, column: int) -> Any:
        """Return a cell of any row; None where nothing was written yet."""
        start = (rank * self.columns + column) * _WIDTH
        length = int.from_bytes(self._cells[start : start + _LENGTH], "little")
        if not length:
            return None
        try:
            return json.loads(self._cells[start + _LENGTH : start + _LENGTH + length])
        except ValueError:
            return None  # being written now


# -- operations: launched, on their way, and published ---------------------------------------------

BACKEND = "simccl"
_KIND = torch._C._autograd.DeviceType.PrivateUse1.value


class Deadlock(RuntimeError):
    """Ranks that wait for each other: none of them can continue."""


class Mismatch(RuntimeError):
    """Ranks of a group that launch different operations."""


class State:
    """The state of all communicators of this process."""

    core: Any = None
    tickets = itertools.count(1)
    open: dict[int, Work] = {}
    world: Board | None = None
    me = 0
    waits = itertools.count(1)
    stuck = False  # a deadlock was raised here; the other ranks must still read the reason


def publish(ticket: int) -> None:
    """Make the results of a work available: a stream, or the host, is ordered after it."""
    work = State.open.get(ticket)
    if work is not None:
        work.publish()


class Work:
    """One operation: its inputs are copied at launch, its outputs written when a stream waits for
    it."""

    def __init__(
        self,
        group: Group,
        name: str,
        ins: Sequence[Tensor],
        outs: Sequence[Tensor],
        asynchronous: bool,
        signature: Any = None,
        device: int | None = None,
        queue: int | None = None,
    ) -> None:
        core = State.core
        self.group, self.name, self.outs = group, name, list(outs)
        self.device = group.checked(name, [*ins, *outs]) if device is None else device
        current = core.current_stream(self.device)
        self.stream = group.stream(self.device, queue) if asynchronous else current
        if asynchronous:
            core.stream_waits(self.device, self.stream, core.snapshot(self.device, current))
            stream = torch.Stream(
                stream_id=self.stream, device_index=self.device, device_type=_KIND
            )
            for t in (*ins, *outs):  # NCCL's works hold their tensors until they are done
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
        self.number = group.describe(name, signature, self.device)
        self.item: Item | None = None
        self.transfer: Transfer | None = None
        self.gloo: list[Any] = []
        self.finish: Callable[[], None] = lambda: None
        self.started, self.host_waits = False, False
        self.finished = False
        self._lock = threading.RLock()
        State.open[self.ticket] = self
        core.opened(self.ticket, index, when)

    def start(self, begin: Callable[[], Started]) -> Work:
        """Hand the data to gloo, after earlier operations of the queue."""
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
        """Wait for the data, and write it into the memory of the device."""
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
        """Order the current stream after this operation."""
        core = State.core
        self.publish()
        current = core.current_stream(self.device)
        core.stream_waits(self.device, current, self.clock)
        if self.host_waits:
            core.synchronise("barrier", self.device, current)
        return True

    def is_completed(self) -> bool:
        """Return whether the results are available."""
        return self.finished

    def result(self) -> list[Tensor]:
        """Return the output tensors."""
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
        """Order the current stream after all works."""
        for work in self.works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether all results are available."""
        return all(work.finished for work in self.works)

    def result(self) -> list[Tensor]:
        """Return the output tensors of all works."""
        return [t for work in self.works for t in work.outs]


def span(t: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and one past its last."""
    start = t.data_ptr()
    return start, start + t.numel() * t.element_size()


# -- groups ----------------------------------------------------------------------------------------

STUCK_AFTER = 2.0  # seconds without a result before a rank checks for a deadlock
RING = 64  # collectives whose descriptions are stored
_NEVER = datetime.timedelta(days=30)
_SLICE = datetime.timedelta(milliseconds=100)

communicators: weakref.WeakSet[Group] = weakref.WeakSet()


class Group:
    """The ranks of a communicator: its queues, their streams, and the current work of each rank."""

    def __init__(
        self, store: Any, rank: int, ranks: Sequence[int], timeout: Any, name: str
    ) -> None:
        self.rank, self.size, self.ranks = rank, len(ranks), list(ranks)
        self.store, self.timeout, self.name = store, timeout, name
        gloo = PrefixStore("gloo", store)
        self.gloo = dist.ProcessGroupGloo(gloo, rank, self.size, timeout=_NEVER)
        self.board = Board(store, rank, self.size, RING + self.size + 1)
        if State.world is None or State.world.size < self.size:
            waits = PrefixStore("waits", store)
            State.world, State.me = Board(waits, rank, self.size, 1), self.ranks[rank]
        self.closed, self.eager = False, False
        self.failed: RuntimeError | None = None
        self.latest: list[Any] = []
        self._numbers = itertools.count(1)
        self._streams: dict[tuple[int, int], int] = {}
        self._batch: list[Any] | None = None
        self._sent: dict[tuple[int, str, int], int] = {}
        self._queues: dict[int, Queue] = {}
        self.whole = self._queue(self.size)
        communicators.add(self)

    def __str__(self) -> str:
        return f"group {self.name!r} of ranks {self.ranks}"

    # ---- rules ------------------------------------------------------------------------------

    def checked(self, name: str, tensors: Sequence[Tensor]) -> int:
        """Return the device of all tensors; raise where NCCL would reject the tensors."""
        if State.stuck and State.world is not None:  # this rank continues and waits for none
            State.stuck = False
            State.world.write(0, None)
        if self.closed:
            raise RuntimeError(f"{BACKEND}: {self} was destroyed")
        if self.failed is not None:
            raise RuntimeError(f"{BACKEND}: {self} failed before: {self.failed}")
        if not tensors:
            raise ValueError(f"{BACKEND} {name}: no tensors")
        for t in tensors:
            if t.device.type != "sim":
                raise ValueError(
                    f"{BACKEND} {name}: Tensors must be on the device, and dense: got {t.device}"
                )
            if not t.is_contiguous():
                raise ValueError(
                    f"{BACKEND} {name}: Tensors must be contiguous: got strides {t.stride()} "
                    f"for {list(t.shape)}"
                )
        devices = sorted({int(t.device.index) for t in tensors})
        if len(devices) > 1:
            raise ValueError(f"{BACKEND} {name}: Tensors on several devices: {devices}")
        return devices[0]

    def connect(self, device: int) -> None:
        """Use one queue, for single sends and receives too: the group was bound to a device."""
        self.eager = True

    def stream(self, device: int, queue: int | None = None) -> int:
        """Return the stream of a queue on a device: toward a peer, or (None) of collectives."""
        key = (device, self.size if queue is None else queue)
        if key not in self._streams:
            self._streams[key] = State.core.new_stream(device)
        return self._streams[key]

    def publish_before(self, new: Work, tensors: Sequence[Tensor]) -> None:
        """Publish results of earlier work on the same stream that the new work reads or writes."""
        spans = [span(t) for t in tensors]
        for work in list(State.open.values()):
            if work.device != new.device or work.stream != new.stream:
                continue
            for out in work.outs:
                low, high = span(out)
                if any(low < b and a < high for a, b in spans):
                    work.publish()
                    break

    def describe(self, name: str, signature: Any, device: int) -> int:
        """Write this rank's launch to the table, and return its number."""
        if name in ("send", "recv"):
            return 0
        number = next(self._numbers)
        self.board.write(number % RING, [number, name, signature, device])
        return number

    def compare(self, work: Work) -> None:
        """Check that all ranks that have arrived launched the same, each on its own device."""
        if not work.number:
            return
        own = self.board.read(self.rank, work.number % RING)
        if own is None or own[0] != work.number:
            return
        for rank in range(self.size):
            peer = self.board.read(rank, work.number % RING)
            if rank == self.rank or peer is None or peer[0] != work.number:
                continue
            if peer[1:3] != own[1:3]:
                raise Mismatch(
                    f"{BACKEND}: collective number {work.number} of {self} differs: rank "
                    f"{self.ranks[self.rank]} has {_describe_row(own)}, rank {self.ranks[rank]} "
                    f"has {_describe_row(peer)}"
                )
            if peer[3] == own[3]:
                raise Mismatch(self._duplicate_text(rank, own[3]))

    def _fail_with(self, text: str) -> Mismatch:
        error = Mismatch(text)
        self.fail(error)
        return error

    def _duplicate_text(self, rank: int, device: int) -> str:
        return (
            f"{BACKEND}: Duplicate device: rank {self.ranks[self.rank]} and rank "
            f"{self.ranks[rank]} of {self} are both on sim:{device}; each process sets its own"
        )

    # ---- waiting ----------------------------------------------------------------------------

    def wait_for(self, work: Work) -> None:
        """Wait until the data of a work is available; raise on deadlock, mismatch and time-out."""
        began, published = time.monotonic(), False
        try:
            while not self._has_arrived(work):
                waited = time.monotonic() - began
                if waited > STUCK_AFTER:
                    self.compare(work)
                    self._publish_wait(work)
                    published = True
                    self._check_deadlock(work)
                if waited > self.timeout.total_seconds():
                    missing = [self.ranks[r] for r in self._blockers(work)]
                    raise Deadlock(
                        f"{BACKEND}: {work} is not done after {waited:.0f} s: rank {State.me} "
                        f"waits for ranks {missing}, which are busy with something else"
                    )
        except (Deadlock, Mismatch) as error:
            State.stuck = published and isinstance(error, Deadlock)
            self.fail(error)
            raise
        except Unequal as error:
            raise self._fail_with(
                f"{BACKEND}: {error.one} on rank {State.me} meets "
                f"{error.numel} elements, {error.bytes} bytes, on the other side"
            ) from None
        except DuplicateDevice as error:
            raise self._fail_with(self._duplicate_text(error.peer, error.device)) from None
        except Exception as error:
            self.compare(work)  # a mismatch may be the cause
            raise RuntimeError(f"{BACKEND}: {work} failed on rank {State.me}: {error}") from error
        finally:
            if published and not State.stuck and State.world is not None:
                State.world.write(0, None)
        try:
            self.compare(work)
        except Mismatch as error:
            self.fail(error)
            raise

    def fail(self, error: RuntimeError) -> None:
        """Fail: end all open work of the group; its waiters get the same error."""
        self.failed = error
        for ticket, work in list(State.open.items()):
            if work.group is self:
                work.finished = True
                del State.open[ticket]
                State.core.closed(ticket)

    def _has_arrived(self, work: Work) -> bool:
        """Return whether a work is done, after waiting for a moment."""
        if work.item is not None:
            if not work.item.done.wait(_SLICE.total_seconds()):
                return False
            if work.item.error is not None:
                raise work.item.error
            return True
        for gloo_work in work.gloo:
            if gloo_work.is_completed():
                gloo_work.wait()
                continue
            try:
                gloo_work.wait(_SLICE)
            except RuntimeError:
                if not gloo_work.is_completed():
                    return False
                gloo_work.wait()  # raises its error, or it ended just now
        return True

    def _blockers(self, work: Work) -> list[int]:
        """Return the ranks of the group that have not reached what this rank waits for."""
        item = work.item
        if item is not None:
            queue, key = self._queue_of(item)
            head = queue.head() if queue is not None else None
            if head is None:
                return []
            if head.transfers:
                return [one.peer for one in head.transfers if not self._peer_is_ready(one, key)]
            for waiting in list(State.open.values()):
                work = waiting if waiting.item is head else work
        last = work.number
        if not last:
            return []
        behind = []
        for rank in range(self.size):
            row = self.board.read(rank, last % RING)
            ahead = rank != self.rank and self.board.read(rank, RING + self.size)
            if row is None or row[0] < last or ahead:  # there a transfer comes first
                behind.append(rank)
        return behind

    def _queue_of(self, item: Item) -> tuple[Queue | None, int]:
        for key, queue in self._queues.items():
            if item in queue._items:
                return queue, key
        return None, 0

    def _peer_is_ready(self, transfer: Transfer, key: int) -> bool:
        """Return whether the other side is at the head of its queue, too."""
        opposite = "recv" if transfer.kind == "send" else "send"
        column = RING + (self.size if key == self.size else self.rank)
        peer_head = self.board.read(transfer.peer, column)
        expected = [opposite, self.rank, transfer.number]
        return peer_head is not None and any(entry[:3] == expected for entry in peer_head)

    def _publish_wait(self, work: Work) -> None:
        """Write which ranks this rank waits for; other ranks follow these entries."""
        text = str(work)
        if work.item is not None:
            queue, _ = self._queue_of(work.item)
            head = queue.head() if queue is not None else None
            if head is not None and head is not work.item:
                first = "; ".join(str(transfer) for transfer in head.transfers)
                text += f", behind {first}"
        blockers = [self.ranks[r] for r in self._blockers(work)]
        if State.world is not None:
            before = State.world.read(State.me, 0)
            if before is None or before[1:] != [text, blockers]:
                State.world.write(0, [next(State.waits), text, blockers])

    def _check_deadlock(self, work: Work) -> None:
        """Follow who waits for whom; raise Deadlock if no rank that this one waits for can
        continue."""
        first = self._waiting_ranks()
        if first is None:
            return
        time.sleep(0.5)
        if first != self._waiting_ranks() or self._has_arrived(work):
            return
        lines = [f"rank {rank} waits for {row[2]}: {row[1]}" for rank, row in sorted(first.items())]
        raise Deadlock(f"{BACKEND}: deadlock\n   " + "\n   ".join(lines))

    def _waiting_ranks(self) -> dict[int, Any] | None:
        """Return all ranks reachable from this one, if each of them waits for another; else
        None."""
        waiting: dict[int, Any] = {}
        todo = [State.me]
        assert State.world is not None
        while todo:
            rank = todo.pop()
            if rank in waiting:
                continue
            row = State.world.read(rank, 0)
            if row is None or not row[2]:
                return None
            waiting[rank] = row
            todo += row[2]
        return waiting

    # ---- queues -----------------------------------------------------------------------------

    def _queue(self, key: int) -> Queue:
        """Return the queue toward a peer, or (key = size of the group) that of collectives."""
        if key not in self._queues:
            column = RING + key
            self._queues[key] = Queue(self.gloo, lambda head: self.board.write(column, head))
        return self._queues[key]


def _describe_row(row: Any) -> str:
    _, name, details, _ = row
    return f"{name} {details}" if details is not None else str(name)
