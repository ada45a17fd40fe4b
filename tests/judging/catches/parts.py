"""Collectives with gradients, as tensor and expert parallel programs write them by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def total(x: Tensor) -> Tensor:
    """Sum over ranks."""
    x = x.clone()
    dist.all_reduce(x)
    return x


def everyone(x: Tensor, dim: int = 0) -> Tensor:
    """Lay what all ranks have side by side."""
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks())]
    dist.all_gather(found, x.contiguous())
    return torch.cat(found, dim)


def own(x: Tensor, dim: int = 0) -> Tensor:
    """This rank's part."""
    return x.chunk(ranks(), dim)[dist.get_rank()].clone()


def ranks() -> int:
    """How many there are."""
    return dist.get_world_size()


def split(layer: nn.Module, name: str, dim: int = 0) -> None:
    """Keep only this rank's part of a parameter."""
    setattr(layer, name, nn.Parameter(own(getattr(layer, name).detach(), dim)))


class Copied(torch.autograd.Function):
    """Go into a split region: backward sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same on all ranks."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The sum."""
        return total(grad)


class Summed(torch.autograd.Function):
    """Come out of a split region: forward sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The sum."""
        return total(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The same on all ranks."""
        return grad.clone()


class Gathered(torch.autograd.Function):
    """Lay parts side by side for what all ranks compute alike: backward keeps this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        """All parts."""
        ctx.dim = dim
        return everyone(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """This rank's."""
        return own(grad, ctx.dim), None


class Taken(torch.autograd.Function):
    """Take this rank's part of what all ranks have: backward lays the parts side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        """This rank's."""
        ctx.dim = dim
        return own(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """All parts."""
        return everyone(grad, ctx.dim), None


class Dispatched(torch.autograd.Function):
    """Give every rank the rows of all: backward sums what they did with a row, at its owner."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """All rows."""
        return everyone(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """This rank's rows of the sum."""
        return own(total(grad))


class Combined(torch.autograd.Function):
    """Sum what ranks computed for each row, at its owner: backward sends it to all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """This rank's rows of the sum."""
        return own(total(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """All rows."""
        return everyone(grad)


class AllWords(torch.autograd.Function):
    """Lay the words of ranks side by side: backward sums what ranks did with this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Words of all."""
        return everyone(x, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The sum for this rank's."""
        return own(total(grad), 1)


def of_vocabulary(scores: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Sum exponentials over a split vocabulary: the log, and the score of what is wanted."""
    size = scores.shape[-1]
    most = scores.detach().amax(-1)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    log_sum = Summed.apply((scores - most[..., None]).exp().sum(-1)).log() + most
    place = wanted - dist.get_rank() * size
    here = (place >= 0) & (place < size)
    picked = scores.gather(-1, place.clamp(0, size - 1)[..., None])[..., 0] * here
    return log_sum, Summed.apply(picked)


def average(module: nn.Module, but: tuple[str, ...] = ()) -> None:
    """Average the gradients of all parameters over ranks, but for those of the given names."""
    for name, p in module.named_parameters():
        if p.grad is not None and name not in but:
            p.grad = total(p.grad) / ranks()
