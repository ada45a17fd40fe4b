"""Groups of ranks along axes of the mesh, and differentiable collectives over one of them.

* Differentiable collectives over one group of ranks; each counts what it sends. `enter`/`reduce`
  are the conjugate pair f and g of Megatron-LM (Shoeybi et al. 2019), `gather`/ `scatter_sum` the
  pair of its sequence parallelism (Korthikanti et al. 2022).
* Differentiable collectives that move parts between ranks and add nothing up: all-to-all.
* A sum over ranks whose gradients are summed as well: every rank's loss depends on the total.
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

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal, guess, unknown
from schedlang.ir.mesh import Mesh
from schedlang.runtime import device as devices
from schedlang.runtime.adapters.torch_compile import fresh
from schedlang.runtime.comm import world as comm
from schedlang.runtime.comm.world import GATHER, SCATTER, number
from schedlang.runtime.device import HOST


@dataclass(frozen=True)
class Group:
    """The ranks along some mesh axes that this rank talks to.

    `ranks` are global ranks in mesh order, `rank` the place of this one among them.  Without a
    process group (`pg` None) collectives only give tensors of the right shape: a dry run.
    `order`: the places in the process group of the ranks, where they are not in mesh order.
    `device`: where the tensors lie that it is given.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    rank: int
    pg: dist.ProcessGroup | None = None
    label: str = ""  # whose collectives these are, for those who listen
    order: tuple[int, ...] = ()
    device: torch.device = field(default=HOST, compare=False)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)


Listener = Callable[[str, "Group", int], None]
_listeners: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener(kind, group, bytes)` at each collective; the bytes of the whole tensor."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def count(kind: str, group: Group, whole: Tensor) -> None:
    """Tell whoever listens of a collective on `whole`."""
    for listener in _listeners:
        listener(kind, group, whole.numel() * whole.element_size())


# -- plain collectives: new tensor out, input untouched -------------------------------------------


def room(x: Tensor, shape: Sequence[int], group: Group) -> Tensor:
    """A tensor of this shape for what a group makes of `x`.

    In a dry run it is written from `x`: who follows which values are read of which sees that this
    one is made of that one.
    """
    out = x.new_empty(shape)
    if group.pg is None and x.numel():
        out.copy_(x.detach().flatten()[:1])
    return out


@fresh
def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over the group, a new tensor."""
    out = x.clone(memory_format=torch.contiguous_format)
    count("all-reduce", group, out)
    if group.pg is not None:
        dist.all_reduce(out, group=group.pg)
    return out


@fresh
def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """The tensors of all ranks side by side along `dim`, in group order."""
    x = x.contiguous()
    out = room(x, (group.size * x.shape[0], *x.shape[1:]) if x.ndim else (group.size,), group)
    count("all-gather", group, out)
    if group.pg is not None:
        getattr(dist, GATHER)(out, x, group=group.pg)
    if dim % x.ndim == 0 and not group.order:
        return out
    parts = out.chunk(group.size)
    return torch.cat([parts[place] for place in group.order] if group.order else parts, dim)


@fresh
def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part along `dim` of the sum over the group."""
    parts = x
    if dim % x.ndim or group.order:
        pieces = x.chunk(group.size, dim)
        places = [group.order.index(k) for k in range(group.size)] if group.order else ()
        parts = torch.cat([pieces[part] for part in places] if places else pieces)
    out = room(x, (parts.shape[0] // group.size, *parts.shape[1:]), group)
    count("reduce-scatter", group, x)
    if group.pg is not None:
        getattr(dist, SCATTER)(out, parts.contiguous(), group=group.pg)
    return out


@fresh
def broadcast(x: Tensor, source: int, group: Group) -> Tensor:
    """The tensor of the rank at place `source`; of the others' only shape and dtype matter."""
    # a new tensor at the source too: a recomputation that keeps results writes them into it
    own = group.rank == source
    out = x.clone(memory_format=torch.contiguous_format) if own else x.new_empty(x.shape)
    count("broadcast", group, out)
    if group.pg is not None:
        dist.broadcast(out, src=number(group.ranks[source]), group=group.pg)
    return out


def reduce_to(x: Tensor, target: int, group: Group) -> Tensor | None:
    """The sum over the group, at the rank at place `target`; None at the others."""
    out = x.clone(memory_format=torch.contiguous_format)
    count("reduce", group, out)
    if group.pg is not None:
        dist.reduce(out, dst=number(group.ranks[target]), group=group.pg)
    return out if group.rank == target else None


def own_part(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's equal part of `x` along `dim`."""
    return x.chunk(group.size, dim)[group.rank].contiguous()


# -- differentiable crossings between what all ranks hold alike and what each holds a part of -----
# A backward that is derived once more (a penalty on gradients) crosses back by their conjugates.


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # a new tensor: autograd may hand the same gradient to another branch
        back = reduce if torch.is_grad_enabled() else all_reduce
        return back(grads[0], ctx.group), None


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
            back = scatter_sum if ctx.differ else split
        else:
            back = reduce_scatter if ctx.differ else own_part
        return back(grads[0], ctx.dim, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, pending: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.pending = dim, group, pending
        return reduce_scatter(x, dim, group) if pending else own_part(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():
            whole = gather(grads[0], ctx.dim, ctx.group, consumers_differ=ctx.pending)
        else:
            whole = all_gather(grads[0], ctx.dim, ctx.group)
        return whole, None, None, None


# those of one kind each, that add nothing up over another axis and move nothing
PLAIN = (_Enter, _Reduce, _Gather, _Scatter)


def enter(x: Tensor, group: Group) -> Tensor:
    """Enter a region where ranks differ with a tensor alike on all: backward sums its gradients."""
    return cast(Tensor, _Enter.apply(x, group))  # type: ignore[no-untyped-call]


def reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' parts, alike on all: backward passes the gradient on."""
    return cast(Tensor, _Reduce.apply(x, group))  # type: ignore[no-untyped-call]


def gather(x: Tensor, dim: int, group: Group, *, consumers_differ: bool) -> Tensor:
    """All parts side by side along `dim`.

    consumers_differ: what follows differs by rank, so backward sums (reduce-scatter); otherwise
    every rank computes the same gradient and keeps its part.
    """
    return cast(Tensor, _Gather.apply(x, dim, group, consumers_differ))  # type: ignore[no-untyped-call]


def scatter_sum(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part of the sum of the ranks' tensors."""
    return cast(Tensor, _Scatter.apply(x, dim, group, True))  # type: ignore[no-untyped-call]


def split(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part of a tensor that is alike on all ranks: backward gathers."""
    return cast(Tensor, _Scatter.apply(x, dim, group, False))  # type: ignore[no-untyped-call]


@fresh
def exchanged(
    x: Tensor, group: Group, give: Sequence[int] = (), take: Sequence[int] = ()
) -> Tensor:
    """Rows of `x` to the ranks of a group, in group order, and the rows that they give to this one.

    `give` and `take` count the rows for each rank; without them all get equal shares.  Without a
    process group (a dry run) only the shape is right.
    """
    rows = sum(take) if take else x.shape[0]
    out = room(x, (rows, *x.shape[1:]), group)
    count("all-to-all", group, x)
    if group.pg is not None:
        dist.all_to_all_single(
            out, x.contiguous(), list(take) or None, list(give) or None, group=group.pg
        )
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, give: Sequence[int], take: Sequence[int]
    ) -> Tensor:
        ctx.group, ctx.give, ctx.take = group, give, take
        return exchanged(x, group, give, take)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back = exchange if torch.is_grad_enabled() else exchanged
        return back(grads[0], ctx.group, ctx.take, ctx.give), None, None, None


def exchange(x: Tensor, group: Group, give: Sequence[int] = (), take: Sequence[int] = ()) -> Tensor:
    """The same, and gradients go back the way that their rows came."""
    return cast(Tensor, _Exchange.apply(x, group, give, take))  # type: ignore[no-untyped-call]


def switch(x: Tensor, held: int, wanted: int, group: Group) -> Tensor:
    """A part along dim `held`, with all of dim `wanted`, for a part of `wanted` with all of `held`.

    One all-to-all of what a rank holds, and one back (Zhao et al.: DSP, Dynamic Sequence
    Parallelism, 2024); gradients go back the way that their numbers came.
    """
    parts = torch.cat([part.flatten() for part in x.chunk(group.size, wanted)])
    came = exchange(parts.view(group.size, -1), group)
    shape = [*x.shape]
    shape[wanted] //= group.size
    return torch.cat([part.view(shape) for part in came.unbind(0)], held)


class Total(torch.autograd.Function):
    """The sum over ranks, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """Sum a tensor over the ranks of a group."""
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Each rank used the total for its own rows or positions."""
        back = summed if torch.is_grad_enabled() else all_reduce
        return back(grads[0], ctx.group), None


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum of `x` over the ranks of a group, whose gradients are summed too."""
    return cast(Tensor, Total.apply(x, group))  # type: ignore[no-untyped-call]


T = TypeVar("T")


class Ranks:
    """All that a program knows of whom it talks to; made once, when it is built.

    device  where this rank computes: collectives of a step are given tensors that lie there
    world   the job: its backends, its time-out, and a group for facts of the host

    Groups are made when first asked for: all ranks must ask for the same ones in the same order.
    """

    def __init__(self, mesh: Mesh, device: torch.device = devices.HOST) -> None:
        self.world = comm.here()
        if self.world.size != mesh.world:
            raise Refusal(_wrong_world(mesh, self.world.size))
        served = self.world.backends
        if served and device != HOST and served.get(device.type) is None:
            raise Refusal(_unserved(device, served))
        self.mesh, self.device = mesh, device
        self.rank = self.world.rank
        self.at = mesh.coordinates(self.rank)
        self._along: dict[tuple[str, ...], Group] = {}  # asked for by every sharded module

    def place(self, axis: str) -> int:
        """The place of this rank along an axis or a view, from 0; refuses others (S204)."""
        if axis not in self.mesh.names:
            raise Refusal.of(
                "S204",
                f"the mesh has no axis `{axis}`",
                notes=(f"the mesh is {self.mesh}",),
                helps=(guess(axis, self.mesh.names, "it has"),) if self.mesh.names else (),
                facts=unknown(axis, self.mesh.names),
            )
        return self.mesh.index(self.rank, axis)

    def group(self, over: str | Sequence[str]) -> Group:
        """This rank's group along axes; a group of one has no process group."""
        name = (over,) if isinstance(over, str) else tuple(over)
        if name not in self._along:
            axes = self.mesh.fold(over)
            made = self._made(name, self.mesh.groups(axes), self.mesh.index_at(self.at, axes))
            if isinstance(over, str) and "." in over:  # numbered by the axes as they are named
                made = self._ordered(made, over)
            self._along[name] = made
        return self._along[name]

    def _ordered(self, group: Group, over: str) -> Group:
        """The same ranks, counted by the axes in the order in which they are named."""
        ranks = self.mesh.group(self.rank, over)
        if ranks == group.ranks:
            return group
        order = tuple(group.ranks.index(rank) for rank in ranks)
        return replace(group, ranks=ranks, rank=ranks.index(self.rank), order=order)

    def again(self, over: str | Sequence[str], purpose: str) -> comm.ProcessGroup | None:
        """A further process group over the same ranks, for traffic that waits for no other."""
        return self.world.made(self.mesh.groups(self.mesh.fold(over)), purpose)

    def between(self, over: str | Sequence[str], purpose: str = "") -> comm.ProcessGroup | None:
        """A process group over the same ranks, in which no pair's messages wait for another's."""
        return self.world.between(self.mesh.groups(self.mesh.fold(over)), purpose)

    def on_host(self, over: str | Sequence[str], purpose: str = "") -> comm.ProcessGroup | None:
        """A process group over the same ranks for facts of the host; None for a group of one."""
        groups = self.mesh.groups(self.mesh.fold(over))
        return self.world.on_host(groups, purpose) if len(groups[0]) > 1 else None

    @property
    def one_way(self) -> bool:
        """Whether messages of two ranks in both directions could stop each other in one group."""
        return self.world.queues(self.device)

    def subset(self, name: str, groups: Sequence[tuple[int, ...]]) -> Group | None:
        """This rank's group among disjoint ones that need not cover the world; None if in none."""
        mine = next((ranks for ranks in groups if self.rank in ranks), None)
        if mine is None:
            self.world.made(groups)
            return None
        return self._made((name,), groups, mine.index(self.rank))

    def _made(self, axes: tuple[str, ...], groups: Sequence[tuple[int, ...]], place: int) -> Group:
        mine = next(ranks for ranks in groups if self.rank in ranks)
        if max(map(len, groups)) == 1:
            return Group(axes, mine, place, device=self.device)
        made = self.world.made(groups)
        return Group(axes, mine, place, made if len(mine) > 1 else None, device=self.device)

    def device_mesh(self, shard: Sequence[str]) -> DeviceMesh:
        """A mesh for fully_shard, of a group made here."""
        inner = self.group(tuple(shard))
        assert inner.pg is not None
        return DeviceMesh.from_group(inner.pg, self.device.type, mesh_dim_names=("shard",))


@contextmanager
def on_ranks(ranks: Sequence[int] | None) -> Iterator[None]:
    """Make these ranks of the job the world, inside the block (S607); None: it stays as it is."""
    if ranks is None:
        yield
        return
    job = comm.job()
    part = tuple(ranks)
    fits = all(type(rank) is int and 0 <= rank < job.size for rank in part)
    fits = fits and part == tuple(sorted({*part}))
    if not fits or job.rank not in part:
        named = ", ".join(map(str, part)) or "none"
        legal = f"give some of 0 to {job.size - 1}, in ascending order"
        why = f"rank {job.rank} is none of them" if fits else legal
        title = f"a program for ranks {named} cannot be built here: {why}"
        helps = ("call `build(ranks=...)` on the ranks that it names, and on no others",)
        raise Refusal.of("S607", title, helps=helps)
    with comm.within(part):
        yield


def in_its_world(cls: type[T]) -> type[T]:
    """A program whose public methods run in its world, where that is a part of the job."""
    for name, found in list(vars(cls).items()):
        if isinstance(found, FunctionType) and not name.startswith("_"):
            setattr(cls, name, _in_world(found))
    return cls


def _in_world(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = self.assembly.ranks.world.part
        if not part:
            return method(self, *args, **kwargs)
        with comm.within(part):
            return method(self, *args, **kwargs)

    return run


def _wrong_world(mesh: Mesh, world: int) -> Diagnostic:
    run = f"torchrun --nproc-per-node {mesh.world} ..."
    return Diagnostic(
        "S607",
        f"the mesh needs {mesh.world} ranks, and this job has {world}",
        notes=(f"the mesh is {mesh}",),
        helps=(
            f"start {mesh.world}: `{run}`",
            f"or use a mesh of {world}: `--mesh dp={world}`",
        ),
    )


def _unserved(device: torch.device, backends: Mapping[str, str]) -> Diagnostic:
    own = {device.type: dist.get_default_backend_for_device(device)}
    all_of = {HOST.type: comm.HOSTS, **backends, **own}
    wanted = ",".join(f"{kind}:{name}" for kind, name in all_of.items())
    return Diagnostic(
        "S607",
        f"the process group does not serve `{device}`, the device of the model",
        notes=(f"it has {', '.join(f'{name} for {kind}' for kind, name in backends.items())}",),
        helps=(f'join it with `init_process_group("{wanted}")`',),
    )
