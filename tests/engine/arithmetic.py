"""Collectives computed in this process: outputs per rank from all ranks' inputs, in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Post:
    """One rank's part of a collective.

    `alike` holds what must be equal on all ranks besides the kind: shapes, dtypes, operation, root.
    """

    kind: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    alike: tuple[Any, ...] = ()
    op: Any = None
    root: int = 0
    splits: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))  # out, in


def _bitwise_op(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    bitwise: Callable[[Tensor, Tensor], Tensor] = getattr(torch, f"bitwise_{name}")
    return bitwise


_REDUCE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: _bitwise_op("and"),
    dist.ReduceOp.BOR: _bitwise_op("or"),
    dist.ReduceOp.BXOR: _bitwise_op("xor"),
}


def reduce_tensors(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """Reduce the tensors from first to last; returns a new tensor."""
    if op not in _REDUCE:
        raise NotImplementedError(f"{op} is not supported on threads (nor is it by gloo)")
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = _REDUCE[op](total, tensor)
    return total / len(tensors) if op == dist.ReduceOp.AVG else total


Posts = Sequence[Post]
Results = list[list[Tensor]]  # for each rank of the group, one for each of its outputs


def _all_reduce(posts: Posts) -> Results:
    sums = [reduce_tensors([p.inputs[k] for p in posts], posts[0].op) for k in _tensor_range(posts)]
    return [sums for _ in posts]


def _reduce(posts: Posts) -> Results:
    (total,) = _all_reduce(posts)[0]
    return [[total] if group_rank == p.root else [] for group_rank, p in enumerate(posts)]


def _broadcast(posts: Posts) -> Results:
    root = posts[0].root
    tensors = [t.clone() for t in posts[root].inputs]
    return [[] if group_rank == root else tensors for group_rank in range(len(posts))]


def _all_gather(posts: Posts) -> Results:
    everything = [p.inputs[k].clone() for p in posts for k in _tensor_range(posts)]
    return [everything for _ in posts]


def _all_gather_single(posts: Posts) -> Results:
    gathered = [torch.cat([p.inputs[k].reshape(-1) for p in posts]) for k in _tensor_range(posts)]
    return [gathered for _ in posts]


def _reduce_scatter(posts: Posts) -> Results:
    return [[reduce_tensors([p.inputs[k] for p in posts], posts[0].op)] for k in range(len(posts))]


def _reduce_scatter_single(posts: Posts) -> Results:
    sums = [
        reduce_tensors([p.inputs[k].reshape(-1) for p in posts], posts[0].op)
        for k in _tensor_range(posts)
    ]
    return [
        [total.chunk(len(posts))[group_rank] for total in sums] for group_rank in range(len(posts))
    ]


def _all_to_all(posts: Posts) -> Results:
    return [[p.inputs[group_rank].clone() for p in posts] for group_rank in range(len(posts))]


def _all_to_all_single(posts: Posts) -> Results:
    def parts(post: Post) -> Sequence[Tensor]:
        (tensor,) = post.inputs
        even = [tensor.shape[0] // len(posts)] * len(posts)
        return tensor.split(post.splits[1] or even)

    pieces = [parts(post) for post in posts]
    return [[torch.cat([s[group_rank] for s in pieces])] for group_rank in range(len(posts))]


def _gather(posts: Posts) -> Results:
    everything = [p.inputs[0].clone() for p in posts]
    return [everything if group_rank == p.root else [] for group_rank, p in enumerate(posts)]


def _scatter(posts: Posts) -> Results:
    tensors = posts[posts[0].root].inputs
    return [[tensors[group_rank].clone()] for group_rank in range(len(posts))]


def _barrier(posts: Posts) -> Results:
    return [[] for _ in posts]


def _tensor_range(posts: Posts) -> range:
    return range(len(posts[0].inputs))


COMPUTE: dict[str, Callable[[Posts], Results]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
}
