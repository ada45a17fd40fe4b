"""Collectives with gradients, as hand-written tensor and expert parallel programs use them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def rank_sum(x: Tensor) -> Tensor:
    """Return the sum over ranks."""
    x = x.clone()
    dist.all_reduce(x)
    return x


def gather_all(x: Tensor, dim: int = 0) -> Tensor:
    """Gather the tensors of all ranks and concatenate them along a dim."""
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world_size())
    ]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def local_part(x: Tensor, dim: int = 0) -> Tensor:
    """Return this rank's part along a dim."""
    return x.chunk(world_size(), dim)[dist.get_rank()].clone()


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size()


def shard_param(layer: nn.Module, name: str, dim: int = 0) -> None:
    """Replace a parameter by this rank's part of it."""
    setattr(layer, name, nn.Parameter(local_part(getattr(layer, name).detach(), dim)))


class CopyToSplit(torch.autograd.Function):
    """Enter a split region: forward copies, backward all-reduces."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same on all ranks."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The sum."""
        return rank_sum(grad)


class ReduceFromSplit(torch.autograd.Function):
    """Leave a split region: forward all-reduces, backward copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The sum."""
        return rank_sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The same on all ranks."""
        return grad.clone()


class GatherFromSplit(torch.autograd.Function):
    """Gather parts for a computation that all ranks repeat: backward keeps this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        """All parts."""
        ctx.dim = dim
        return gather_all(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """This rank's."""
        return local_part(grad, ctx.dim), None


class ScatterToSplit(torch.autograd.Function):
    """Take this rank's part of a replicated tensor: backward gathers the parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        """This rank's."""
        ctx.dim = dim
        return local_part(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """All parts."""
        return gather_all(grad, ctx.dim), None


class Dispatch(torch.autograd.Function):
    """Give every rank the rows of all: backward reduce-scatters the gradients to the owners."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """All rows."""
        return gather_all(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """This rank's rows of the sum."""
        return local_part(rank_sum(grad))


class Combine(torch.autograd.Function):
    """Reduce-scatter what ranks computed for each row: backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """This rank's rows of the sum."""
        return local_part(rank_sum(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """All rows."""
        return gather_all(grad)


class GatherTokens(torch.autograd.Function):
    """Gather the tokens of all ranks: backward reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The tokens of all ranks."""
        return gather_all(x, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The sum for this rank's tokens."""
        return local_part(rank_sum(grad), 1)


def vocab_log_sum(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp over a split vocabulary, and the scores of the targets."""
    size = scores.shape[-1]
    maximum = scores.detach().amax(-1)
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    log_sum = ReduceFromSplit.apply((scores - maximum[..., None]).exp().sum(-1)).log() + maximum
    index = targets - dist.get_rank() * size
    is_local = (index >= 0) & (index < size)
    picked = scores.gather(-1, index.clamp(0, size - 1)[..., None])[..., 0] * is_local
    return log_sum, ReduceFromSplit.apply(picked)


def average_grads(module: nn.Module, but: tuple[str, ...] = ()) -> None:
    """Average the gradients of all parameters over ranks, except those named in `but`."""
    for name, p in module.named_parameters():
        if p.grad is not None and name not in but:
            p.grad = rank_sum(p.grad) / world_size()
