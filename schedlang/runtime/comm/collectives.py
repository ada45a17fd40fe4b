"""Groups of ranks along mesh axes, and differentiable collectives over one of them.

* Differentiable collectives over one group of ranks; each reports the bytes that it sends. `enter`
  and `reduce` are the conjugate pair f and g of Megatron-LM (Shoeybi et al. 2019), `gather` and
  `scatter_sum` the pair of its sequence parallelism (Korthikanti et al. 2022).
* Differentiable collectives that move shards between ranks without a sum: all-to-all.
* An all-reduce whose gradients are all-reduced too: every rank's loss depends on the total.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir.mesh import Mesh
from schedlang.runtime import device as devices
from schedlang.runtime.adapters.torch_compile import returns_new_tensor
from schedlang.runtime.comm import world as comm
from schedlang.runtime.comm.world import ALL_GATHER, REDUCE_SCATTER, job_rank
from schedlang.runtime.device import HOST


@dataclass(frozen=True)
class Group:
    """The ranks along some mesh axes that this rank communicates with.

    ranks   global ranks in mesh order
    rank    the index of this rank among them
    pg      the process group; None: a dry run, collectives only return tensors of the right shape
    label   the module that issues the collectives, for listeners
    order   the places of the ranks in the process group, if they are not in mesh order
    device  the device of the tensors
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    rank: int
    pg: dist.ProcessGroup | None = None
    label: str = ""  # the module that issues its collectives, for listeners
    order: tuple[int, ...] = ()
    device: torch.device = field(default=HOST, compare=False)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)


Listener = Callable[[str, "Group", int], None]
_listeners: list[Listener] = []


@contextmanager
def listen_to_collectives(listener: Listener) -> Iterator[None]:
    """Call `listener(kind, group, bytes)` at each collective within the block; bytes of the full
    tensor."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def count(kind: str, group: Group, tensor: Tensor) -> None:
    """Report a collective on `tensor` to the listeners."""
    for listener in _listeners:
        listener(kind, group, tensor.numel() * tensor.element_size())


# -- plain collectives: they return a new tensor, the input does not change ------------------------


def output_like(x: Tensor, shape: Sequence[int], group: Group) -> Tensor:
    """Return a tensor of this shape for the result of a collective on `x`.

    In a dry run it is written from `x`, so that code which follows values sees that it depends on
    `x`.
    """
    out = x.new_empty(shape)
    if group.pg is None and x.numel():
        out.copy_(x.detach().flatten()[:1])
    return out


@returns_new_tensor
def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Return the sum over the group, a new tensor."""
    out = x.clone(memory_format=torch.contiguous_format)
    count("all-reduce", group, out)
    if group.pg is not None:
        dist.all_reduce(out, group=group.pg)
    return out


@returns_new_tensor
def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return the tensors of all ranks, concatenated along `dim` in group order."""
    x = x.contiguous()
    out = output_like(
        x, (group.size * x.shape[0], *x.shape[1:]) if x.ndim else (group.size,), group
    )
    count("all-gather", group, out)
    if group.pg is not None:
        getattr(dist, ALL_GATHER)(out, x, group=group.pg)
    if dim % x.ndim == 0 and not group.order:
        return out
    parts = out.chunk(group.size)
    return torch.cat([parts[index] for index in group.order] if group.order else parts, dim)


@returns_new_tensor
def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's shard along `dim` of the sum over the group."""
    parts = x
    if dim % x.ndim or group.order:
        chunks = x.chunk(group.size, dim)
        order = [group.order.index(k) for k in range(group.size)] if group.order else ()
        parts = torch.cat([chunks[part] for part in order] if order else chunks)
    out = output_like(x, (parts.shape[0] // group.size, *parts.shape[1:]), group)
    count("reduce-scatter", group, x)
    if group.pg is not None:
        getattr(dist, REDUCE_SCATTER)(out, parts.contiguous(), group=group.pg)
    return out


@returns_new_tensor
def broadcast(x: Tensor, source: int, group: Group) -> Tensor:
    """Return the tensor of the rank at index `source`; of others only shape and dtype are used."""
    # a new tensor at the source too: a recomputation that stores results writes them into it
    is_source = group.rank == source
    out = x.clone(memory_format=torch.contiguous_format) if is_source else x.new_empty(x.shape)
    count("broadcast", group, out)
    if group.pg is not None:
        dist.broadcast(out, src=job_rank(group.ranks[source]), group=group.pg)
    return out


def reduce_to(x: Tensor, target: int, group: Group) -> Tensor | None:
    """Return the sum over the group at the rank with index `target`; None at the others."""
    out = x.clone(memory_format=torch.contiguous_format)
    count("reduce", group, out)
    if group.pg is not None:
        dist.reduce(out, dst=job_rank(group.ranks[target]), group=group.pg)
    return out if group.rank == target else None


def local_shard(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's equal shard of `x` along `dim`."""
    return x.chunk(group.size, dim)[group.rank].contiguous()


# -- differentiable conversions between replicated and sharded or partial tensors ------------------
# A backward that is differentiated again (a penalty on gradients) uses the conjugates.


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # a new tensor: autograd may pass the same gradient to another branch
        collective = reduce if torch.is_grad_enabled() else all_reduce
        return collective(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return enter(grads[0], ctx.group) if torch.is_grad_enabled() else grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, consumers_differ: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.differ = dim, group, consumers_differ
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():
            collective = scatter_sum if ctx.differ else split
        else:
            collective = reduce_scatter if ctx.differ else local_shard
        return collective(grads[0], ctx.dim, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, pending: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.pending = dim, group, pending
        return reduce_scatter(x, dim, group) if pending else local_shard(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():
            gathered = gather(grads[0], ctx.dim, ctx.group, consumers_differ=ctx.pending)
        else:
            gathered = all_gather(grads[0], ctx.dim, ctx.group)
        return gathered, None, None, None


# functions with one kind of collective each, without a sum over another axis and without moves
PLAIN_FUNCTIONS = (_Enter, _Reduce, _Gather, _Scatter)


def enter(x: Tensor, group: Group) -> Tensor:
    """Enter a region where ranks differ with a replicated tensor: backward all-reduces its
    gradient."""
    return cast(Tensor, _Enter.apply(x, group))  # type: ignore[no-untyped-call]


def reduce(x: Tensor, group: Group) -> Tensor:
    """All-reduce a partial tensor to a replicated one: backward passes the gradient on."""
    return cast(Tensor, _Reduce.apply(x, group))  # type: ignore[no-untyped-call]


def gather(x: Tensor, dim: int, group: Group, *, consumers_differ: bool) -> Tensor:
    """All-gather shards along `dim`.

    `consumers_differ`: consumers of the result differ by rank, so backward is a reduce-scatter;
    otherwise every rank computes the same gradient and takes its shard.
    """
    return cast(Tensor, _Gather.apply(x, dim, group, consumers_differ))  # type: ignore[no-untyped-call]


def scatter_sum(x: Tensor, dim: int, group: Group) -> Tensor:
    """Reduce-scatter: return this rank's shard of the sum of the ranks' tensors."""
    return cast(Tensor, _Scatter.apply(x, dim, group, True))  # type: ignore[no-untyped-call]


def split(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's shard of a replicated tensor: backward is an all-gather."""
    return cast(Tensor, _Scatter.apply(x, dim, group, False))  # type: ignore[no-untyped-call]


@returns_new_tensor
def all_to_all_rows(
    x: Tensor, group: Group, sent: Sequence[int] = (), received: Sequence[int] = ()
) -> Tensor:
    """Send rows of `x` to the ranks of a group, in group order; return the rows received from them.

    `sent` and `received` are the numbers of rows for each rank; without them, rows are split
    equally. Without a process group (a dry run) only the shape is right.
    """
    rows = sum(received) if received else x.shape[0]
    out = output_like(x, (rows, *x.shape[1:]), group)
    count("all-to-all", group, x)
    if group.pg is not None:
        dist.all_to_all_single(
            out, x.contiguous(), list(received) or None, list(sent) or None, group=group.pg
        )
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        ctx.group, ctx.give, ctx.take = group, sent, received
        return all_to_all_rows(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        exchange = exchange_rows if torch.is_grad_enabled() else all_to_all_rows
        return exchange(grads[0], ctx.group, ctx.take, ctx.give), None, None, None


def exchange_rows(
    x: Tensor, group: Group, sent: Sequence[int] = (), received: Sequence[int] = ()
) -> Tensor:
    """Exchange rows like `all_to_all_rows`; the gradients of rows are sent back."""
    return cast(Tensor, _Exchange.apply(x, group, sent, received))  # type: ignore[no-untyped-call]


def switch_sharded_dim(x: Tensor, source_dim: int, target_dim: int, group: Group) -> Tensor:
    """Convert a shard along dim `source_dim` to a shard along dim `target_dim`.

    One all-to-all of the shard, and one in backward (Zhao et al.: DSP, Dynamic Sequence
    Parallelism, 2024).
    """
    parts = torch.cat([part.flatten() for part in x.chunk(group.size, target_dim)])
    received = exchange_rows(parts.view(group.size, -1), group)
    shape = [*x.shape]
    shape[target_dim] //= group.size
    return torch.cat([part.view(shape) for part in received.unbind(0)], source_dim)


class TotalSum(torch.autograd.Function):
    """All-reduce in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """Sum a tensor over the ranks of a group."""
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients: each rank used the total for its own rows or positions."""
        collective = sum_over_ranks if torch.is_grad_enabled() else all_reduce
        return collective(grads[0], ctx.group), None


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Return the sum of `x` over the ranks of a group; gradients are summed too."""
    return cast(Tensor, TotalSum.apply(x, group))  # type: ignore[no-untyped-call]


T = TypeVar("T")


class RankGroups:
    """The groups of ranks that a program communicates with; made once, when it is built.

    device  where this rank computes: collectives of a step get tensors on this device
    world   the job: its backends, its timeout, and a group for host data
    Groups are made at their first use: all ranks must use the same ones in the same order.
    """

    def __init__(self, mesh: Mesh, device: torch.device = devices.HOST) -> None:
        self.world = comm.current_world()
        if self.world.size != mesh.world:
            raise Refusal(_wrong_world(mesh, self.world.size))
        served = self.world.backends
        if served and device != HOST and served.get(device.type) is None:
            raise Refusal(_unserved(device, served))
        self.mesh, self.device = mesh, device
        self.rank = self.world.rank
        self.at = mesh.coordinates(self.rank)
        self._along: dict[tuple[str, ...], Group] = {}  # looked up by every sharded module

    def coordinate(self, axis: str) -> int:
        """Return the coordinate of this rank along an axis or a view, from 0; refuses others
        (S204)."""
        if axis not in self.mesh.names:
            title, notes = f"the mesh has no axis `{axis}`", (f"the mesh is {self.mesh}",)
            raise Refusal.unknown("S204", title, axis, self.mesh.names, "it has", notes=notes)
        return self.mesh.index(self.rank, axis)

    def group(self, axis: str | Sequence[str]) -> Group:
        """Return this rank's group along axes; a group of one has no process group."""
        name = (axis,) if isinstance(axis, str) else tuple(axis)
        if name not in self._along:
            axes = self.mesh.fold(axis)
            group = self._made(name, self.mesh.groups(axes), self.mesh.index_at(self.at, axes))
            # numbered by the axes in the order of the name
            if isinstance(axis, str) and "." in axis:
                group = self._ordered(group, axis)
            self._along[name] = group
        return self._along[name]

    def _ordered(self, group: Group, axis: str) -> Group:
        """Return the group with ranks in the order of the axes as they are named."""
        ranks = self.mesh.group(self.rank, axis)
        if ranks == group.ranks:
            return group
        order = tuple(group.ranks.index(rank) for rank in ranks)
        return replace(group, ranks=ranks, rank=ranks.index(self.rank), order=order)

    def another_group(self, axis: str | Sequence[str], purpose: str) -> comm.ProcessGroup | None:
        """Return another process group of the same ranks, whose traffic waits for no other."""
        return self.world.make_group(self.mesh.groups(self.mesh.fold(axis)), purpose)

    def message_group(
        self, axis: str | Sequence[str], purpose: str = ""
    ) -> comm.ProcessGroup | None:
        """Return a process group of the same ranks in which messages of pairs do not wait for each
        other."""
        return self.world.make_message_group(self.mesh.groups(self.mesh.fold(axis)), purpose)

    def host_group(self, axis: str | Sequence[str], purpose: str = "") -> comm.ProcessGroup | None:
        """Return a process group of the same ranks for host data; None for a group of one."""
        groups = self.mesh.groups(self.mesh.fold(axis))
        return self.world.host_group(groups, purpose) if len(groups[0]) > 1 else None

    @property
    def messages_may_deadlock(self) -> bool:
        """Whether messages in both directions between two ranks could deadlock in one group."""
        return self.world.orders_messages(self.device)

    def subset(self, name: str, groups: Sequence[tuple[int, ...]]) -> Group | None:
        """Return this rank's group among disjoint ones that need not cover the world; None if in
        none."""
        own = next((ranks for ranks in groups if self.rank in ranks), None)
        if own is None:
            self.world.make_group(groups)
            return None
        return self._made((name,), groups, own.index(self.rank))

    def _made(self, axes: tuple[str, ...], groups: Sequence[tuple[int, ...]], index: int) -> Group:
        own = next(ranks for ranks in groups if self.rank in ranks)
        if max(map(len, groups)) == 1:
            return Group(axes, own, index, device=self.device)
        pg = self.world.make_group(groups)
        return Group(axes, own, index, pg if len(own) > 1 else None, device=self.device)

    def device_mesh(self, shard: Sequence[str]) -> DeviceMesh:
        """Return a device mesh for fully_shard, from a group made here."""
        inner = self.group(tuple(shard))
        assert inner.pg is not None
        return DeviceMesh.from_group(inner.pg, self.device.type, mesh_dim_names=("shard",))


@contextmanager
def enter_given_ranks(ranks: Sequence[int] | None) -> Iterator[None]:
    """Make these ranks of the job the world, inside the block; None: no change. Raises Refusal
    S607."""
    if ranks is None:
        yield
        return
    job = comm.job_world()
    own_part = tuple(ranks)
    is_valid = all(type(rank) is int and 0 <= rank < job.size for rank in own_part)
    is_valid = is_valid and own_part == tuple(sorted({*own_part}))
    if not is_valid or job.rank not in own_part:
        given_text = ", ".join(map(str, own_part)) or "none"
        advice = f"give some of 0 to {job.size - 1}, in ascending order"
        reason = f"rank {job.rank} is none of them" if is_valid else advice
        message = f"a program for ranks {given_text} cannot be built here: {reason}"
        helps = ("call `build(ranks=...)` on the ranks that it names, and on no others",)
        raise Refusal.of("S607", message, helps=helps)
    with comm.enter_ranks(own_part):
        yield


def run_in_own_world(cls: type[T]) -> type[T]:
    """Decorate a class whose public methods run in the world of its program's ranks.

    A compiled loop of a user calls them eagerly: dynamo can trace no step.
    """
    for name, attribute in list(vars(cls).items()):
        if isinstance(attribute, FunctionType) and not name.startswith("_"):
            setattr(cls, name, _in_world(attribute))
    return cls


def _in_world(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = self.assembly.ranks.world.ranks_in_job
        if not part:
            return method(self, *args, **kwargs)
        with comm.enter_ranks(part):
            return method(self, *args, **kwargs)

    return torch.compiler.disable(run)  # type: ignore[no-untyped-call, no-any-return]


def _wrong_world(mesh: Mesh, world: int) -> Diagnostic:
    command = f"torchrun --nproc-per-node {mesh.world} ..."
    return Diagnostic(
        "S607",
        f"the mesh needs {mesh.world} ranks, and this job has {world}",
        notes=(f"the mesh is {mesh}",),
        helps=(
            f"start {mesh.world}: `{command}`",
            f"or use a mesh of {world}: `--mesh dp={world}`",
        ),
    )


def _unserved(device: torch.device, backends: Mapping[str, str]) -> Diagnostic:
    missing = {device.type: dist.get_default_backend_for_device(device)}
    all_of = {HOST.type: comm.HOST_BACKEND, **backends, **missing}
    backend_text = ",".join(f"{kind}:{name}" for kind, name in all_of.items())
    return Diagnostic(
        "S607",
        f"the process group does not serve `{device}`, the device of the model",
        notes=(f"it has {', '.join(f'{name} for {kind}' for kind, name in backends.items())}",),
        helps=(f'join it with `init_process_group("{backend_text}")`',),
    )
