"""Transfers of the simulated collective library: gloo, on the bytes of copies on the host.

Queues of a communicator are serial: operations run in order of launch, each blocks the next.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

Finish = Callable[[], None]  # once gloo is done
Tensors = Sequence[Tensor]
Started = tuple[list[Any], Finish]  # the works of gloo, and what remains to be done then


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def _do_nothing() -> None:
    pass


_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.uint8}


# Each function starts an operation on staged tensors: `ins` and `outs` are those of this rank.


def _all_reduce(gloo: Any, tensor: Tensor, op: Any) -> tuple[list[Any], Finish, Tensor]:
    """Start an all-reduce into a new tensor that `Finish` completes."""
    kinds: Any = dist.ReduceOp.RedOpType
    kind = op.op if hasattr(op, "op") else op
    average = kind == kinds.AVG
    if kind == kinds.PREMUL_SUM:
        raise NotImplementedError("simccl: PREMUL_SUM is not simulated")
    result = tensor.to(_WIDER.get(tensor.dtype, tensor.dtype), copy=True).view(-1)
    options: Any = c10d.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM if average else op
    works = [gloo.allreduce([result], options)] if result.numel() else []

    def finish() -> None:
        if average:
            if result.is_floating_point() or result.is_complex():
                result.div_(gloo.size())
            else:
                result.copy_(result.div(gloo.size(), rounding_mode="trunc"))

    return works, finish, result


def reduced(gloo: Any, ins: Tensors, outs: Tensors, op: Any) -> Started:
    """All-reduce each tensor."""
    return _reduce_parts(gloo, ins, outs, op, lambda y: slice(y.numel()))


def reduced_at(gloo: Any, ins: Tensors, outs: Tensors, op: Any, root: int) -> Started:
    """All-reduce each tensor at the root; the other ranks keep their tensors."""
    works, finish = reduced(gloo, ins, outs, op)

    def kept() -> None:
        finish()
        if gloo.rank() != root:
            for x, y in zip(ins, outs):
                y.copy_(x)

    return works, kept


def reduce_scattered(gloo: Any, ins: Tensors, outs: Tensors, op: Any) -> Started:
    """Reduce-scatter each tensor."""
    rank = gloo.rank()
    return _reduce_parts(
        gloo, ins, outs, op, lambda y: slice(rank * y.numel(), (rank + 1) * y.numel())
    )


def reduce_scattered_list(gloo: Any, ins: Tensors, outs: Tensors, op: Any) -> Started:
    """Reduce-scatter a list of inputs, whose sizes may differ."""
    start = sum(t.numel() for t in ins[: gloo.rank()])
    joined = [torch.cat([t.reshape(-1) for t in ins])]
    return _reduce_parts(gloo, joined, outs, op, lambda y: slice(start, start + y.numel()))


def _reduce_parts(
    gloo: Any, ins: Tensors, outs: Tensors, op: Any, part: Callable[[Tensor], slice]
) -> Started:
    """All-reduce each tensor; an output gets its part of the elements."""
    works: list[Any] = []
    ends = []
    for x, y in zip(ins, outs):
        started, finish, result = _all_reduce(gloo, x, op)
        works += started
        ends.append((finish, result, y))

    def finish_all() -> None:
        for finish, result, y in ends:
            finish()
            y.view(-1).copy_(result[part(y)])

    return works, finish_all


def broadcast(gloo: Any, ins: Tensors, outs: Tensors, root: int) -> Started:
    """Broadcast each tensor of the root."""
    options = c10d.BroadcastOptions()
    options.rootRank = root
    works = []
    for x, y in zip(ins, outs):
        y.copy_(x)
        works += [gloo.broadcast([_as_bytes(y)], options)] if y.numel() else []
    return works, _do_nothing


def gathered(gloo: Any, ins: Tensors, outs: Tensors) -> Started:
    """All-gather into a list, whose tensors may have different sizes."""
    (x,) = ins
    if any(y.numel() != x.numel() for y in outs):
        works = []
        for root, y in enumerate(outs):
            if root == gloo.rank():
                y.view(-1).copy_(x.view(-1))
            works += broadcast(gloo, [y], [y], root)[0]
        return works, _do_nothing
    if not x.numel():
        return [], _do_nothing
    return [gloo.allgather([[_as_bytes(y) for y in outs]], [_as_bytes(x)])], _do_nothing


def gathered_into(gloo: Any, ins: Tensors, outs: Tensors) -> Started:
    """All-gather each tensor into one tensor."""
    works = []
    for x, y in zip(ins, outs):
        if x.numel():
            works.append(gloo.allgather([list(_as_bytes(y).chunk(gloo.size()))], [_as_bytes(x)]))
    return works, _do_nothing


def exchanged(
    gloo: Any, ins: Tensors, outs: Tensors, sent: Sequence[int], received: Sequence[int]
) -> Started:
    """All-to-all of consecutive parts of these sizes in bytes."""
    (x,), (y,), options = ins, outs, c10d.AllToAllOptions()
    return [
        gloo.alltoall_base(_as_bytes(y), _as_bytes(x), list(received), list(sent), options)
    ], _do_nothing


def exchanged_list(gloo: Any, ins: Tensors, outs: Tensors) -> Started:
    """All-to-all of a tensor for each rank, and from each rank."""
    x = torch.cat([t.reshape(-1) for t in ins])
    y = torch.empty(sum(t.numel() for t in outs), dtype=x.dtype)
    works, _ = exchanged(gloo, [x], [y], [t.nbytes for t in ins], [t.nbytes for t in outs])

    def finish() -> None:
        parts: Any = torch.split(y, [t.numel() for t in outs])
        for part, staged in zip(parts, outs):
            staged.view(-1).copy_(part)

    return works, finish


def gathered_at(gloo: Any, ins: Tensors, outs: Tensors, root: int) -> Started:
    """Gather at the root."""
    options = c10d.GatherOptions()
    options.rootRank = root
    lists = [[_as_bytes(y) for y in outs]] if outs else []
    return [gloo.gather(lists, [_as_bytes(ins[0])], options)], _do_nothing


def scattered(gloo: Any, ins: Tensors, outs: Tensors, root: int) -> Started:
    """Scatter from the root."""
    options = c10d.ScatterOptions()
    options.rootRank = root
    lists = [[_as_bytes(x) for x in ins]] if ins else []
    return [gloo.scatter([_as_bytes(outs[0])], lists, options)], _do_nothing


def send(gloo: Any, tensor: Tensor, peer: int, tag: int) -> Any:
    """Start sending bytes."""
    return gloo.send([_as_bytes(tensor)], peer, tag)


def receive(gloo: Any, tensor: Tensor, peer: int, tag: int) -> Any:
    """Start receiving bytes."""
    return gloo.recv([_as_bytes(tensor)], peer, tag)


# -- serial queues ---------------------------------------------------------------------------------


class Transfer:
    """A tensor in transfer between this rank and a peer: the `number`-th of its queue in this
    direction."""

    def __init__(
        self,
        kind: str,
        staged: Tensor,
        device: int,
        peer: int,
        number: int,
        base: int,
        peer_rank: int,
    ) -> None:
        self.kind, self.staged, self.peer, self.number = kind, staged, peer, number
        self.device = device
        self.whom = peer_rank  # the peer's rank in the world
        self.tag = base + 2 * number  # NCCL matches by order, gloo by this tag
        self.dtype = str(staged.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        toward = "to" if self.kind == "send" else "from"
        return f"{self.kind} {self.dtype}{list(self.staged.shape)} {toward} rank {self.whom}"


class Item:
    """The unit that a queue runs: one transfer, a batch of transfers, or a collective."""

    def __init__(self, transfers: Sequence[Transfer], collective: Any = None) -> None:
        self.transfers, self.collective = list(transfers), collective
        self.after: list[Any] = []  # works of gloo that came before
        self.done = threading.Event()
        self.error: BaseException | None = None

    def described(self) -> list[Any]:
        """Return plain values that other ranks may read about the item."""
        return [[one.kind, one.peer, one.number, str(one)] for one in self.transfers]


class Queue:
    """A serial queue of this rank; its head is published to the other ranks."""

    def __init__(self, gloo: Any, show: Callable[[Any], None]) -> None:
        self._gloo, self._show = gloo, show
        self._items: collections.deque[Item] = collections.deque()
        self._more = threading.Condition()
        self._thread: threading.Thread | None = None
        self.closed = False

    def idle(self) -> bool:
        """Return whether nothing is waiting or running."""
        return not self._items

    def head(self) -> Item | None:
        """Return the item that runs now."""
        return self._items[0] if self._items else None

    def put(self, item: Item) -> None:
        """Append an item."""
        with self._more:
            self._items.append(item)
            if len(self._items) == 1:
                self._show(item.described())
            self._more.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the queue, with items still in it."""
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
        self._exchange_headers(item.transfers)
        moves = [
            (send if transfer.kind == "send" else receive)(
                self._gloo, transfer.staged, transfer.peer, transfer.tag
            )
            for transfer in item.transfers
            if transfer.staged.numel()
        ]
        for work in moves:
            work.wait()

    def _exchange_headers(self, ones: Sequence[Transfer]) -> None:
        """Exchange size and dtype of each transfer with its peer; raise on both sides if they
        differ."""
        greetings = []
        for transfer in ones:
            code = [transfer.staged.numel(), transfer.staged.element_size(), transfer.device]
            own_header = torch.tensor([*code, sum(map(ord, transfer.dtype))])
            peer_header = torch.empty_like(own_header)
            first, second = transfer.tag + 1, transfer.tag + (1 << 20) + 1
            out, reply_tag = (first, second) if transfer.kind == "send" else (second, first)
            works = [
                self._gloo.send([own_header], transfer.peer, out),
                self._gloo.recv([peer_header], transfer.peer, reply_tag),
            ]
            greetings.append((transfer, own_header, peer_header, works))
        for transfer, own_header, peer_header, works in greetings:
            for work in works:
                work.wait()
            if peer_header[2] == own_header[2]:
                raise DuplicateDevice(transfer.peer, int(own_header[2]))
            if peer_header[0] != own_header[0] or peer_header[3] != own_header[3]:
                raise Unequal(transfer, int(peer_header[0]), int(peer_header[0] * peer_header[1]))


class Unequal(Exception):
    """Raised for a transfer whose two ends have different sizes or dtypes."""

    def __init__(self, transfer: Transfer, numel: int, size: int) -> None:
        super().__init__(str(transfer), transfer.peer, numel, size)
        self.one, self.peer, self.numel, self.bytes = str(transfer), transfer.peer, numel, size


class DuplicateDevice(Exception):
    """Raised for a peer on the same device."""

    def __init__(self, peer: int, device: int) -> None:
        super().__init__(peer, device)
        self.peer, self.device = peer, device
