"""This job's world, its groups and messages: the one layer that asks torch.distributed.

`here()` is the world that this process is in now: which backend serves which device, how long it
waits, and the groups made in it so far.  All programs of a process share these: one that is built
again takes the groups of the last.  The functions below are all that the rest of the runtime sends
with; group arguments are process groups, of which None means a dry run.
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
from schedlang.runtime.adapters.torch_distributed import count_groups, counted_from
from schedlang.runtime.comm.broadcast_cache import BroadcastCache
from schedlang.runtime.comm.packing import packed, put_back, taken_out

T = TypeVar("T")
Groups = Sequence[tuple[int, ...]]  # disjoint ones: the global ranks of each

# torch 2.13 has new names for two collectives, and warns of the old ones; looked up at each call,
# for a step that is played without other ranks has its own
_NEW = hasattr(dist, "all_gather_single")
GATHER = "all_gather_single" if _NEW else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if _NEW else "reduce_scatter_tensor"

HOSTS = "gloo"  # carries tensors of the host, point to point those alone
_LENGTH, _SHORT = 8, 4096  # bytes of a length; bytes that go with it
_DIGEST = 16  # bytes by which values are known
_KINDS = 64  # so many different values are sent one by one


# -- the world -------------------------------------------------------------------------------------


@dataclass(eq=False)
class World:
    """The ranks of a job as this process sees them, for as long as they are joined.

    backends  by type of device, what serves it; none in a process that is alone
    ours      this project has joined it, so that it also chooses the device
    """

    rank: int = 0
    size: int = 1
    backends: Mapping[str, str] = field(default_factory=dict)
    bound: torch.device | None = None  # the device that the world was joined with
    ours: bool = False
    part: tuple[int, ...] = ()  # of a job: its ranks that are this world; none: all
    parts: dict[tuple[int, ...], World] = field(default_factory=dict)  # those that were entered
    _made: dict[tuple[Groups, str], ProcessGroup | None] = field(default_factory=dict)
    sent: BroadcastCache = field(default_factory=BroadcastCache)

    @property
    def members(self) -> Sequence[int]:
        """The ranks of this world, by their numbers in the job."""
        return self.part or range(self.size)

    @property
    def played(self) -> bool:
        """Whether no other rank is there: what is sent goes nowhere, and nobody answers."""
        return "fake" in self.backends.values()

    @property
    def group(self) -> ProcessGroup | None:
        """The group of all ranks."""
        if self.part and self.size > 1:
            return self.made([tuple(range(self.size))])
        return dist.group.WORLD if self.size > 1 else None

    def device_for(self, lies: torch.device | None) -> torch.device:
        """The device on which this rank computes a model that lies there.

        The model's own, if the world serves it.  Of several accelerators the one that the world was
        joined with, else that of LOCAL_RANK, else the model's (of the first: the rank's); so it is
        also for one in host memory, if the world serves no CPU or torchrun's job was joined here.
        """
        if devices.accelerator() is None:
            return devices.HOST
        lies = devices.HOST if lies is None or devices.not_there(lies) else lies
        if self.size == 1:
            return devices.indexed(lies)
        if devices.on_host(lies) and devices.HOST.type in self.backends and not self.ours:
            return lies
        home = self.bound if self.bound is not None else devices.own_device(lies.index or self.rank)
        devices.make_current(home)
        return home

    def queues(self, device: torch.device) -> bool:
        """Return whether messages of two ranks in one group run one after the other, each until it
        is met.

        So it is with NCCL and its kin; gloo keeps what arrives apart until it is asked for.
        """
        kind = self.backends.get(device.type, HOSTS)
        return devices.on_accelerator(device) and kind != HOSTS

    def by_host(self, device: torch.device) -> bool:
        """Return whether messages of a device have to be copied to the host: gloo sends from
        there."""
        return devices.on_accelerator(device) and self.backends.get(device.type) == HOSTS

    @cached_property
    def timeout(self) -> timedelta | None:
        """The timeout of the world's group, which every other group gets too; None: torch's own.

        Private: torch tells it nowhere else.
        """
        for kind in self.backends:
            with suppress(AttributeError, RuntimeError):  # a backend without options
                backend = dist.group.WORLD._get_backend(torch.device(kind))  # type: ignore[union-attr]
                if isinstance(found := backend.options._timeout, timedelta):
                    return found
        return None

    @property
    def control(self) -> ProcessGroup | None:
        """All ranks, for facts of the host; the first time it is asked for by all of them."""
        found = _apart.get()
        return self.on_host([tuple(range(self.size))], found[1] if found is not None else "")

    def on_host(self, groups: Groups, purpose: str = "") -> ProcessGroup | None:
        """This rank's of these groups, for tensors of the host; for a `purpose`, as of `made`."""
        if not self.backends or devices.HOST.type in self.backends:
            return self.made(groups, purpose)
        named = f"host {purpose}"
        if self.part:
            return self._once(groups, named, lambda: self._own(groups, HOSTS, named))
        with self._unbound():
            return self._once(groups, named, lambda: self._each(groups, HOSTS))

    @contextmanager
    def _unbound(self) -> Iterator[None]:
        """A bound world asks each new group for the backend of its device, which hosts have not."""
        world: Any = job().group
        if self.bound is None:
            yield
            return
        world.bound_device_id = None
        try:
            yield
        finally:
            world.bound_device_id = self.bound

    def made(self, groups: Groups, purpose: str = "") -> ProcessGroup | None:
        """This rank's of these groups, None if it is in none; all ranks of the world ask for them.

        Traffic that must not wait for other traffic of the same ranks has a `purpose` of its own.
        """
        if self.size == 1:
            return None
        if self.part:
            return self._once(groups, purpose, lambda: self._own(groups, None, purpose))
        if not purpose and [*groups] == [tuple(range(self.size))]:
            return dist.group.WORLD
        how = self._split if self._splits else self._each
        return self._once(groups, purpose, lambda: how(groups))

    def between(self, groups: Groups, purpose: str = "") -> ProcessGroup | None:
        """This rank's of these groups, for messages of two ranks: no pair's wait for another's.

        In a group that is bound to a device NCCL runs all there is, one after the other.
        """
        if self.bound is None or self.part or not self.queues(self.bound):
            return self.made(groups, purpose)
        with self._unbound():
            return self._once(groups, f"between {purpose}", lambda: self._each(groups))

    def _once(
        self, groups: Groups, purpose: str, make: Callable[[], ProcessGroup | None]
    ) -> ProcessGroup | None:
        key = (tuple(sorted(groups)), purpose)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _each(self, groups: Groups, backend: str | None = None) -> ProcessGroup | None:
        """Only this rank's own: the others' are counted, by which torch names groups."""
        several = [ranks for ranks in groups if len(ranks) > 1]
        if self._all_make_each:
            made = [dist.new_group([*a], timeout=self.timeout, backend=backend) for a in several]
            return next((one for one, ranks in zip(made, several) if self.rank in ranks), None)
        mine = next((place for place, ranks in enumerate(several) if self.rank in ranks), None)
        if mine is None:
            pass_over(several)
            return None
        pass_over(several[:mine])
        found: ProcessGroup | None
        found = dist.new_group([*several[mine]], timeout=self.timeout, backend=backend)
        pass_over(several[mine + 1 :])
        return found

    def _own(self, groups: Groups, backend: str | None, purpose: str) -> ProcessGroup | None:
        """Only this rank's own, of which ranks beyond this part of the job are told nothing."""
        mine = next((ranks for ranks in groups if self.rank in ranks), ())
        if len(mine) < 2:
            return None
        ranks = [self.part[rank] for rank in mine]
        told = hashlib.blake2b(
            repr((self.part, sorted(groups), purpose)).encode(), digest_size=_LENGTH
        )
        made: ProcessGroup | None
        with self._unbound(), counted_from(int.from_bytes(told.digest(), "little")):
            made = dist.new_group(ranks, timeout=self.timeout, backend=backend)
        return made

    @property
    def _all_make_each(self) -> bool:
        """Whether all ranks take part in making a group, those too that are not in it.

        So it is where torch splits it off the world's, which is bound to a device, where a world of
        somebody's own makes its groups, and where torch is told to wait for all ranks each time.
        """
        world: Any = self.group
        own = getattr(world, "bound_device_id", None) is not None or hasattr(world, "new_group")
        return own or os.environ.get("TORCH_DIST_INIT_BARRIER") == "1"

    def _split(self, groups: Groups) -> ProcessGroup | None:
        """All at once, in one exchange of the world's group."""
        several = [list(ranks) for ranks in groups if len(ranks) > 1]
        if not several:
            return None
        made: ProcessGroup | None = dist.split_group(split_ranks=several, timeout=self.timeout)
        return made if any(self.rank in ranks for ranks in several) else None

    @cached_property
    def _splits(self) -> bool:
        """Whether groups can be split off the world's: with a device, by one backend that can."""
        if self.bound is None or len(set(self.backends.values())) != 1:
            return False
        backend = self.group._get_backend(self.bound)  # type: ignore[union-attr]
        return bool(getattr(backend, "supports_splitting", False))


def pass_over(groups: Groups) -> None:
    """Count groups that this rank is not in, as if it had been asked to make each of them."""
    count_groups(len(groups))


# by the world's group: that of a job that is left goes, and with it all groups that were made in it
_worlds: weakref.WeakKeyDictionary[ProcessGroup, World] = weakref.WeakKeyDictionary()


# where a part of the job is at work: that part, by the ranks that are in it
_within: list[World] = []


@contextmanager
def within(ranks: Sequence[int]) -> Iterator[None]:
    """Make some ranks of the job the world, inside the block: they count from 0, await no others.

    No ranks: the whole job.  Only these ranks call this; entered again, it is the same world.
    """
    whole, part = job(), tuple(ranks)
    if not part or part == tuple(range(whole.size)):
        _within.append(whole)
    else:
        if part not in whole.parts:
            at = part.index(whole.rank)
            made = World(at, len(part), whole.backends, whole.bound, whole.ours, part)
            whole.parts[part] = made
        _within.append(whole.parts[part])
    try:
        yield
    finally:
        _within.pop()


# where a thread of its own is at work: its world, and what its messages are for
_apart: ContextVar[tuple[World, str] | None] = ContextVar("apart", default=None)


@contextmanager
def apart(world: World, purpose: str) -> Iterator[None]:
    """Send facts of the host in groups of their own, inside the block and in this thread alone.

    So a thread beside the main one speaks with its like on other ranks, whatever these send
    meanwhile.  The groups are made where all ranks enter it first, in their main threads.
    """
    token = _apart.set((world, purpose))
    try:
        yield
    finally:
        _apart.reset(token)


def number(rank: int) -> int:
    """The number in the job of a rank of this world."""
    return here().members[rank] if _within or _apart.get() is not None else rank


def here() -> World:
    """The world that this process is in: its job, or a part of it; without one, itself."""
    if (found := _apart.get()) is not None:
        return found[0]
    return _within[-1] if _within else job()


def job() -> World:
    """The whole job; without one, a world of this process alone."""
    group = dist.group.WORLD
    if group is None:
        return World()
    if (found := _worlds.get(group)) is None:
        told = (one.split(":") for one in dist.get_backend_config().split(",") if ":" in one)
        bound = getattr(group, "bound_device_id", None)
        found = _worlds[group] = World(
            dist.get_rank(), dist.get_world_size(), {kind: name for kind, name in told}, bound
        )
    return found


def forget() -> None:
    """Let go of the world of the job that ends now, with its groups."""
    _worlds.pop(dist.group.WORLD, None)  # type: ignore[arg-type]


def joined() -> bool:
    """Return whether this process is a rank of a job."""
    return dist.is_initialized()


def rank() -> int:
    """Return this process's rank in its job; 0 without a job."""
    return here().rank if dist.is_initialized() else 0


def size() -> int:
    """Return the number of ranks of the job; 1 without a job."""
    return here().size if dist.is_initialized() else 1


def barrier() -> None:
    """Wait for all ranks of the job."""
    if dist.is_initialized():
        dist.barrier(here().control)


# -- tensors ---------------------------------------------------------------------------------------


def all_reduce(
    x: Tensor, group: ProcessGroup | None, *, largest: bool = False, wait: bool = True
) -> Any:
    """Replace by the sum over a group, or by the largest; without `wait` the work to wait for."""
    if group is None:
        return None
    if largest:
        return dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group, async_op=not wait)
    return dist.all_reduce(x, group=group, async_op=not wait)


def all_to_all_single(
    out: Tensor, x: Tensor, take: list[int], give: list[int], group: ProcessGroup | None
) -> Any:
    """Start an all-to-all of rows: the work to wait for; `x` is kept until then by who asks."""
    return dist.all_to_all_single(out, x, take, give, group=group, async_op=True)


@dataclass
class _ByHost:
    """A message of a device that goes through host memory, until it is waited for."""

    work: Any
    host: Tensor
    into: Tensor | None = None

    def wait(self) -> None:
        """Wait until the tensor is on the host, and copy it to where it was wanted."""
        self.work.wait()
        if self.into is not None:
            self.into.copy_(self.host)

    def is_completed(self) -> bool:
        """Return whether it has come to the host."""
        return bool(self.work.is_completed())


def isend(x: Tensor, to: int, group: ProcessGroup | None) -> Any:
    """Start to send to a global rank; the tensor is kept until the work is done by who asks."""
    if not x.is_cpu and devices.on_accelerator(x) and here().by_host(x.device):
        host = x.detach().cpu()
        return _ByHost(dist.isend(host, number(to), group), host)
    return dist.isend(x, number(to), group)


def irecv(into: Tensor, source: int, group: ProcessGroup | None) -> Any:
    """Start to receive from a global rank."""
    if not into.is_cpu and devices.on_accelerator(into) and here().by_host(into.device):
        host = torch.empty_like(into, device=devices.HOST)
        return _ByHost(dist.irecv(host, number(source), group), host, into)
    work = dist.irecv(into, number(source), group)
    assert work is not None, "this rank is not in the group of its messages"
    return work


def send_recv(word: Tensor, source: int, target: int, group: ProcessGroup | None) -> None:
    """Send a word from one global rank to another, which both wait for; others do nothing."""
    if rank() == source:
        dist.send(word, number(target), group)
    elif rank() == target:
        dist.recv(word, number(source), group)


def batch_isend_irecv(
    sent: Sequence[tuple[Tensor, int]],
    wanted: Sequence[tuple[Tensor, int]],
    group: ProcessGroup | None,
) -> tuple[Any, ...]:
    """Send tensors to global ranks and receive into others: the works to wait for.

    Where messages of two ranks wait for each other, all of them begin at once.
    """
    given = [tensor for tensor, _ in (*sent, *wanted)]
    if given and here().queues(given[0].device):
        ops = [dist.P2POp(dist.isend, x, number(to), group) for x, to in sent]
        ops += [dist.P2POp(dist.irecv, x, number(source), group) for x, source in wanted]
        return tuple(dist.batch_isend_irecv(ops))
    works = [isend(x, to, group) for x, to in sent]
    return (*works, *(irecv(x, source, group) for x, source in wanted))


# -- facts of the host -----------------------------------------------------------------------------


def all_gather_object(value: T, group: ProcessGroup | None = None) -> list[T]:
    """Every rank's value, on all ranks of a group, or of the job.

    Tensors of accelerators travel through the host, and come to the device of who receives them.
    """
    world = here()
    if world.size == 1:
        return [value]
    group = world.control if group is None else group
    with torch._C.DisableTorchFunction():  # pickled bytes are no part of any arithmetic
        data = packed(value)
        if _serves_host(group):
            found = _exchanged(data, group)
        else:
            found = [b""] * dist.get_world_size(group)
            dist.all_gather_object(found, data, group=group)
        return [pickle.loads(one) for one in found]


def distinct_objects(value: T) -> list[T]:
    """The values of all ranks of the job, each once, in the order of the first that has it."""
    return [told for told, _ in ranks_by_object(value)]


def ranks_by_object(value: T) -> list[tuple[T, tuple[int, ...]]]:
    """The different values of all ranks of the job, and whose they are.

    Ranks tell each other a digest; then the first of those that are alike tells the value, if new.
    So a world of many ranks with few kinds of them sends as many values as there are kinds.
    """
    world = here()
    if world.size == 1:
        return [(value, (0,))]
    group = world.control
    assert group is not None
    with torch._C.DisableTorchFunction():
        data = packed(value)
        mine = hashlib.blake2b(data, digest_size=_DIGEST).digest()
        rows = _rows(mine + len(data).to_bytes(_LENGTH, "little"), _DIGEST + _LENGTH, group)
        first: dict[bytes, list[int]] = {row: [] for row in rows}
        for source, row in enumerate(rows):
            first[row] += (source,)  # no call for each of many ranks
        if len(first) > _KINDS:  # as many messages would take longer than one that is longer
            everyone = all_gather_object(value)
            return [(everyone[ranks[0]], tuple(ranks)) for ranks in first.values()]
        found = []
        for row, ranks in first.items():
            size = int.from_bytes(row[_DIGEST:], "little")
            held = data if row == rows[world.rank] else bytes(size)
            told = world.sent.once(group, row, held, number(ranks[0]) if len(first) > 1 else None)
            found.append((pickle.loads(told), tuple(ranks)))
        return found


def any_rank(here_: bool) -> bool:
    """Return whether something is so on any rank of the job."""
    world = here()
    if world.size == 1:
        return here_
    with torch._C.DisableTorchFunction():
        told = torch.tensor([here_], dtype=torch.uint8)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=world.control)
        return bool(told)


def gather_object(value: T) -> list[T]:
    """Every rank's value, on the first rank of the job; nothing on the others."""
    world = here()
    if world.size == 1 or world.played:
        return [value]
    group = world.control
    with torch._C.DisableTorchFunction():
        data = packed(value)
        rows = _rows(len(data).to_bytes(_LENGTH, "little"), _LENGTH, group)
        sizes = [int.from_bytes(row, "little") for row in rows]
        mine = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        if world.rank:
            dist.gather(mine, None, number(0), group)
            return []
        everyone = [torch.empty_like(mine) for _ in sizes]
        dist.gather(mine, everyone, number(0), group)
        return [pickle.loads(one[:n].numpy().tobytes()) for one, n in zip(everyone, sizes)]


def broadcast_object(source: int, value: T) -> T:
    """The value of one rank, on all ranks of the job."""
    world = here()
    if world.size == 1 or world.played:
        return value
    with torch._C.DisableTorchFunction():
        sent: list[Any] = [packed(value) if rank() == source else None]
        dist.broadcast_object_list(sent, src=number(source), group=world.control)
        found: T = value if rank() == source else pickle.loads(sent[0])
    return found


def all_gather_tensors(value: T, group: ProcessGroup, device: torch.device) -> list[T]:
    """Gather as `all_gather_object`, but send tensors from the device of ranks, in one message."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        data, flat = taken_out(value, device)
        told = all_gather_object((data, flat.numel()), group)
        most = max(size for _, size in told)
        everyone = flat.new_empty(len(told) * most)
        if most:
            mine = torch.nn.functional.pad(flat, (0, most - flat.numel()))
            getattr(dist, GATHER)(everyone, mine, group=group)
        rows = everyone.view(len(told), most)
        return [put_back(data, row) for (data, _), row in zip(told, rows)]


def broadcast_tensors(source: int, value: T, device: torch.device) -> T:
    """Send as `broadcast_object`, but tensors as `all_gather_tensors` sends them."""
    world = here()
    if world.size == 1:
        return value
    with torch._C.DisableTorchFunction(), torch.no_grad():
        data, flat = taken_out(value if rank() == source else None, device)
        data, size = broadcast_object(source, (data, flat.numel()))
        flat = flat if rank() == source else flat.new_empty(size)
        if size:
            dist.broadcast(flat, src=number(source), group=world.group)
        return value if rank() == source else put_back(data, flat)


def _serves_host(group: ProcessGroup | None) -> bool:
    """Return whether tensors of the host can be given to a group."""
    told = dist.get_backend_config(group).split(",")
    return any(one.startswith(f"{devices.HOST.type}:") for one in told)


def _exchanged(data: bytes, group: ProcessGroup | None) -> list[bytes]:
    """Every rank's bytes: in one message with their length where they are few on all ranks.

    torch gathers the lengths first, always; most of what ranks tell each other is short.
    """
    told = _rows(len(data).to_bytes(_LENGTH, "little") + data[:_SHORT], _LENGTH + _SHORT, group)
    lengths = [int.from_bytes(row[:_LENGTH], "little") for row in told]
    if max(lengths) <= _SHORT:
        return [row[_LENGTH : _LENGTH + length] for row, length in zip(told, lengths)]
    return [row[:length] for row, length in zip(_rows(data, max(lengths), group), lengths)]


def _rows(data: bytes, size: int, group: ProcessGroup | None) -> list[bytes]:
    """Bytes of every rank, with zeros behind them up to a size that is the same on all ranks."""
    mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    count = dist.get_world_size(group)
    everyone = mine.repeat(count)  # where a rank plays alone, all say the same
    getattr(dist, GATHER)(everyone, mine, group=group)
    told = everyone.numpy().tobytes()
    return [told[size * place : size * (place + 1)] for place in range(count)]


def all_gather_numbers(row: Sequence[float], group: ProcessGroup) -> list[list[float]]:
    """Gather a row of numbers from every rank of a group that serves the host."""
    here_ = torch.tensor([[*row]], dtype=torch.float64)
    told = here_.new_empty(dist.get_world_size(group), len(row))
    getattr(dist, GATHER)(told, here_, group=group)
    found: list[list[float]] = told.tolist()
    return found
