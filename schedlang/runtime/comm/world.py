"""The world of this job, its process groups and messages: the layer above torch.distributed.

`current_world()` is the world that this process is in now: backends, timeouts, and groups made so
far. All programs of a process share it: a rebuilt program reuses the groups of the last one. The
runtime communicates only by the functions below; a `group` argument of None means a dry run.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as ProcessGroup

from schedlang.runtime import device as devices
from schedlang.runtime.adapters.torch_distributed import count_groups, name_groups_from
from schedlang.runtime.comm.broadcast_cache import BroadcastCache
from schedlang.runtime.comm.tensor_pickling import extract_tensors, insert_tensors, pickle_value

T = TypeVar("T")
GroupRanks = Sequence[tuple[int, ...]]  # disjoint groups: the global ranks of each

# torch 2.13 renames two collectives, and warns; looked up at each call: a dry run replaces them
_NEW = hasattr(dist, "all_gather_single")
ALL_GATHER = "all_gather_single" if _NEW else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if _NEW else "reduce_scatter_tensor"

HOST_BACKEND = "gloo"  # for tensors on the host; for messages between two ranks, only those
_LENGTH, _SHORT = 8, 4096  # bytes of a length; bytes that are sent with it
_DIGEST = 16  # bytes of a digest
_KINDS = 64  # up to so many different values are broadcast one by one


# -- the world -------------------------------------------------------------------------------------


@dataclass(eq=False)
class World:
    """The ranks of a job as this process sees them, while it has joined the job.

    backends     type of device -> backend; empty in a process without a job
    joined_here  this project has joined the job, so it also chooses the device
    """

    rank: int = 0
    size: int = 1
    backends: Mapping[str, str] = field(default_factory=dict)
    bound_device: torch.device | None = None  # the device that the world was joined with
    joined_here: bool = False
    ranks_in_job: tuple[int, ...] = ()  # the ranks of the job that are this world; empty: all
    parts: dict[tuple[int, ...], World] = field(default_factory=dict)  # parts that were entered
    _made: dict[tuple[GroupRanks, str], ProcessGroup | None] = field(default_factory=dict)
    broadcast_cache: BroadcastCache = field(default_factory=BroadcastCache)

    @property
    def members(self) -> Sequence[int]:
        """The ranks of this world, by their numbers in the job."""
        return self.ranks_in_job or range(self.size)

    @property
    def is_dry_run(self) -> bool:
        """Whether this is a dry run without other ranks: nothing is sent, nothing arrives."""
        return "fake" in self.backends.values()

    @property
    def group(self) -> ProcessGroup | None:
        """The process group of all ranks."""
        if self.ranks_in_job and self.size > 1:
            return self.make_group([tuple(range(self.size))])
        return dist.group.WORLD if self.size > 1 else None

    def device_for(self, source: torch.device | None) -> torch.device:
        """Return the device on which this rank computes a model that is on device `source`.

        This is the model's device, if the world has a backend for it. Of several accelerators it is
        the one that the world was joined with, else LOCAL_RANK's, else the model's (index 0: the
        rank's). So also for a model on the host, without a CPU backend or in a job joined here.
        """
        if devices.accelerator() is None:
            return devices.HOST
        source = devices.HOST if source is None or devices.is_meta(source) else source
        if self.size == 1:
            return devices.with_index(source)
        if devices.on_host(source) and devices.HOST.type in self.backends and not self.joined_here:
            return source
        device = self.bound_device or devices.local_device(source.index or self.rank)
        devices.set_current_device(device)
        return device

    def orders_messages(self, device: torch.device) -> bool:
        """Return whether a group runs messages of two ranks in order, each waiting for its match.

        True for NCCL and similar backends; gloo buffers messages until they are received.
        """
        kind = self.backends.get(device.type, HOST_BACKEND)
        return devices.on_accelerator(device) and kind != HOST_BACKEND

    def sends_by_host(self, device: torch.device) -> bool:
        """Return whether a device's messages must be copied to the host, from where gloo sends."""
        return devices.on_accelerator(device) and self.backends.get(device.type) == HOST_BACKEND

    @cached_property
    def timeout(self) -> timedelta | None:
        """The timeout of the world's group, which all other groups get too; None: torch's default.

        Private: torch has no public access to it.
        """
        for kind in self.backends:
            with suppress(AttributeError, RuntimeError):  # a backend without options
                backend = dist.group.WORLD._get_backend(torch.device(kind))  # type: ignore[union-attr]
                if isinstance(timeout := backend.options._timeout, timedelta):
                    return timeout
        return None

    @property
    def control_group(self) -> ProcessGroup | None:
        """The group of all ranks for host data; all ranks must read this the first time."""
        entered = _by_thread.get()
        return self.host_group([tuple(range(self.size))], entered[1] if entered is not None else "")

    def host_group(self, groups: GroupRanks, purpose: str = "") -> ProcessGroup | None:
        """Return this rank's group of these for host tensors; on `purpose` see `make_group`."""
        if not self.backends or devices.HOST.type in self.backends:
            return self.make_group(groups, purpose)
        key = f"host {purpose}"
        if self.ranks_in_job:
            return self._once(groups, key, lambda: self._own(groups, HOST_BACKEND, key))
        with self._unbound():
            return self._once(groups, key, lambda: self._each(groups, HOST_BACKEND))

    @contextmanager
    def _unbound(self) -> Iterator[None]:
        """Unbind the device within the block: a bound world requires its backend in new groups."""
        world: Any = job_world().group
        if self.bound_device is None:
            yield
            return
        world.bound_device_id = None
        try:
            yield
        finally:
            world.bound_device_id = self.bound_device

    def make_group(self, groups: GroupRanks, purpose: str = "") -> ProcessGroup | None:
        """Return this rank's group of these, or None; all ranks of the world must call this.

        Traffic that must not wait for other traffic of the same ranks gets a `purpose` of its own.
        """
        if self.size == 1:
            return None
        if self.ranks_in_job:
            return self._once(groups, purpose, lambda: self._own(groups, None, purpose))
        if not purpose and [*groups] == [tuple(range(self.size))]:
            return dist.group.WORLD
        make = self._split if self._splits else self._each
        return self._once(groups, purpose, lambda: make(groups))

    def make_message_group(self, groups: GroupRanks, purpose: str = "") -> ProcessGroup | None:
        """Return this rank's group of these for messages whose pairs do not wait for each other.

        In a group that is bound to a device, NCCL runs all messages in order.
        """
        bound = self.bound_device
        if bound is None or self.ranks_in_job or not self.orders_messages(bound):
            return self.make_group(groups, purpose)
        with self._unbound():
            return self._once(groups, f"between {purpose}", lambda: self._each(groups))

    def _once(
        self, groups: GroupRanks, purpose: str, make: Callable[[], ProcessGroup | None]
    ) -> ProcessGroup | None:
        key = (tuple(sorted(groups)), purpose)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _each(self, groups: GroupRanks, backend: str | None = None) -> ProcessGroup | None:
        """Make only this rank's group, and count the others: torch names groups by a count."""
        shared = [ranks for ranks in groups if len(ranks) > 1]
        if self._all_make_each:
            created = [dist.new_group([*a], timeout=self.timeout, backend=backend) for a in shared]
            return next((pg for pg, ranks in zip(created, shared) if self.rank in ranks), None)
        index = next((k for k, ranks in enumerate(shared) if self.rank in ranks), None)
        if index is None:
            skip_groups(shared)
            return None
        skip_groups(shared[:index])
        group: ProcessGroup | None
        group = dist.new_group([*shared[index]], timeout=self.timeout, backend=backend)
        skip_groups(shared[index + 1 :])
        return group

    def _own(self, groups: GroupRanks, backend: str | None, purpose: str) -> ProcessGroup | None:
        """Make only this rank's group, without the ranks outside of this part of the job."""
        own_ranks = next((ranks for ranks in groups if self.rank in ranks), ())
        if len(own_ranks) < 2:
            return None
        ranks = [self.ranks_in_job[rank] for rank in own_ranks]
        key = repr((self.ranks_in_job, sorted(groups), purpose)).encode()
        digest = hashlib.blake2b(key, digest_size=_LENGTH)
        group: ProcessGroup | None
        with self._unbound(), name_groups_from(int.from_bytes(digest.digest(), "little")):
            group = dist.new_group(ranks, timeout=self.timeout, backend=backend)
        return group

    @property
    def _all_make_each(self) -> bool:
        """Whether all ranks must take part in making a group, including ranks that are not in it.

        This is so if torch splits it off a world that is bound to a device, if the world's group
        makes groups itself, and if torch is told to wait for all ranks each time.
        """
        world: Any = self.group
        bound = getattr(world, "bound_device_id", None) is not None or hasattr(world, "new_group")
        return bound or os.environ.get("TORCH_DIST_INIT_BARRIER") == "1"

    def _split(self, groups: GroupRanks) -> ProcessGroup | None:
        """Make all groups at once, in one exchange of the world's group."""
        shared = [list(ranks) for ranks in groups if len(ranks) > 1]
        if not shared:
            return None
        group: ProcessGroup | None = dist.split_group(split_ranks=shared, timeout=self.timeout)
        return group if any(self.rank in ranks for ranks in shared) else None

    @cached_property
    def _splits(self) -> bool:
        """Whether groups can be split off the world's: bound to a device, by one backend."""
        if self.bound_device is None or len(set(self.backends.values())) != 1:
            return False
        backend = self.group._get_backend(self.bound_device)  # type: ignore[union-attr]
        return bool(getattr(backend, "supports_splitting", False))


def skip_groups(groups: GroupRanks) -> None:
    """Count groups that this rank is not in, as if `new_group` had been called for each."""
    count_groups(len(groups))


# by the world's group: it is dropped with its job, and with it all groups made in it
_worlds: weakref.WeakKeyDictionary[ProcessGroup, World] = weakref.WeakKeyDictionary()
# parts of the job that are entered in this process, innermost last
_entered: list[World] = []


@contextmanager
def enter_ranks(ranks: Sequence[int]) -> Iterator[None]:
    """Make some ranks of the job the world within the block, numbered from 0.

    No ranks: the whole job. Only these ranks call this; entered again, it is the same world.
    """
    job, part = job_world(), tuple(ranks)
    if not part or part == tuple(range(job.size)):
        _entered.append(job)
    else:
        if part not in job.parts:
            index = part.index(job.rank)
            inner = World(index, len(part), job.backends, job.bound_device, job.joined_here, part)
            job.parts[part] = inner
        _entered.append(job.parts[part])
    try:
        yield
    finally:
        _entered.pop()


# in a thread of its own: its world, and the purpose of its messages
_by_thread: ContextVar[tuple[World, str] | None] = ContextVar("apart", default=None)


@contextmanager
def enter_thread_groups(world: World, purpose: str) -> Iterator[None]:
    """Send host data in separate groups, inside the block, in this thread only.

    So a background thread can communicate with its peers whatever the main threads send meanwhile.
    The groups are made when all ranks enter it first, in their main threads.
    """
    token = _by_thread.set((world, purpose))
    try:
        yield
    finally:
        _by_thread.reset(token)


def job_rank(rank: int) -> int:
    """Return the number in the job of a rank of this world."""
    return current_world().members[rank] if _entered or _by_thread.get() is not None else rank


def current_world() -> World:
    """Return the world that this process is in: its job, or a part of it; without a job, itself."""
    if (entered := _by_thread.get()) is not None:
        return entered[0]
    return _entered[-1] if _entered else job_world()


def job_world() -> World:
    """Return the world of the whole job; without a job, a world of this process alone."""
    group = dist.group.WORLD
    if group is None:
        return World()
    if (world := _worlds.get(group)) is None:
        backends = (pair.split(":") for pair in dist.get_backend_config().split(",") if ":" in pair)
        bound = getattr(group, "bound_device_id", None)
        names = {kind: name for kind, name in backends}
        world = _worlds[group] = World(dist.get_rank(), dist.get_world_size(), names, bound)
    return world


def forget_world() -> None:
    """Drop the world of the job that ends now, with its groups."""
    _worlds.pop(dist.group.WORLD, None)  # type: ignore[arg-type]


def is_joined() -> bool:
    """Return whether this process is a rank of a job."""
    return dist.is_initialized()


def rank() -> int:
    """Return this process's rank in its job; 0 without a job."""
    return current_world().rank if dist.is_initialized() else 0


def size() -> int:
    """Return the number of ranks of the job; 1 without a job."""
    return current_world().size if dist.is_initialized() else 1


def barrier() -> None:
    """Wait for all ranks of the job."""
    if dist.is_initialized():
        dist.barrier(current_world().control_group)


# -- tensors ---------------------------------------------------------------------------------------


def all_reduce(
    x: Tensor, group: ProcessGroup | None, *, largest: bool = False, wait: bool = True
) -> Any:
    """Sum in place over a group, or take the maximum; without `wait`, return the work."""
    if group is None:
        return None
    if largest:
        return dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group, async_op=not wait)
    return dist.all_reduce(x, group=group, async_op=not wait)


def all_to_all_single(
    out: Tensor, x: Tensor, received: list[int], sent: list[int], group: ProcessGroup | None
) -> Any:
    """Start an all-to-all of rows; return the work. The caller keeps `x` alive until it is done."""
    return dist.all_to_all_single(out, x, received, sent, group=group, async_op=True)


@dataclass
class _ByHost:
    """A message of a device tensor that is sent through host memory."""

    work: Any
    host: Tensor
    into: Tensor | None = None

    def wait(self) -> None:
        """Wait for the message; copy a received tensor to its device."""
        self.work.wait()
        if self.into is not None:
            self.into.copy_(self.host)

    def is_completed(self) -> bool:
        """Return whether the message has arrived on the host."""
        return bool(self.work.is_completed())


def isend(x: Tensor, target: int, group: ProcessGroup | None) -> Any:
    """Start to send to a global rank; the caller keeps the tensor alive until the work is done."""
    if not x.is_cpu and devices.on_accelerator(x) and current_world().sends_by_host(x.device):
        host = x.detach().cpu()
        return _ByHost(dist.isend(host, job_rank(target), group), host)
    return dist.isend(x, job_rank(target), group)


def irecv(target: Tensor, source: int, group: ProcessGroup | None) -> Any:
    """Start to receive from a global rank."""
    on_device = not target.is_cpu and devices.on_accelerator(target)
    if on_device and current_world().sends_by_host(target.device):
        host = torch.empty_like(target, device=devices.HOST)
        return _ByHost(dist.irecv(host, job_rank(source), group), host, target)
    work = dist.irecv(target, job_rank(source), group)
    assert work is not None, "this rank is not in the group of its messages"
    return work


def send_recv(tensor: Tensor, source: int, target: int, group: ProcessGroup | None) -> None:
    """Send a tensor from one global rank to another; both wait, others do nothing."""
    if rank() == source:
        dist.send(tensor, job_rank(target), group)
    elif rank() == target:
        dist.recv(tensor, job_rank(source), group)


def batch_isend_irecv(
    sent: Sequence[tuple[Tensor, int]],
    received: Sequence[tuple[Tensor, int]],
    group: ProcessGroup | None,
) -> tuple[Any, ...]:
    """Send tensors to global ranks and receive into others; return the works to wait for.

    Where messages of two ranks run in order, all of them are started as one batch.
    """
    tensors = [tensor for tensor, _ in (*sent, *received)]
    if tensors and current_world().orders_messages(tensors[0].device):
        ops = [dist.P2POp(dist.isend, x, job_rank(target), group) for x, target in sent]
        ops += [dist.P2POp(dist.irecv, x, job_rank(source), group) for x, source in received]
        return tuple(dist.batch_isend_irecv(ops))
    works = [isend(x, target, group) for x, target in sent]
    return (*works, *(irecv(x, source, group) for x, source in received))


# -- host data -------------------------------------------------------------------------------------


def all_gather_object(value: T, group: ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, on all ranks of a group, or of the job.

    Accelerator tensors are sent through the host, to the device of the receiving rank.
    """
    world = current_world()
    if world.size == 1:
        return [value]
    group = world.control_group if group is None else group
    with torch._C.DisableTorchFunction():  # pickling must not run under function modes
        data = pickle_value(value)
        if _serves_host(group):
            gathered = _exchange_bytes(data, group)
        else:
            gathered = [b""] * dist.get_world_size(group)
            dist.all_gather_object(gathered, data, group=group)
        return [pickle.loads(data_bytes) for data_bytes in gathered]


def distinct_objects(value: T) -> list[T]:
    """Return the distinct values of all ranks of the job, in the order of their first ranks."""
    return [value_of_ranks for value_of_ranks, _ in ranks_by_object(value)]


def ranks_by_object(value: T) -> list[tuple[T, tuple[int, ...]]]:
    """Return the distinct values of all ranks of the job, each with its ranks.

    Ranks exchange digests; then the first rank of each kind broadcasts its value, unless cached. So
    a job of many ranks with few kinds of values sends only one value for each kind.
    """
    world = current_world()
    if world.size == 1:
        return [(value, (0,))]
    group = world.control_group
    assert group is not None
    with torch._C.DisableTorchFunction():
        data = pickle_value(value)
        key = hashlib.blake2b(data, digest_size=_DIGEST).digest()
        rows = _gather_rows(key + len(data).to_bytes(_LENGTH, "little"), _DIGEST + _LENGTH, group)
        by_row: dict[bytes, list[int]] = {row: [] for row in rows}
        for source, row in enumerate(rows):
            by_row[row] += (source,)  # no call for each of many ranks
        if len(by_row) > _KINDS:  # many broadcasts would take longer than one large all-gather
            gathered = all_gather_object(value)
            return [(gathered[ranks[0]], tuple(ranks)) for ranks in by_row.values()]
        values = []
        for row, ranks in by_row.items():
            size = int.from_bytes(row[_DIGEST:], "little")
            buffer = data if row == rows[world.rank] else bytes(size)
            sender = job_rank(ranks[0]) if len(by_row) > 1 else None
            received = world.broadcast_cache.broadcast(group, row, buffer, sender)
            values.append((pickle.loads(received), tuple(ranks)))
        return values


def any_rank(local_flag: bool) -> bool:
    """Return whether a flag is set on any rank of the job."""
    world = current_world()
    if world.size == 1:
        return local_flag
    with torch._C.DisableTorchFunction():
        flag = torch.tensor([local_flag], dtype=torch.uint8)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=world.control_group)
        return bool(flag)


def gather_object(value: T) -> list[T]:
    """Return every rank's value on the first rank of the job; an empty list on others."""
    world = current_world()
    if world.size == 1 or world.is_dry_run:
        return [value]
    group = world.control_group
    with torch._C.DisableTorchFunction():
        data = pickle_value(value)
        rows = _gather_rows(len(data).to_bytes(_LENGTH, "little"), _LENGTH, group)
        sizes = [int.from_bytes(row, "little") for row in rows]
        padded = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        if world.rank:
            dist.gather(padded, None, job_rank(0), group)
            return []
        buffers = [torch.empty_like(padded) for _ in sizes]
        dist.gather(padded, buffers, job_rank(0), group)
        return [pickle.loads(buffer[:n].numpy().tobytes()) for buffer, n in zip(buffers, sizes)]


def broadcast_object(source: int, value: T) -> T:
    """Return the value of one rank, on all ranks of the job."""
    world = current_world()
    if world.size == 1 or world.is_dry_run:
        return value
    with torch._C.DisableTorchFunction():
        sent: list[Any] = [pickle_value(value) if rank() == source else None]
        dist.broadcast_object_list(sent, src=job_rank(source), group=world.control_group)
        received: T = value if rank() == source else pickle.loads(sent[0])
    return received


def all_gather_tensors(value: T, group: ProcessGroup, device: torch.device) -> list[T]:
    """Gather like `all_gather_object`, but tensors from their device, in one message."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        data, flat = extract_tensors(value, device)
        gathered = all_gather_object((data, flat.numel()), group)
        longest = max(size for _, size in gathered)
        gathered_flat = flat.new_empty(len(gathered) * longest)
        if longest:
            padded = torch.nn.functional.pad(flat, (0, longest - flat.numel()))
            getattr(dist, ALL_GATHER)(gathered_flat, padded, group=group)
        rows = gathered_flat.view(len(gathered), longest)
        return [insert_tensors(data, row) for (data, _), row in zip(gathered, rows)]


def broadcast_tensors(source: int, value: T, device: torch.device) -> T:
    """Broadcast like `broadcast_object`, but tensors as in `all_gather_tensors`."""
    world = current_world()
    if world.size == 1:
        return value
    with torch._C.DisableTorchFunction(), torch.no_grad():
        data, flat = extract_tensors(value if rank() == source else None, device)
        data, size = broadcast_object(source, (data, flat.numel()))
        flat = flat if rank() == source else flat.new_empty(size)
        if size:
            dist.broadcast(flat, src=job_rank(source), group=world.group)
        return value if rank() == source else insert_tensors(data, flat)


def _serves_host(group: ProcessGroup | None) -> bool:
    """Return whether a group has a backend for host tensors."""
    backends = dist.get_backend_config(group).split(",")
    return any(backend.startswith(f"{devices.HOST.type}:") for backend in backends)


def _exchange_bytes(data: bytes, group: ProcessGroup | None) -> list[bytes]:
    """Return every rank's bytes; short ones are sent in one message with their length.

    torch always gathers the lengths first, but most objects are short.
    """
    begin = len(data).to_bytes(_LENGTH, "little") + data[:_SHORT]
    rows = _gather_rows(begin, _LENGTH + _SHORT, group)
    lengths = [int.from_bytes(row[:_LENGTH], "little") for row in rows]
    if max(lengths) <= _SHORT:
        return [row[_LENGTH : _LENGTH + length] for row, length in zip(rows, lengths)]
    return [row[:length] for row, length in zip(_gather_rows(data, max(lengths), group), lengths)]


def _gather_rows(data: bytes, size: int, group: ProcessGroup | None) -> list[bytes]:
    """Return the bytes of every rank, padded with zeros to a size that is equal on all ranks."""
    row = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    count = dist.get_world_size(group)
    all_rows = row.repeat(count)  # in a dry run all rows are this rank's
    getattr(dist, ALL_GATHER)(all_rows, row, group=group)
    gathered = all_rows.numpy().tobytes()
    return [gathered[size * index : size * (index + 1)] for index in range(count)]


def all_gather_numbers(row: Sequence[float], group: ProcessGroup) -> list[list[float]]:
    """Gather a row of numbers from every rank of a group for host tensors."""
    local_row = torch.tensor([[*row]], dtype=torch.float64)
    gathered = local_row.new_empty(dist.get_world_size(group), len(row))
    getattr(dist, ALL_GATHER)(gathered, local_row, group=group)
    rows: list[list[float]] = gathered.tolist()
    return rows
