"""simccl: a collective library for the simulated device with the rules of NCCL.

Tensors of the device only, contiguous, on one device, which no other rank has; operations run on a
stream of the group (or on the current one, where the caller waits at once), in order; nothing is
there before a stream is ordered after it.  The data goes over gloo, through copies on the host.
"""

from __future__ import annotations

import datetime
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from schedlang.testing.accelerator import transfers
from schedlang.testing.accelerator.boards import Board
from schedlang.testing.accelerator.queues import (
    DuplicateDevice,
    Item,
    Queue,
    Transfer,
    Unequal,
)
from schedlang.testing.accelerator.works import (
    BACKEND,
    Deadlock,
    Mismatch,
    State,
    Together,
    Work,
    publish,
    span,
)

STUCK_AFTER = 2.0  # seconds without a result before a rank looks whether it can still come
_RING = 64  # collectives whose descriptions are kept
_NEVER = datetime.timedelta(days=30)
_SLICE = datetime.timedelta(milliseconds=100)

_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


def register(core: Any) -> None:
    """Make the backend known to torch.distributed."""
    State.core = core
    core.set_publisher(publish)
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _made, extended_api=True, devices=["sim"])


def _made(options: Any, backend_options: Any) -> Any:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    one = Communicator(
        options.store, options.group_rank, ranks, options.timeout, str(options.group_id)
    )
    return State.core.SimBackend(options.group_rank, options.group_size, one)


def alive() -> int:
    """Communicators of this process that were not shut down."""
    return sum(not one.closed for one in _communicators)


class Communicator:
    """A group of ranks; what c10d calls by way of works.cpp."""

    def __init__(
        self, store: Any, rank: int, ranks: Sequence[int], timeout: Any, name: str
    ) -> None:
        self.rank, self.size, self.ranks = rank, len(ranks), list(ranks)
        self.store, self.timeout, self.name = store, timeout, name
        gloo = PrefixStore("gloo", store)
        self.gloo = dist.ProcessGroupGloo(gloo, rank, self.size, timeout=_NEVER)
        self.board = Board(store, rank, self.size, _RING + self.size + 1)
        if State.world is None or State.world.size < self.size:
            waits = PrefixStore("waits", store)
            State.world, State.me = Board(waits, rank, self.size, 1), self.ranks[rank]
        self.closed, self.eager = False, False
        self.failed: RuntimeError | None = None
        self.latest: list[Any] = []
        self._numbers = itertools.count(1)
        self._streams: dict[int, int] = {}
        self._batch: list[Any] | None = None
        self._sent: dict[tuple[int, str, int], int] = {}
        self._queues: dict[int, Queue] = {}
        self.whole = self._queue(self.size)
        _communicators.add(self)

    def __str__(self) -> str:
        return f"group {self.name!r} of ranks {self.ranks}"

    # ---- rules ------------------------------------------------------------------------------

    def checked(self, name: str, tensors: Sequence[Tensor]) -> int:
        """The device of all tensors, or why NCCL would not take them."""
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
        """A group that was bound to a device has one queue: also for single sends and receives."""
        self.eager = True

    def stream(self, device: int) -> int:
        """The stream of this group on a device."""
        if device not in self._streams:
            self._streams[device] = State.core.new_stream(device)
        return self._streams[device]

    def publish_before(self, new: Work, tensors: Sequence[Tensor]) -> None:
        """What ran before on the same stream is there for what comes after it."""
        spans = [span(t) for t in tensors]
        for work in list(State.open.values()):
            if work.device != new.device or work.stream != new.stream:
                continue
            for out in work.outs:
                low, high = span(out)
                if any(low < b and a < high for a, b in spans):
                    work.publish()
                    break

    def describe(self, name: str, told: Any, device: int) -> int:
        """Write what this rank does where the others can read it."""
        if name in ("send", "recv"):
            return 0
        number = next(self._numbers)
        self.board.write(number % _RING, [number, name, told, device])
        return number

    def compare(self, work: Work) -> None:
        """All ranks that came did the same, each on a device of its own."""
        if not work.number:
            return
        ours = self.board.read(self.rank, work.number % _RING)
        if ours is None or ours[0] != work.number:
            return
        for rank in range(self.size):
            theirs = self.board.read(rank, work.number % _RING)
            if rank == self.rank or theirs is None or theirs[0] != work.number:
                continue
            if theirs[1:3] != ours[1:3]:
                raise Mismatch(
                    f"{BACKEND}: collective number {work.number} of {self} differs: rank "
                    f"{self.ranks[self.rank]} has {_said(ours)}, rank {self.ranks[rank]} has "
                    f"{_said(theirs)}"
                )
            if theirs[3] == ours[3]:
                raise Mismatch(self._duplicate(rank, ours[3]))

    def _failing(self, text: str) -> Mismatch:
        error = Mismatch(text)
        self.fail(error)
        return error

    def _duplicate(self, rank: int, device: int) -> str:
        return (
            f"{BACKEND}: Duplicate device: rank {self.ranks[self.rank]} and rank "
            f"{self.ranks[rank]} of {self} are both on sim:{device}; each process sets its own"
        )

    # ---- waiting ----------------------------------------------------------------------------

    def wait_for(self, work: Work) -> None:
        """Until the data of a work is there; raises what stands in its way."""
        began, told = time.monotonic(), False
        try:
            while not self._arrived(work):
                waited = time.monotonic() - began
                if waited > STUCK_AFTER:
                    self.compare(work)
                    self._tell(work)
                    told = True
                    self._look(work)
                if waited > self.timeout.total_seconds():
                    missing = [self.ranks[r] for r in self._blockers(work)]
                    raise Deadlock(
                        f"{BACKEND}: {work} is not done after {waited:.0f} s: rank {State.me} "
                        f"waits for ranks {missing}, which are busy with something else"
                    )
        except (Deadlock, Mismatch) as error:
            self.fail(error)
            raise
        except Unequal as error:
            raise self._failing(
                f"{BACKEND}: {error.one} on rank {State.me} meets "
                f"{error.numel} elements, {error.bytes} bytes, on the other side"
            ) from None
        except DuplicateDevice as error:
            raise self._failing(self._duplicate(error.peer, error.device)) from None
        except Exception as error:
            self.compare(work)  # it may be why
            raise RuntimeError(f"{BACKEND}: {work} failed on rank {State.me}: {error}") from error
        finally:
            if told and State.world is not None:
                State.world.write(0, None)
        try:
            self.compare(work)
        except Mismatch as error:
            self.fail(error)
            raise

    def fail(self, error: RuntimeError) -> None:
        """What is still open will never come: whoever waits for it is told the same."""
        self.failed = error
        for ticket, work in list(State.open.items()):
            if work.group is self:
                work.finished = True
                del State.open[ticket]
                State.core.closed(ticket)

    def _arrived(self, work: Work) -> bool:
        """Whether it is done, after a moment of waiting."""
        if work.item is not None:
            if not work.item.done.wait(_SLICE.total_seconds()):
                return False
            if work.item.error is not None:
                raise work.item.error
            return True
        for one in work.gloo:
            if one.is_completed():
                one.wait()
                continue
            try:
                one.wait(_SLICE)
            except RuntimeError:
                if not one.is_completed():
                    return False
                one.wait()  # its own error, or it ended just now
        return True

    def _blockers(self, work: Work) -> list[int]:
        """Ranks of the group that have not come to what this rank waits for."""
        item = work.item
        if item is not None:
            queue, key = self._queue_of(item)
            head = queue.head() if queue is not None else None
            if head is None:
                return []
            if head.transfers:
                return [one.peer for one in head.transfers if not self._met(one, key)]
            for other in list(State.open.values()):
                work = other if other.item is head else work
        last = work.number
        if not last:
            return []
        behind = []
        for rank in range(self.size):
            theirs = self.board.read(rank, last % _RING)
            ahead = rank != self.rank and self.board.read(rank, _RING + self.size)
            if theirs is None or theirs[0] < last or ahead:  # a transfer is before it there
                behind.append(rank)
        return behind

    def _queue_of(self, item: Item) -> tuple[Queue | None, int]:
        for key, queue in self._queues.items():
            if item in queue._items:
                return queue, key
        return None, 0

    def _met(self, one: Transfer, key: int) -> bool:
        """Whether the other side is at the head of its queue, too."""
        opposite = "recv" if one.kind == "send" else "send"
        column = _RING + (self.size if key == self.size else self.rank)
        theirs = self.board.read(one.peer, column)
        wanted = [opposite, self.rank, one.number]
        return theirs is not None and any(other[:3] == wanted for other in theirs)

    def _tell(self, work: Work) -> None:
        """Write for whom this rank waits; other ranks follow it."""
        text = str(work)
        if work.item is not None:
            queue, _ = self._queue_of(work.item)
            head = queue.head() if queue is not None else None
            if head is not None and head is not work.item:
                first = "; ".join(str(one) for one in head.transfers)
                text += f", behind {first}"
        blockers = [self.ranks[r] for r in self._blockers(work)]
        if State.world is not None:
            before = State.world.read(State.me, 0)
            if before is None or before[1:] != [text, blockers]:
                State.world.write(0, [next(State.waits), text, blockers])

    def _look(self, work: Work) -> None:
        """Follow who waits for whom: if nobody that this rank waits for can go on, none can."""
        first = self._stuck()
        if first is None:
            return
        time.sleep(0.5)
        if first != self._stuck() or self._arrived(work):
            return
        lines = [f"rank {rank} waits for {row[2]}: {row[1]}" for rank, row in sorted(first.items())]
        raise Deadlock(f"{BACKEND}: deadlock\n   " + "\n   ".join(lines))

    def _stuck(self) -> dict[int, Any] | None:
        """All ranks that are reached from this one, if each of them waits for another."""
        found: dict[int, Any] = {}
        todo = [State.me]
        assert State.world is not None
        while todo:
            rank = todo.pop()
            if rank in found:
                continue
            row = State.world.read(rank, 0)
            if row is None or not row[2]:
                return None
            found[rank] = row
            todo += row[2]
        return found

    # ---- collectives --------------------------------------------------------------------------

    def _collective(
        self, name: str, ins: Sequence[Tensor], outs: Sequence[Tensor], asynchronous: bool,
        told: Any, begin: Callable[[Work], transfers.Started],
    ) -> Work:  # fmt: skip
        batched = self._batch is not None
        work = Work(self, name, ins, outs, asynchronous or batched, told)
        work.start(lambda: begin(work))
        if self._batch is not None:
            self._batch.append(work)
        return work

    def all_reduce(self, tensors: Sequence[Tensor], op: Any, asynchronous: bool) -> Work:
        """Sum (or another reduction) in place."""
        return self._collective(
            "all_reduce", tensors, tensors, asynchronous, _told(tensors, op),
            lambda w: transfers.reduced(self.gloo, self.size, w.staged_in, w.staged_out, op),
        )  # fmt: skip

    def reduce(self, tensors: Sequence[Tensor], root: int, op: Any, asynchronous: bool) -> Work:
        """The same at one rank; the others keep what they have."""

        def begin(work: Work) -> transfers.Started:
            works, finish = transfers.reduced(
                self.gloo, self.size, work.staged_in, work.staged_out, op
            )

            def kept() -> None:
                finish()
                if self.rank != root:
                    for x, y in zip(work.staged_in, work.staged_out):
                        y.copy_(x)

            return works, kept

        told = [*_told(tensors, op), root]
        return self._collective("reduce", tensors, tensors, asynchronous, told, begin)

    def broadcast(self, tensors: Sequence[Tensor], root: int, asynchronous: bool) -> Work:
        """The tensors of one rank, for all."""
        return self._collective(
            "broadcast", tensors, tensors, asynchronous,
            [*_told(tensors), root],
            lambda w: transfers.broadcast(self.gloo, w.staged_in, w.staged_out, root),
        )  # fmt: skip

    def all_gather(
        self, outs: Sequence[Sequence[Tensor]], ins: Sequence[Tensor], asynchronous: bool
    ) -> Work:
        """One tensor of each rank, in a list."""
        return self._collective(
            "all_gather", ins, outs[0], asynchronous, _told(outs[0]),
            lambda w: transfers.gathered(self.gloo, w.staged_in[0], w.staged_out),
        )  # fmt: skip

    def all_gather_into_tensor(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], asynchronous: bool
    ) -> Work:
        """One tensor of each rank, in one; the input may be a part of the output."""
        for x, y in zip(ins, outs):
            if y.numel() != x.numel() * self.size or x.dtype != y.dtype:
                raise ValueError(f"{BACKEND} all_gather_into_tensor: {_told([x, y])} do not fit")
        return self._collective(
            "all_gather_into_tensor", ins, outs, asynchronous, _told(ins),
            lambda w: transfers.gathered_into(self.gloo, self.size, w.staged_in, w.staged_out),
        )  # fmt: skip

    def reduce_scatter(
        self, outs: Sequence[Tensor], ins: Sequence[Sequence[Tensor]], op: Any, asynchronous: bool
    ) -> Work:
        """A part of a sum for each rank, from a list."""
        return self._collective(
            "reduce_scatter", ins[0], outs, asynchronous, _told(ins[0], op),
            lambda w: transfers.reduce_scattered_list(
                self.gloo, self.rank, self.size, w.staged_in, w.staged_out[0], op),
        )  # fmt: skip

    def reduce_scatter_tensor(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], op: Any, asynchronous: bool
    ) -> Work:
        """A part of a sum for each rank, from one tensor."""
        for x, y in zip(ins, outs):
            if x.numel() != y.numel() * self.size or x.dtype != y.dtype:
                raise ValueError(f"{BACKEND} reduce_scatter_tensor: {_told([x, y])} do not fit")
        return self._collective(
            "reduce_scatter_tensor", ins, outs, asynchronous, _told(ins, op),
            lambda w: transfers.reduce_scattered(
                self.gloo, self.rank, self.size, w.staged_in, w.staged_out, op),
        )  # fmt: skip

    def all_to_all_single(
        self, out: Tensor, given: Tensor, outs: Sequence[int], ins: Sequence[int],
        asynchronous: bool,
    ) -> Work:  # fmt: skip
        """A part of each rank for each rank; parts are counted in rows."""
        return self._collective(
            "all_to_all_single", [given], [out], asynchronous,
            str(given.dtype), lambda w: transfers.exchanged(
                self.gloo, w.staged_in[0], w.staged_out[0],
                _parts(given, ins, self.size), _parts(out, outs, self.size)),
        )  # fmt: skip

    def all_to_all(self, outs: Sequence[Tensor], ins: Sequence[Tensor], asynchronous: bool) -> Work:
        """The same with lists."""

        def begin(work: Work) -> transfers.Started:
            x = torch.cat([t.reshape(-1) for t in work.staged_in])
            y = torch.empty(sum(t.numel() for t in outs), dtype=x.dtype)
            works, _ = transfers.exchanged(
                self.gloo, x, y, [t.nbytes for t in ins], [t.nbytes for t in outs]
            )

            def finish() -> None:
                parts: Any = torch.split(y, [t.numel() for t in outs])
                for part, staged in zip(parts, work.staged_out):
                    staged.view(-1).copy_(part)

            return works, finish

        return self._collective("all_to_all", ins, outs, asynchronous, str(ins[0].dtype), begin)

    def gather(
        self, outs: Sequence[Sequence[Tensor]], ins: Sequence[Tensor], root: int,
        asynchronous: bool,
    ) -> Work:  # fmt: skip
        """One tensor of each rank, at one rank."""
        flat = list(outs[0]) if outs else []
        return self._collective(
            "gather", ins, flat, asynchronous, [str(ins[0].dtype), root],
            lambda w: transfers.gathered_at(self.gloo, w.staged_in[0], w.staged_out, root),
        )  # fmt: skip

    def scatter(
        self, outs: Sequence[Tensor], ins: Sequence[Sequence[Tensor]], root: int,
        asynchronous: bool,
    ) -> Work:  # fmt: skip
        """One tensor for each rank, from one rank."""
        flat = list(ins[0]) if ins else []
        return self._collective(
            "scatter", flat, outs, asynchronous, [str(outs[0].dtype), root],
            lambda w: transfers.scattered(self.gloo, w.staged_in, w.staged_out[0], root),
        )  # fmt: skip

    def barrier(self, device: int, asynchronous: bool) -> Work:
        """All ranks came; the host waits for its stream, too."""
        index = State.core.get_device() if device < 0 else device
        with torch._C.DisableTorchFunction():
            token = torch.ones(1, device=torch.device("sim", index))
        work = self._collective(
            "barrier", [token], [token], asynchronous, None,
            lambda w: transfers.reduced(
                self.gloo, self.size, w.staged_in, w.staged_out, dist.ReduceOp.SUM),
        )  # fmt: skip
        work.host_waits = True
        return work

    # ---- point to point -------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work | Together:
        """Send to a rank of the group; tags mean nothing, the order does."""
        return self._transfer("send", tensors, peer)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work | Together:
        """Receive from a rank of the group."""
        return self._transfer("recv", tensors, peer)

    def _transfer(self, kind: str, tensors: Sequence[Tensor], peer: int) -> Work | Together:
        device = self.checked(kind, tensors)
        if self._batch is not None:
            self._batch.append((kind, list(tensors), peer))
            return Together([], device, self.stream(device))
        key = self.size if self.eager else peer
        work, one = self._staged(kind, tensors, peer, key)
        work.transfer, work.item = one, Item([one])
        item = work.item
        if key == self.size:
            item.after = list(self.latest)
        self._queue(key).put(item)
        return work

    def _staged(
        self, kind: str, tensors: Sequence[Tensor], peer: int, key: int
    ) -> tuple[Work, Transfer]:
        ins, outs = (tensors, []) if kind == "send" else ([], tensors)
        work = Work(self, kind, ins, outs, asynchronous=True)
        staged = (work.staged_in or work.staged_out)[0]
        number = self._sent.get((key, kind, peer), 0) + 1
        self._sent[key, kind, peer] = number
        base = 0 if key == self.size else 1 << 21
        return work, Transfer(kind, staged, work.device, peer, number, base, self.ranks[peer])

    def _queue(self, key: int) -> Queue:
        """The queue toward a peer, or (at the size of the group) that of all."""
        if key not in self._queues:
            column = _RING + key
            self._queues[key] = Queue(self.gloo, lambda head: self.board.write(column, head))
        return self._queues[key]

    def start_coalescing(self) -> None:
        """What follows is launched as one."""
        self._batch = []

    def end_coalescing(self) -> Together:
        """All of it: sends and receives of a batch run side by side."""
        batch, self._batch = self._batch or [], None
        works = [one for one in batch if isinstance(one, Work)]
        moved = [one for one in batch if not isinstance(one, Work)]
        staged = [self._staged(kind, some, peer, self.size) for kind, some, peer in moved]
        if staged:
            item = Item([one for _, one in staged])
            item.after = list(self.latest)
            for work, one in staged:
                work.transfer, work.item = one, item
                works.append(work)
            self.whole.put(item)
        device = works[0].device if works else State.core.get_device()
        return Together(works, device, self.stream(device))

    # ---- groups ---------------------------------------------------------------------------------

    def split(self, store: Any, ranks: Sequence[int], timeout: Any) -> Communicator | None:
        """A communicator of some of these ranks; None for the others."""
        if self.rank not in ranks:
            return None
        inside = [self.ranks[r] for r in ranks]
        timeout = datetime.timedelta(milliseconds=timeout)
        prefix = PrefixStore(f"split{'-'.join(map(str, inside))}", store)
        made = Communicator(
            prefix, list(ranks).index(self.rank), inside, timeout, f"{self.name}/split"
        )
        made.eager = self.eager
        return made

    def shutdown(self) -> None:
        """Nothing may be launched any more."""
        self.closed = True
        for queue in self._queues.values():
            queue.close()


def _told(tensors: Sequence[Tensor], op: Any = None) -> list[Any]:
    said = [f"{str(t.dtype).removeprefix('torch.')}[{t.numel()}]" for t in tensors[:12]]
    if op is None:
        return [len(tensors), said]
    return [len(tensors), said, getattr(getattr(op, "op", op), "name", str(op))]


def _said(row: Any) -> str:
    _, name, told, _ = row
    return f"{name} {told}" if told is not None else str(name)


def _parts(t: Tensor, rows: Sequence[int], size: int) -> list[int]:
    """The bytes of each part; without numbers of rows they are equal."""
    if not rows:
        if t.shape[0] % size:
            raise ValueError(f"{BACKEND} all_to_all_single: {t.shape[0]} rows for {size} ranks")
        return [t.nbytes // size] * size
    row = t.element_size() * (t[0].numel() if t.shape[0] else 0)
    return [n * row for n in rows]
