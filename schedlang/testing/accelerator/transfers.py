"""What moves the data of the simulated collective library: gloo, on bytes of copies on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

Finish = Callable[[], None]  # once gloo is done
Started = tuple[list[Any], Finish]  # the works of gloo, and what is left to do then


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def _nothing() -> None:
    pass


_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.uint8,
}


def all_reduce(gloo: Any, size: int, tensor: Tensor, op: Any) -> tuple[list[Any], Finish, Tensor]:
    """The reduction, in a tensor of its own that `Finish` fills to the end."""
    kinds: Any = dist.ReduceOp.RedOpType
    kind = op.op if hasattr(op, "op") else op
    average = kind == kinds.AVG
    if kind == kinds.PREMUL_SUM:
        raise NotImplementedError("simccl: PREMUL_SUM is not simulated")
    made = tensor.to(_WIDER.get(tensor.dtype, tensor.dtype), copy=True).view(-1)
    options: Any = c10d.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM if average else op
    works = [gloo.allreduce([made], options)] if made.numel() else []

    def finish() -> None:
        if average:
            if made.is_floating_point() or made.is_complex():
                made.div_(size)
            else:
                made.copy_(made.div(size, rounding_mode="trunc"))

    return works, finish, made


def reduced(
    gloo: Any, size: int, ins: Sequence[Tensor], outs: Sequence[Tensor], op: Any
) -> Started:
    """all_reduce of each."""
    return _reduced(gloo, size, ins, outs, op, lambda y: slice(y.numel()))


def reduce_scattered(
    gloo: Any, rank: int, size: int, ins: Sequence[Tensor], outs: Sequence[Tensor], op: Any
) -> Started:
    """The part of this rank of each sum."""

    def own(y: Tensor) -> slice:
        return slice(rank * y.numel(), (rank + 1) * y.numel())

    return _reduced(gloo, size, ins, outs, op, own)


def _reduced(
    gloo: Any,
    size: int,
    ins: Sequence[Tensor],
    outs: Sequence[Tensor],
    op: Any,
    part: Callable[[Tensor], slice],
) -> Started:
    """all_reduce of each; an output receives its part of the elements."""
    works: list[Any] = []
    ends = []
    for x, y in zip(ins, outs):
        some, finish, made = all_reduce(gloo, size, x, op)
        works += some
        ends.append((finish, made, y))

    def finish_all() -> None:
        for finish, made, y in ends:
            finish()
            y.view(-1).copy_(made[part(y)])

    return works, finish_all


def reduce_scattered_list(
    gloo: Any, rank: int, size: int, ins: Sequence[Tensor], out: Tensor, op: Any
) -> Started:
    """The same for a list of inputs, which may differ in their sizes."""
    whole = torch.cat([t.reshape(-1) for t in ins])
    works, finish, made = all_reduce(gloo, size, whole, op)
    start = sum(t.numel() for t in ins[:rank])

    def finish_all() -> None:
        finish()
        out.view(-1).copy_(made[start : start + out.numel()])

    return works, finish_all


def broadcast(gloo: Any, ins: Sequence[Tensor], outs: Sequence[Tensor], root: int) -> Started:
    """Each tensor of the root."""
    options = c10d.BroadcastOptions()
    options.rootRank = root
    works = []
    for x, y in zip(ins, outs):
        y.copy_(x)
        works += [gloo.broadcast([_flat(y)], options)] if y.numel() else []
    return works, _nothing


def gathered(gloo: Any, x: Tensor, outs: Sequence[Tensor]) -> Started:
    """all_gather into a list, whose tensors may differ in their sizes."""
    if any(y.numel() != x.numel() for y in outs):
        works = []
        for root, y in enumerate(outs):
            if root == gloo.rank():
                y.view(-1).copy_(x.view(-1))
            works += broadcast(gloo, [y], [y], root)[0]
        return works, _nothing
    if not x.numel():
        return [], _nothing
    return [gloo.allgather([[_flat(y) for y in outs]], [_flat(x)])], _nothing


def gathered_into(gloo: Any, size: int, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> Started:
    """all_gather of each into one tensor."""
    works = []
    for x, y in zip(ins, outs):
        if x.numel():
            works.append(gloo.allgather([list(_flat(y).chunk(size))], [_flat(x)]))
    return works, _nothing


def exchanged(
    gloo: Any, x: Tensor, y: Tensor, sent: Sequence[int], received: Sequence[int]
) -> Started:
    """all_to_all of parts of so many bytes, one after the other."""
    options = c10d.AllToAllOptions()
    return [gloo.alltoall_base(_flat(y), _flat(x), list(received), list(sent), options)], _nothing


def gathered_at(gloo: Any, x: Tensor, outs: Sequence[Tensor], root: int) -> Started:
    """gather at the root."""
    options = c10d.GatherOptions()
    options.rootRank = root
    lists = [[_flat(y) for y in outs]] if outs else []
    return [gloo.gather(lists, [_flat(x)], options)], _nothing


def scattered(gloo: Any, ins: Sequence[Tensor], y: Tensor, root: int) -> Started:
    """scatter from the root."""
    options = c10d.ScatterOptions()
    options.rootRank = root
    lists = [[_flat(x) for x in ins]] if ins else []
    return [gloo.scatter([_flat(y)], lists, options)], _nothing


def send(gloo: Any, tensor: Tensor, peer: int, tag: int) -> Any:
    """Start to send bytes."""
    return gloo.send([_flat(tensor)], peer, tag)


def receive(gloo: Any, tensor: Tensor, peer: int, tag: int) -> Any:
    """Start to receive bytes."""
    return gloo.recv([_flat(tensor)], peer, tag)
