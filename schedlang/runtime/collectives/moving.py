"""Differentiable collectives that move parts between ranks and add nothing up: all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.runtime.collectives.collective import Group, count, room


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
