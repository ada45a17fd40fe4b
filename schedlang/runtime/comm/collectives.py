"""Differentiable collectives over one group of ranks; each counts what it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.runtime.comm.world import GATHER, SCATTER, number
from schedlang.runtime.device import HOST

# ---- Differentiable collectives over one group of ranks; each counts what it sends.
# `enter`/`reduce` are the conjugate pair f and g of Megatron-LM (Shoeybi et al. 2019), `gather`/
# `scatter_sum` the pair of its sequence parallelism (Korthikanti et al. 2022).


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


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over the group, a new tensor."""
    out = x.clone(memory_format=torch.contiguous_format)
    count("all-reduce", group, out)
    if group.pg is not None:
        dist.all_reduce(out, group=group.pg)
    return out


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


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # a new tensor: autograd may hand the same gradient to another branch
        return all_reduce(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, consumers_differ: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.differ = dim, group, consumers_differ
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back = reduce_scatter if ctx.differ else own_part
        return back(grads[0], ctx.dim, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, pending: bool) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group) if pending else own_part(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return all_gather(grads[0], ctx.dim, ctx.group), None, None, None


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


# ---- Differentiable collectives that move parts between ranks and add nothing up: all-to-all.


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
        return exchanged(grads[0], ctx.group, ctx.take, ctx.give), None, None, None


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


# ---- A sum over ranks whose gradients are summed as well: every rank's loss depends on the
# total.


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
        return all_reduce(grads[0], ctx.group), None


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum of `x` over the ranks of a group, whose gradients are summed too."""
    return cast(Tensor, Total.apply(x, group))  # type: ignore[no-untyped-call]
