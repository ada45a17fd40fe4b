"""simccl: a collective library for the simulated device with the rules of NCCL.

Accepts only contiguous tensors of the device, on one device, which no other rank has. Operations
run on a stream of the group (or on the current one, if the caller waits at once), in order; a
stream sees a result only after it is ordered after the operation. The data goes over gloo, through
copies on the host.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from schedlang.testing.accelerator import transfers
from schedlang.testing.accelerator.group import (
    BACKEND,
    Group,
    State,
    Together,
    Work,
    communicators,
    publish,
)
from schedlang.testing.accelerator.transfers import Item, Started, Tensors, Transfer


def register(core: Any) -> None:
    """Register the backend with torch.distributed."""
    State.core = core
    core.set_publisher(publish)
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make_backend, extended_api=True, devices=["sim"])


def _make_backend(options: Any, backend_options: Any) -> Any:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    communicator = Communicator(
        options.store, options.group_rank, ranks, options.timeout, str(options.group_id)
    )
    return State.core.SimBackend(options.group_rank, options.group_size, communicator)


def alive() -> int:
    """Return the number of communicators of this process that were not shut down."""
    return sum(not communicator.closed for communicator in communicators)


class Communicator(Group):
    """A group of ranks, called by c10d through works.cpp: collectives, transfers, splits."""

    # ---- collectives --------------------------------------------------------------------------

    def _collective(
        self,
        name: str,
        ins: Tensors,
        outs: Tensors,
        asynchronous: bool,
        signature: Any,
        begin: Callable[..., Started],
        *args: Any,
    ) -> Work:
        """Launch `begin` on staged tensors; ranks must agree on `signature`."""
        batched = self._batch is not None
        work = Work(self, name, ins, outs, asynchronous or batched, signature)
        work.start(lambda: begin(self.gloo, work.staged_in, work.staged_out, *args))
        if self._batch is not None:
            self._batch.append(work)
        return work

    def all_reduce(self, tensors: Tensors, op: Any, asynchronous: bool) -> Work:
        """All-reduce (a sum, or another reduction) in place."""
        call = "all_reduce", tensors, tensors, asynchronous, _describe_tensors(tensors, op)
        return self._collective(*call, transfers.reduced, op)

    def reduce(self, tensors: Tensors, root: int, op: Any, asynchronous: bool) -> Work:
        """Reduce to one rank; the other ranks keep their tensors."""
        call = "reduce", tensors, tensors, asynchronous, [*_describe_tensors(tensors, op), root]
        return self._collective(*call, transfers.reduced_at, op, root)

    def broadcast(self, tensors: Tensors, root: int, asynchronous: bool) -> Work:
        """Broadcast the tensors of one rank."""
        call = "broadcast", tensors, tensors, asynchronous, [*_describe_tensors(tensors), root]
        return self._collective(*call, transfers.broadcast, root)

    def all_gather(self, outs: Sequence[Tensors], ins: Tensors, asynchronous: bool) -> Work:
        """All-gather one tensor of each rank, into a list."""
        call = "all_gather", ins, outs[0], asynchronous, _describe_tensors(outs[0])
        return self._collective(*call, transfers.gathered)

    def all_gather_into_tensor(self, outs: Tensors, ins: Tensors, asynchronous: bool) -> Work:
        """All-gather one tensor of each rank, into one tensor; the input may be a part of the
        output."""
        for x, y in zip(ins, outs):
            if y.numel() != x.numel() * self.size or x.dtype != y.dtype:
                raise ValueError(
                    f"{BACKEND} all_gather_into_tensor: {_describe_tensors([x, y])} do not fit"
                )
        call = "all_gather_into_tensor", ins, outs, asynchronous, _describe_tensors(ins)
        return self._collective(*call, transfers.gathered_into)

    def reduce_scatter(
        self, outs: Tensors, ins: Sequence[Tensors], op: Any, asynchronous: bool
    ) -> Work:
        """Reduce-scatter from a list."""
        call = "reduce_scatter", ins[0], outs, asynchronous, _describe_tensors(ins[0], op)
        return self._collective(*call, transfers.reduce_scattered_list, op)

    def reduce_scatter_tensor(
        self, outs: Tensors, ins: Tensors, op: Any, asynchronous: bool
    ) -> Work:
        """Reduce-scatter from one tensor."""
        for x, y in zip(ins, outs):
            if x.numel() != y.numel() * self.size or x.dtype != y.dtype:
                raise ValueError(
                    f"{BACKEND} reduce_scatter_tensor: {_describe_tensors([x, y])} do not fit"
                )
        call = "reduce_scatter_tensor", ins, outs, asynchronous, _describe_tensors(ins, op)
        return self._collective(*call, transfers.reduce_scattered, op)

    def all_to_all_single(
        self,
        out: Tensor,
        tensor: Tensor,
        outs: Sequence[int],
        ins: Sequence[int],
        asynchronous: bool,
    ) -> Work:
        """All-to-all of parts of one tensor; parts are counted in rows."""
        bytes_ = _part_bytes(tensor, ins, self.size), _part_bytes(out, outs, self.size)
        call = "all_to_all_single", [tensor], [out], asynchronous, str(tensor.dtype)
        return self._collective(*call, transfers.exchanged, *bytes_)

    def all_to_all(self, outs: Tensors, ins: Tensors, asynchronous: bool) -> Work:
        """All-to-all of lists."""
        call = "all_to_all", ins, outs, asynchronous, str(ins[0].dtype)
        return self._collective(*call, transfers.exchanged_list)

    def gather(self, outs: Sequence[Tensors], ins: Tensors, root: int, asynchronous: bool) -> Work:
        """Gather one tensor of each rank at one rank."""
        flat = list(outs[0]) if outs else []
        call = "gather", ins, flat, asynchronous, [str(ins[0].dtype), root]
        return self._collective(*call, transfers.gathered_at, root)

    def scatter(self, outs: Tensors, ins: Sequence[Tensors], root: int, asynchronous: bool) -> Work:
        """Scatter one tensor to each rank from one rank."""
        flat = list(ins[0]) if ins else []
        call = "scatter", flat, outs, asynchronous, [str(outs[0].dtype), root]
        return self._collective(*call, transfers.scattered, root)

    def barrier(self, device: int, asynchronous: bool) -> Work:
        """Wait for all ranks; the host waits for its stream, too."""
        index = State.core.get_device() if device < 0 else device
        with torch._C.DisableTorchFunction():
            token = [torch.ones(1, device=torch.device("sim", index))]
        call = "barrier", token, token, asynchronous, None
        work = self._collective(*call, transfers.reduced, dist.ReduceOp.SUM)
        work.host_waits = True
        return work

    # ---- point to point -------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work | Together:
        """Send to a rank of the group; tags are ignored, only the order counts."""
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
        work, transfer = self._staged(kind, tensors, peer, key)
        work.transfer, work.item = transfer, Item([transfer])
        item = work.item
        if key == self.size:
            item.after = list(self.latest)
        self._queue(key).put(item)
        return work

    def _staged(
        self, kind: str, tensors: Sequence[Tensor], peer: int, key: int
    ) -> tuple[Work, Transfer]:
        ins, outs = (tensors, []) if kind == "send" else ([], tensors)
        work = Work(self, kind, ins, outs, asynchronous=True, queue=key)
        staged = (work.staged_in or work.staged_out)[0]
        number = self._sent.get((key, kind, peer), 0) + 1
        self._sent[key, kind, peer] = number
        base = 0 if key == self.size else 1 << 21
        return work, Transfer(kind, staged, work.device, peer, number, base, self.ranks[peer])

    def start_coalescing(self) -> None:
        """Begin a batch of operations that is launched as one."""
        self._batch = []

    def end_coalescing(self) -> Together:
        """Launch the batch: its sends and receives run concurrently."""
        batch, self._batch = self._batch or [], None
        works = [entry for entry in batch if isinstance(entry, Work)]
        moves = [entry for entry in batch if not isinstance(entry, Work)]
        staged = [self._staged(kind, tensors, peer, self.size) for kind, tensors, peer in moves]
        if staged:
            item = Item([entry for _, entry in staged])
            item.after = list(self.latest)
            for work, entry in staged:
                work.transfer, work.item = entry, item
                works.append(work)
            self.whole.put(item)
        device = works[0].device if works else State.core.get_device()
        return Together(works, device, self.stream(device))

    # ---- groups ---------------------------------------------------------------------------------

    def split(self, store: Any, ranks: Sequence[int], timeout: Any) -> Communicator | None:
        """Return a communicator of some of these ranks; None on the other ranks."""
        if self.rank not in ranks:
            return None
        inside = [self.ranks[r] for r in ranks]
        timeout = datetime.timedelta(milliseconds=timeout)
        prefix = PrefixStore(f"split{'-'.join(map(str, inside))}", store)
        communicator = Communicator(
            prefix, list(ranks).index(self.rank), inside, timeout, f"{self.name}/split"
        )
        communicator.eager = self.eager
        return communicator

    def shutdown(self) -> None:
        """Close the communicator: nothing may be launched any more."""
        self.closed = True
        for queue in self._queues.values():
            queue.close()


def _describe_tensors(tensors: Sequence[Tensor], op: Any = None) -> list[Any]:
    shapes = [f"{str(t.dtype).removeprefix('torch.')}[{t.numel()}]" for t in tensors[:12]]
    if op is None:
        return [len(tensors), shapes]
    return [len(tensors), shapes, getattr(getattr(op, "op", op), "name", str(op))]


def _part_bytes(t: Tensor, rows: Sequence[int], size: int) -> list[int]:
    """Return the bytes of each part; equal parts without numbers of rows."""
    if not rows:
        if t.shape[0] % size:
            raise ValueError(f"{BACKEND} all_to_all_single: {t.shape[0]} rows for {size} ranks")
        return [t.nbytes // size] * size
    row = t.element_size() * (t[0].numel() if t.shape[0] else 0)
    return [n * row for n in rows]
